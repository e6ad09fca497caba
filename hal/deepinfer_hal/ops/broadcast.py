"""broadcast: one rank's tensor on every rank."""

from __future__ import annotations

from typing import Any

import torch

from deepinfer_hal.card import COMM, Case, OpCard, inout, register, scalar
from deepinfer_hal.communicator import Communicator, SingleRank
from deepinfer_hal.errors import BadCall
from deepinfer_hal.ops import _common as c
from deepinfer_hal.ops._communication import from_row_bytes, row_bytes, spell


def broadcast(comm: Communicator, root: int, x: torch.Tensor) -> None:
    """x [T, N] of rank `root` replaces x of every other rank, which has the same shape."""
    comm.exchange(f"broadcast(from {root}, {spell(x)})", ())
    sent = row_bytes(x)
    comm.broadcast(sent.view(-1), root)
    if comm.rank != root:
        x.copy_(from_row_bytes(sent, x.dtype))


def _cases() -> list[Case]:
    rows = [
        dict(T=0, N=64, x="bf16"),
        dict(T=1, N=33, x="f32"),
        dict(T=33, N=64, x="bf16", strided=True),
        dict(T=5, N=1, x="i32"),
    ]
    return [Case("broadcast", row) for row in rows]


def _generate(case: Case, seed: int, device: Any, prepare: c.Prepare) -> dict[str, Any]:
    p, gen = case.params, c.generator(case, seed)
    if p["x"] == "i32":
        x = c.integers(gen, -1000, 1000, p["T"], p["N"], device=device)
    else:
        x = c.normal(gen, p["T"], p["N"], dtype=c.dtype_of(p["x"]), device=device)
    return {"comm": SingleRank(), "root": 0, "x": c.strided(x) if p.get("strided") else x}


def _check(args: dict[str, Any]) -> None:
    if not 0 <= args["root"] < args["comm"].world_size:
        raise BadCall(f"broadcast: root is {args['root']}; ranks are 0 .. {args['comm'].world_size - 1}")


CARD = register(
    OpCard(
        name="broadcast",
        group="communication",
        summary="One rank's tensor on every rank.",
        signature=(COMM, scalar("root", "int"), inout("x", "any", "T N")),
        reference=broadcast,
        rounding="none: bytes are copied",
        empty="no elements: all ranks still meet, nothing is written",
        invariance="every element keeps its bits",
        discrete=("x",),
        check=_check,
        enumerate_cases=_cases,
        generate=_generate,
    )
)
