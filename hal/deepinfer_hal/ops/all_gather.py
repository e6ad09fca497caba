"""all_gather: the valid rows of every rank, on every rank; ranks may have different numbers of them, or none."""

from __future__ import annotations

from typing import Any

import torch

from deepinfer_hal.card import COMM, COUNT, Case, OpCard, out, register, tensor
from deepinfer_hal.communicator import Communicator, SingleRank
from deepinfer_hal.errors import BadCall
from deepinfer_hal.ops import _common as c
from deepinfer_hal.ops._communication import from_row_bytes, row_bytes, spell


def all_gather(
    comm: Communicator, x: torch.Tensor, count: torch.Tensor | None, out: torch.Tensor, counts: torch.Tensor | None
) -> None:
    """x [T, N] of every rank, with the same T as bound -> out [world, T, N], counts i32 [world].

    out[r, :counts[r]] are the valid rows of rank r; the rows after them stay untouched.
    """
    told = comm.exchange(f"all_gather({spell(x)})", (c.valid_rows(count, x.shape[0]),))
    mine = row_bytes(x)
    every = torch.empty(comm.world_size, mine.numel(), dtype=torch.uint8, device=x.device)
    comm.all_gather(mine.view(-1), every)
    for rank, (rows,) in enumerate(told):
        out[rank, :rows] = from_row_bytes(every[rank].view(mine.shape), x.dtype)[:rows]
    if counts is not None:
        counts.copy_(torch.tensor([rows for (rows,) in told], dtype=torch.int32))


def _cases() -> list[Case]:
    rows = [
        dict(T=0, N=64, x="bf16"),
        dict(T=1, N=33, x="f32", counts=True),
        dict(T=33, N=64, x="bf16", count=20, counts=True, strided=True),
        dict(T=7, N=528, x="u8", count=0, counts=True),
        dict(T=5, N=1, x="i32", count=3),
        dict(T=4, N=3, x="i64"),
    ]
    return [Case("all_gather", row) for row in rows]


def _generate(case: Case, seed: int, device: Any, prepare: c.Prepare) -> dict[str, Any]:
    p, gen = case.params, c.generator(case, seed)
    if p["x"] in ("bf16", "f32"):
        x = c.normal(gen, p["T"], p["N"], dtype=c.dtype_of(p["x"]), device=device)
    else:
        dtype = {"u8": torch.uint8, "i32": torch.int32, "i64": torch.int64}[p["x"]]
        x = c.integers(gen, 0, 200, p["T"], p["N"], dtype=dtype, device=device)
    return {
        "comm": SingleRank(),
        "x": c.strided(x) if p.get("strided") else x,
        "count": c.count_tensor(p.get("count"), device),
        "out": c.poisoned(1, p["T"], p["N"], dtype=x.dtype, device=device),
        "counts": c.poisoned(1, dtype=torch.int32, device=device) if p.get("counts") else None,
    }


def _check(args: dict[str, Any]) -> None:
    if args["x"].dtype != args["out"].dtype:
        raise BadCall(f"all_gather: out must have x's dtype {args['x'].dtype}, got {args['out'].dtype}")


CARD = register(
    OpCard(
        name="all_gather",
        group="communication",
        summary="The valid rows of every rank, on every rank.",
        signature=(
            COMM,
            tensor("x", "any", "T N"),
            COUNT,
            out("out", "any", "world T N"),
            out("counts", "i32", "world", optional=True),
        ),
        reference=all_gather,
        rounding="none: rows are copied",
        empty="a rank without rows: all ranks still meet, its part of out stays untouched and its count is 0",
        invariance="a row keeps its bits and its place",
        discrete=("out", "counts"),
        check=_check,
        enumerate_cases=_cases,
        generate=_generate,
    )
)
