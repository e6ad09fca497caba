"""quantise: rows to codes and scales of a row format, defined on bits (`deepinfer_hal.formats`; design, Numerics).

fp8_32: scale 2^ceil(log2(max(amax, 1e-4) / 448)) per 32 values as exponent arithmetic, then e4m3 to nearest even.
A row with NaN or infinity sets bit 0 of its flag, and the group that holds it gets a NaN scale.
"""

from __future__ import annotations

from typing import Any

import torch

from deepinfer_hal import formats
from deepinfer_hal.card import COUNT, Case, OpCard, inout, out, register, scalar, tensor
from deepinfer_hal.errors import BadCall
from deepinfer_hal.ops import _common as c


def quantise(
    x: torch.Tensor,
    format: str,
    count: torch.Tensor | None,
    codes: torch.Tensor,
    scales: torch.Tensor,
    flags: torch.Tensor | None = None,
) -> None:
    """x [T, N] -> codes u8 [T, N] (fp8_32) or [T, N/2] (packed fp4), scales u8 [T, N/group]; flags u8 [T] gets |= 1."""
    n = c.valid_rows(count, x.shape[0])
    if n == 0:
        return
    codes[:n], scales[:n] = formats.quantise(x[:n], format)
    if flags is not None:
        flags[:n] |= (~x[:n].isfinite()).any(-1).to(torch.uint8)


def check_row_format(op: str, args: dict[str, Any], dense: str) -> None:
    """BadCall unless `codes` and `scales` have the widths that `format` gives rows of args[dense]."""
    fmt, width = args["format"], args[dense].shape[-1]
    group = formats.GROUP_SIZE.get(fmt)
    if group is None:
        raise BadCall(f"{op}: format {fmt!r} is not one of {', '.join(formats.GROUP_SIZE)}")
    if width == 0 or width % group:
        raise BadCall(f"{op}: {dense} has rows of {width} values; {fmt} needs a positive multiple of {group}")
    wanted = (width if fmt == "fp8_32" else width // 2, width // group)
    got = (args["codes"].shape[-1], args["scales"].shape[-1])
    if got != wanted:
        raise BadCall(f"{op}: {fmt} rows of {width} values have {wanted} code and scale bytes, got {got}")


def row_cases(op: str) -> list[Case]:
    """Cases shared by quantise and dequantise."""
    rows = [
        dict(T=0, N=256, format="fp8_32", dtype="bf16"),
        dict(T=1, N=512, format="fp8_32", dtype="bf16"),
        dict(T=33, N=256, format="fp8_32", dtype="f32", count=9),
        dict(T=33, N=512, format="fp4_16", dtype="bf16"),
        dict(T=3, N=512, format="fp4_16", dtype="f32", strided=True),
        dict(T=33, N=128, format="mxfp4_32", dtype="bf16", strided=True),
        dict(T=3, N=32, format="mxfp4_32", dtype="f32"),
    ]
    return [Case(op, row) for row in rows]


def _generate(case: Case, seed: int, device: Any, prepare: c.Prepare) -> dict[str, Any]:
    p, gen = case.params, c.generator(case, seed)
    rows, width, fmt = p["T"], p["N"], p["format"]
    x = c.normal(gen, rows, width, scale=2.0)
    x *= 10.0 ** torch.randint(-3, 3, (rows, 1), generator=gen)
    if rows > 2:
        x[0], x[1, 3], x[2, 5] = 0.0, float("nan"), float("-inf")
    x = x.to(c.dtype_of(p["dtype"])).to(device)
    u8 = torch.uint8
    return {
        "x": c.strided(x) if p.get("strided") else x,
        "format": fmt,
        "count": c.count_tensor(p.get("count"), device),
        "codes": c.poisoned(rows, width if fmt == "fp8_32" else width // 2, dtype=u8, device=device),
        "scales": c.poisoned(rows, width // formats.GROUP_SIZE[fmt], dtype=u8, device=device),
        "flags": torch.full((rows,), 4, dtype=u8, device=device),
    }


CARD = register(
    OpCard(
        name="quantise",
        group="residual",
        summary="Rows to codes and scales of a row format, with a flag for NaN and infinity.",
        signature=(
            tensor("x", "float", "T N"),
            scalar("format", "str"),
            COUNT,
            out("codes", "u8", "T _"),
            out("scales", "u8", "T _"),
            inout("flags", "u8", "T", optional=True),
        ),
        reference=quantise,
        rounding="exact on bits: ceiling exponent scales, codes clamped and rounded to nearest even, sign of zero kept",
        discrete=("codes", "scales", "flags"),
        check=lambda args: check_row_format("quantise", args, "x"),
        enumerate_cases=lambda: row_cases("quantise"),
        generate=_generate,
    )
)
