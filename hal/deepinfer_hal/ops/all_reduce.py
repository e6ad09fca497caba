"""all_reduce: the sum or maximum of a tensor over all ranks, on every rank.

The sum is taken in the order rank 0, 1, ... in FP32 and rounded once, so its bits are equal on every rank and from run
to run. int32 sums wrap.
"""

from __future__ import annotations

from typing import Any

import torch

from deepinfer_hal.card import COMM, Case, OpCard, Tolerance, out, register, scalar, sum_tolerance, tensor
from deepinfer_hal.communicator import Communicator, SingleRank
from deepinfer_hal.errors import BadCall
from deepinfer_hal.ops import _common as c
from deepinfer_hal.ops._communication import from_row_bytes, row_bytes, spell

OPERATIONS = ("sum", "max")


def all_reduce(comm: Communicator, x: torch.Tensor, operation: str, out: torch.Tensor) -> None:
    """x [T, N] of every rank, with the same shape -> out [T, N]; out may be x. operation: "sum" | "max"."""
    if operation not in OPERATIONS:
        raise BadCall(f"all_reduce: operation is {operation!r}; it must be {' or '.join(OPERATIONS)}")
    comm.exchange(f"all_reduce({operation}, {spell(x)})", ())
    mine = row_bytes(x).view(-1)
    every = torch.empty(comm.world_size, mine.numel(), dtype=torch.uint8, device=x.device)
    comm.all_gather(mine, every)
    parts = [from_row_bytes(part, x.dtype).view(x.shape) for part in every]
    if x.is_floating_point():
        parts = [c.wide(part) for part in parts]
    total = parts[0]
    for part in parts[1:]:
        total = total + part if operation == "sum" else torch.maximum(total, part)
    out.copy_(total)


def _cases() -> list[Case]:
    rows = [
        dict(T=0, N=64, x="bf16", operation="sum"),
        dict(T=1, N=5120, x="bf16", operation="sum"),
        dict(T=33, N=64, x="f32", operation="sum", strided=True),
        dict(T=3, N=384, x="i32", operation="sum"),
        dict(T=5, N=33, x="f32", operation="max"),
    ]
    return [Case("all_reduce", row) for row in rows]


def _generate(case: Case, seed: int, device: Any, prepare: c.Prepare) -> dict[str, Any]:
    p, gen = case.params, c.generator(case, seed)
    if p["x"] == "i32":
        x = c.integers(gen, -1000, 1000, p["T"], p["N"], device=device)
    else:
        x = c.normal(gen, p["T"], p["N"], dtype=c.dtype_of(p["x"]), device=device)
    out = c.poisoned(p["T"], p["N"], dtype=x.dtype, device=device)
    return {"comm": SingleRank(), "x": c.strided(x) if p.get("strided") else x, "operation": p["operation"], "out": out}


def _tolerance(args: dict[str, Any], name: str) -> Tolerance:
    """An FP32 sum over the ranks in any order, then one rounding; a maximum is exact."""
    if args["operation"] == "max" or not args["out"].is_floating_point():
        return Tolerance()
    return sum_tolerance(args["out"].dtype, args["comm"].world_size, c.largest(args["x"]))


def _check(args: dict[str, Any]) -> None:
    if args["operation"] not in OPERATIONS:
        raise BadCall(f"all_reduce: operation is {args['operation']!r}; it must be {' or '.join(OPERATIONS)}")
    if args["x"].dtype != args["out"].dtype:
        raise BadCall(f"all_reduce: out must have x's dtype {args['x'].dtype}, got {args['out'].dtype}")


CARD = register(
    OpCard(
        name="all_reduce",
        group="communication",
        summary="Sum or maximum of a tensor over all ranks, on every rank.",
        signature=(COMM, tensor("x", "number", "T N"), scalar("operation", "str"), out("out", "number", "T N")),
        reference=all_reduce,
        rounding="FP32 sum in the order of ranks, rounded once to out's dtype; max and int32 are exact",
        empty="no elements: all ranks still meet, nothing is written",
        invariance="an element depends on that element of every rank alone, and its bits are equal on all ranks",
        tolerance=_tolerance,
        check=_check,
        enumerate_cases=_cases,
        generate=_generate,
    )
)
