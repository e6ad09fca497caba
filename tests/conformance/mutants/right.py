"""Right kernels with bits that depend on no other row, where the references make no such promise."""

from __future__ import annotations

from typing import Any

import torch
from deepinfer_hal.card import get_card
from deepinfer_hal.errors import BadCall
from deepinfer_hal.kernel import Kernel
from deepinfer_hal.ops import all_reduce

from tests.conformance.mutants._base import count_of, kernel


def linear(x, x_scale, weight, count, out, out_scale) -> None:
    """x W^T for dense x and out, each row by itself."""
    n = count_of({"count": count}, x.shape[0])
    if n:
        out[:n] = (x[:n, None].double() * weight.dequantise().double()).sum(-1).to(out.dtype)


def rms_norm(x, weight, eps, count, out, codes, scales, *, squares: Any = lambda wide: wide * wide) -> None:
    """Dense rows; `squares` gives what is averaged."""
    n = count_of({"count": count}, x.shape[0])
    wide = x[:n].double()
    out[:n] = (weight.double() * wide * torch.rsqrt(squares(wide).mean(-1, keepdim=True) + eps)).to(out.dtype)


def sparse_attention(*values: Any) -> None:
    """One query row after the other."""
    card = get_card("sparse_attention")
    args = dict(zip(card.arg_names, values, strict=True))
    for row in range(count_of(args, args["q"].shape[0])):
        per_row = {k: args[k][row : row + 1] for k in ("q", "rows", "row_to_req", "positions", "out") if args[k] is not None}
        card.reference(*{**args, **per_row, "count": None}.values())


def copy_all_reduce(comm, x, operation, out) -> None:
    """The sum over one rank, without an allocation."""
    if operation not in all_reduce.OPERATIONS:
        raise BadCall(f"operation {operation!r}")
    out.copy_(x)


def linear_kernel() -> Kernel:
    return kernel("linear", "by_rows", linear, "yes")


def norm_kernel() -> Kernel:
    return kernel("rms_norm", "in_float64", rms_norm, "yes")


def attention_kernel() -> Kernel:
    return kernel("sparse_attention", "by_rows", sparse_attention, "yes")


def compress_kernel() -> Kernel:
    return kernel("compress_kv", "nothing", get_card("compress_kv").reference, "yes")


def all_reduce_kernel() -> Kernel:
    return kernel("all_reduce", "copies", copy_all_reduce, "yes", capturable=True)
