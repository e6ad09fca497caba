"""ep_combine: expert rows back to the ranks of their tokens, and summed there (the way back of `ep_dispatch`).

out[t] = (sum over j = 0 .. k-1 of weights[t, j] * row of (t, j)) + shared[t], in FP32 in this order, rounded once:
`unpermute` at the token's rank. No bit depends on how many ranks there are, or on what other ranks hold.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from deepinfer_hal.card import COMM, COUNT, Case, OpCard, Tolerance, out, register, sum_tolerance, tensor
from deepinfer_hal.communicator import Communicator, SingleRank
from deepinfer_hal.errors import BadCall
from deepinfer_hal.ops import _common as c
from deepinfer_hal.ops import _communication as m
from deepinfer_hal.ops.unpermute import unpermute


def ep_combine(
    comm: Communicator,
    rows: torch.Tensor,
    received: torch.Tensor,
    source: torch.Tensor,
    inverse: torch.Tensor,
    weights: torch.Tensor | None,
    shared: torch.Tensor | None,
    count: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """rows [M, H] of this rank's experts, received i32 [1] = offsets[experts], source i32 [M, 2] and inverse i32 [T, k, 2]
    of `ep_dispatch`, weights f32 [T, k] (1 if None: rows are weighed already), shared [T, H] -> out [T, H].

    (-1, -1) in inverse adds nothing. Rows of `rows` from received on are not read. `count` may be smaller than it was in
    `ep_dispatch`: rows of later tokens come back and are dropped.
    Raises BadCall, with nothing written, if a row that inverse speaks of does not come back.
    """
    n = c.valid_rows(count, out.shape[0])
    total = int(received[0])
    to = source[:total, 0].cpu().numpy()
    send_rows = np.bincount(to, minlength=comm.world_size)
    told = np.array(comm.exchange(f"ep_combine({m.spell(rows, rows=False)})", send_rows.tolist()), dtype=np.int64)
    receive_rows = told[:, comm.rank]

    order = torch.from_numpy(np.argsort(to, kind="stable")).to(rows.device)
    records = torch.cat((m.row_bytes(rows[order]), m.row_bytes(source[order, 1])), dim=1)
    width = records.shape[1]
    back = torch.empty(int(receive_rows.sum()), width, dtype=torch.uint8, device=rows.device)
    comm.all_to_all(records.view(-1), (send_rows * width).tolist(), back.view(-1), (receive_rows * width).tolist())

    returned = m.from_row_bytes(back[:, :-4], rows.dtype)
    pairs = m.from_row_bytes(back[:, -4:], torch.int32)[:, 0]
    places = torch.from_numpy(_places(pairs.cpu().numpy(), inverse[:n].cpu().numpy())).to(rows.device)
    if weights is not None:
        returned = c.wide(returned) * c.wide(weights.reshape(-1)[pairs.long()])[:, None]
    unpermute(returned, places, None if shared is None else shared[:n], None, out[:n])


def _places(pairs: np.ndarray, inverse: np.ndarray) -> np.ndarray:
    """pairs int [rows] of t*k + j, inverse int [T, k, 2] -> int32 [T, k]: the row of each pair, or -1 if it went nowhere."""
    tokens, k = inverse.shape[:2]
    places, kept = np.full(tokens * k, -1, dtype=np.int32), pairs < tokens * k
    places[pairs[kept]] = np.flatnonzero(kept)
    places = places.reshape(tokens, k)
    awaited = inverse[..., 0] >= 0
    for t, j in np.argwhere(awaited & (places < 0)).tolist():
        rank, row = inverse[t, j].tolist()
        raise BadCall(f"ep_combine: choice {j} of token {t} went to row {row} of rank {rank}, but it did not come back")
    return np.where(awaited, places, -1)


def _cases() -> list[Case]:
    rows = [
        dict(T=0, H=256, k=2, dtype="bf16", shared=True),
        dict(T=1, H=256, k=2, dtype="bf16", shared=True),
        dict(T=33, H=256, k=2, dtype="bf16", shared=True, count=13, holes=True, spare=4),
        dict(T=33, H=64, k=2, dtype="f32", weights=True, holes=True),
        dict(T=3, H=5120, k=6, dtype="bf16", weights=True, shared=True),
        dict(T=4, H=64, k=2, dtype="bf16", shared=True, holes="all"),
    ]
    return [Case("ep_combine", row) for row in rows]


def _generate(case: Case, seed: int, device: Any, prepare: c.Prepare) -> dict[str, Any]:
    p, gen = case.params, c.generator(case, seed)
    tokens, k, hidden, dtype = p["T"], p["k"], p["H"], c.dtype_of(p["dtype"])
    valid = p.get("count", tokens) * k
    kept = torch.arange(valid)
    if p.get("holes"):
        kept = kept[torch.rand(valid, generator=gen) >= (1.0 if p["holes"] == "all" else 0.3)]
    pairs = kept[torch.randperm(kept.numel(), generator=gen)]  # the pair of each row
    room = tokens * k + p.get("spare", 0)
    source, inverse = torch.full((room, 2), -1), torch.full((tokens * k, 2), -1)
    source[: pairs.numel(), 0], source[: pairs.numel(), 1] = 0, pairs
    inverse[pairs, 0], inverse[pairs, 1] = 0, torch.arange(pairs.numel())
    return {
        "comm": SingleRank(),
        "rows": c.normal(gen, room, hidden, dtype=dtype, device=device),
        "received": c.count_tensor(pairs.numel(), device),
        "source": source.to(torch.int32).to(device),
        "inverse": inverse.view(tokens, k, 2).to(torch.int32).to(device),
        "weights": torch.rand(tokens, k, generator=gen).to(device) if p.get("weights") else None,
        "shared": c.normal(gen, tokens, hidden, dtype=dtype, device=device) if p.get("shared") else None,
        "count": c.count_tensor(p.get("count"), device),
        "out": c.poisoned(tokens, hidden, dtype=dtype, device=device),
    }


def _tolerance(args: dict[str, Any], name: str) -> Tolerance:
    return sum_tolerance(args["out"].dtype, args["inverse"].shape[1] + 1, c.largest(args["rows"]))


CARD = register(
    OpCard(
        name="ep_combine",
        group="communication",
        summary="Returns expert rows to their tokens' ranks and sums them there, in the order of the token's choices.",
        signature=(
            COMM,
            tensor("rows", "stream", "M H"),
            tensor("received", "i32", "1"),
            tensor("source", "i32", "M 2"),
            tensor("inverse", "i32", "T k 2"),
            tensor("weights", "f32", "T k", optional=True),
            tensor("shared", "stream", "T H", optional=True),
            COUNT,
            out("out", "stream", "T H"),
        ),
        reference=ep_combine,
        rounding="each product and the sum in the order j = 0 .. k-1, then shared, in FP32; one rounding to out's dtype",
        invariance="a token's bits depend on its own rows, weights and shared row, on no other token and no number of ranks",
        empty="a rank without tokens receives nothing, returns the rows of others, and all ranks finish",
        tolerance=_tolerance,
        enumerate_cases=_cases,
        generate=_generate,
    )
)
