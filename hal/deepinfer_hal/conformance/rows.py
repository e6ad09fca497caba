"""Which arguments of a card are per row of the row list (tokens, requests, samples), and calls cut to some rows.

A card's row dimension is the leading dimension that an output shares with an input. Few ops have rows that are not
independent problems; they are cut in their own way, or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from deepinfer_hal.card import OpCard

Args = Mapping[str, Any]

_ROW_DIM = {"copy_rows": "n", "compress_kv": "R", "permute": "T", "draft_attention": "R"}
"""Where the rule of the docstring would name another dimension."""

_COUPLED = frozenset({
    "grouped_gemm", "draft_attention", "compress_kv", "permute", "plan_verify_lengths", "mask_logits", "all_gather",
    "ep_dispatch", "ep_combine",
})  # fmt: skip
"""Ops whose row list cannot be cut by taking the same rows of every argument."""

_COUNT_NAMES = ("count", "rows")


def row_dim(card: OpCard) -> str:
    """Name of the leading dimension that counts rows."""
    if card.name in _ROW_DIM:
        return _ROW_DIM[card.name]
    inputs = [arg for arg in card.signature if arg.kind in ("in", "inout") and arg.dims and arg.dims[0].isidentifier()]
    shared = {arg.dims[0] for arg in inputs}
    for arg in card.signature:
        if arg.kind in ("out", "inout") and len(arg.dims) and arg.dims[0] in shared and arg.dims[0] != "_":
            if any(other.dims[0] == arg.dims[0] and other.name != arg.name for other in inputs):
                return arg.dims[0]
    return inputs[0].dims[0]


def row_args(card: OpCard, args: Args) -> list[str]:
    """Tensor arguments with one entry per row."""
    dim = row_dim(card)
    return [a.name for a in card.signature if a.is_tensor and a.dims[:1] == (dim,) and args[a.name] is not None]


def num_rows(card: OpCard, args: Args) -> int:
    """Rows of the row list, valid or not; none for an op without tensors."""
    if not any(arg.is_tensor for arg in card.signature):
        return 0
    return args[row_args(card, args)[0]].shape[0]


def count_arg(card: OpCard) -> str | None:
    """The argument that holds the device count of valid rows, if the card has one."""
    for arg in card.signature:
        if arg.name in _COUNT_NAMES and arg.kind == "in" and arg.dims == ("1",):
            return arg.name
    return None


def valid_rows(card: OpCard, args: Args) -> int:
    """Rows that count: all, or as many as the device count says."""
    name, total = count_arg(card), num_rows(card, args)
    if card.name == "grouped_gemm":
        return min(int(args["offsets"][-1]), total)
    if name is None or args[name] is None:
        return total
    return max(0, min(int(args[name][0]), total))


def is_row_wise(card: OpCard, args: Args) -> bool:
    """Whether `take_rows` makes a legal call: each row a problem of its own."""
    if card.name == "attention_decode_layer":  # a row reads the keys that earlier rows of its request wrote in the call
        owners = args["row_to_req"][: valid_rows(card, args)]
        return torch.unique(owners).numel() == owners.numel()
    return card.name not in _COUPLED


def take_rows(card: OpCard, args: Args, index: Sequence[int]) -> dict[str, Any]:
    """The call with only these rows, in this order, all of them valid; other arguments are shared, not copied."""
    chosen = torch.as_tensor(list(index), dtype=torch.int64)
    cut = dict(args)
    for name in row_args(card, args):
        cut[name] = args[name][chosen].clone()
    if count_arg(card) is not None:
        cut[count_arg(card)] = None
    if card.name == "swiglu_quantise" and args["source"] is not None:
        cut["rows"] = torch.tensor([len(chosen)], dtype=torch.int32)
    return cut


def with_count(card: OpCard, args: Args, count: int) -> dict[str, Any]:
    """The call with that many valid rows, for cards that have a device count."""
    return {**args, count_arg(card): torch.tensor([count], dtype=torch.int32)}
