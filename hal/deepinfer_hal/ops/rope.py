"""rope: rotates adjacent pairs of the last r dims of every head by the position's angles (V4.1 notes, section 2.3).

(a, b) -> (a cos - b sin, a sin + b cos), or by the negative angle if `inverse`. FP32 math, one rounding, in place.
"""

from __future__ import annotations

from typing import Any

import torch

from deepinfer_hal.card import COUNT, Case, OpCard, Tolerance, inout, register, scalar, sum_tolerance, tensor
from deepinfer_hal.errors import BadCall
from deepinfer_hal.ops import _common as c
from deepinfer_hal.ops._cost import rope_rows_bytes, rotated_bytes, touching


def rope(
    positions: torch.Tensor, table: torch.Tensor, inverse: bool, count: torch.Tensor | None, x: torch.Tensor
) -> None:
    """positions i32 [T], table f32 [P, r] with rows [cos | sin]; x [T, h, D] changes in its last r dims.

    x may be any view whose last dimension is contiguous. A row with position -1 stays as it is; positions must be
    below P.
    """
    width = table.shape[1]
    valid = torch.nonzero(positions[: c.valid_rows(count, x.shape[0])] >= 0).flatten()
    rows = c.wide(table[positions[valid].long()])[:, None]
    cos, sin = rows[..., : width // 2], rows[..., width // 2 :]
    if inverse:
        sin = -sin
    tail = c.wide(x[valid, :, x.shape[2] - width :])
    even, odd = tail[..., 0::2], tail[..., 1::2]
    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    x[valid, :, x.shape[2] - width :] = rotated.to(x.dtype)


def rope_table(positions: int, width: int, theta: float = 10000.0) -> torch.Tensor:
    """f32 [positions, width] rows [cos | sin] with frequencies theta^(-2i/width), made in float64; for cases."""
    frequency = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angle = torch.arange(positions, dtype=torch.float64)[:, None] * frequency
    return torch.cat((angle.cos(), angle.sin()), dim=-1).float()


def _cases() -> list[Case]:
    rows = [
        dict(T=0, h=4, D=512, r=64, dtype="bf16", inverse=False),
        dict(T=1, h=1, D=512, r=64, dtype="bf16", inverse=False),
        dict(T=33, h=4, D=512, r=64, dtype="bf16", inverse=False, count=30),
        dict(T=33, h=4, D=64, r=16, dtype="f32", inverse=True),
        dict(T=3, h=4, D=128, r=64, dtype="bf16", inverse=True, view=True),
        dict(T=3, h=64, D=512, r=64, dtype="bf16", inverse=False),
        dict(T=4, h=2, D=64, r=64, dtype="f32", inverse=False),
        dict(T=5, h=2, D=64, r=32, dtype="f32", inverse=False, theta=7321.0),  # no model's: the table must be read
    ]
    return [Case("rope", row) for row in rows]


def _generate(case: Case, seed: int, device: Any, prepare: c.Prepare) -> dict[str, Any]:
    p, gen = case.params, c.generator(case, seed)
    x = c.normal(gen, p["T"], p["h"], p["D"], dtype=c.dtype_of(p["dtype"]), device=device)
    if p.get("view"):
        x = c.strided(x)
    positions = c.integers(gen, 0, 4096, p["T"], device=device)
    if p["T"] > 2:
        positions[0], positions[1], positions[2] = 0, -1, 4095
    return {
        "positions": positions,
        "table": rope_table(4096, p["r"], p.get("theta", 10000.0)).to(device),
        "inverse": p["inverse"],
        "count": c.count_tensor(p.get("count"), device),
        "x": x,
    }


def _check(args: dict[str, Any]) -> None:
    width, head = args["table"].shape[1], args["x"].shape[2]
    if width % 2 or width > head:
        raise BadCall(f"rope: the table's width {width} must be even and at most the head's {head} dims")


def _tolerance(args: dict[str, Any], name: str) -> Tolerance:
    return sum_tolerance(args["x"].dtype, 2, c.largest(args["x"]))


CARD = register(
    OpCard(
        name="rope",
        group="residual",
        summary="Rotary embedding of adjacent pairs in the last dims of each head, in place.",
        signature=(
            tensor("positions", "i32", "T"),
            tensor("table", "f32", "P r"),
            scalar("inverse", "bool"),
            COUNT,
            inout("x", "stream", "T h D"),
        ),
        reference=rope,
        rounding="FP32 rotation; one rounding to x's dtype; the other dims keep their bits",
        tolerance=_tolerance,
        check=_check,
        enumerate_cases=_cases,
        generate=_generate,
        cost=touching(table=rope_rows_bytes, x=rotated_bytes),
    )
)
