"""What the cards of the communication group share: tensors as bytes, texts of calls, and the plan of an expert dispatch.

The plan is pure: expert ids and counts in, orders and rows out, as numpy arrays on the host.
"""

from __future__ import annotations

import numpy as np
import torch

_NAMES = {torch.bfloat16: "bf16", torch.float32: "f32", torch.uint8: "u8", torch.int32: "i32", torch.int64: "i64"}


def spell(x: torch.Tensor, *, rows: bool = True) -> str:
    """dtype and shape as they appear in the text of a call; without the leading size where ranks may differ in it."""
    shape = x.shape if rows else ("_", *x.shape[1:])
    return f"{_NAMES.get(x.dtype, x.dtype)}[{', '.join(map(str, shape))}]"


def row_bytes(x: torch.Tensor) -> torch.Tensor:
    """x [T, N] or [T] -> its bytes, u8 [T, N * size]."""
    rows = x.contiguous() if x.dim() == 2 else x.contiguous()[:, None]
    return rows if rows.dtype == torch.uint8 else rows.view(torch.uint8)


def from_row_bytes(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """u8 [T, N * size] -> [T, N] of `dtype`."""
    if dtype == torch.uint8:
        return rows
    return rows.clone(memory_format=torch.contiguous_format).view(dtype)  # a copy starts on a boundary of any dtype


def sort_pairs(ids: np.ndarray, experts: int) -> tuple[np.ndarray, np.ndarray]:
    """ids int [pairs] of (token, choice) pairs t*k + j -> (order, counts).

    order: the pairs with an expert in 0 .. experts-1, by expert, and in their own order for the same expert; counts:
    int64 [experts] pairs of each.
    """
    pairs = np.flatnonzero((ids >= 0) & (ids < experts))
    order = pairs[np.argsort(ids[pairs], kind="stable")]
    return order, np.bincount(ids[order], minlength=experts)


def arrivals(counts: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """counts int64 [world, P] of pairs that each rank sends to each expert -> what `rank`, with P / world experts, receives.

    Received rows come by source rank, then expert. Returns (order, sources, offsets): order[row] is where the row lies
    among those received, so that rows are by expert, then source rank; sources[row] its source rank; offsets [P/world + 1]
    the first row of each expert.
    """
    world = counts.shape[0]
    experts = counts.shape[1] // world
    mine = counts[:, rank * experts : (rank + 1) * experts]
    of_expert = np.repeat(np.tile(np.arange(experts), world), mine.reshape(-1))
    of_source = np.repeat(np.arange(world), mine.sum(1))
    order = np.argsort(of_expert, kind="stable")
    return order, of_source[order], np.concatenate(([0], np.cumsum(mine.sum(0))))


def landings(counts: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """(ranks, rows) at which the pairs of `rank`, in the order of `sort_pairs`, arrive."""
    world, total = counts.shape
    experts = total // world
    by_rank = counts.sum(0).reshape(world, experts)
    first = (np.cumsum(by_rank, axis=1) - by_rank).reshape(-1)  # of each expert, at its own rank
    first = first + counts[:rank].sum(0)  # after what lower ranks send it
    sent = counts[rank]
    expert = np.repeat(np.arange(total), sent)
    place = np.arange(expert.size) - np.repeat(np.cumsum(sent) - sent, sent)
    return expert // experts, first[expert] + place
