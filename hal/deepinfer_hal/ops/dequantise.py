"""dequantise: codes and scales of a row format back to values; exact in float32 (`deepinfer_hal.formats`)."""

from __future__ import annotations

from typing import Any

import torch

from deepinfer_hal import formats
from deepinfer_hal.card import COUNT, Case, OpCard, out, register, scalar, tensor
from deepinfer_hal.ops import _common as c
from deepinfer_hal.ops.quantise import check_row_format, row_cases


def dequantise(
    codes: torch.Tensor, scales: torch.Tensor, format: str, count: torch.Tensor | None, out: torch.Tensor
) -> None:
    """codes u8 [T, N] or packed [T, N/2], scales u8 [T, N/group] -> out [T, N]; a NaN scale or code gives NaN."""
    n = c.valid_rows(count, out.shape[0])
    if n:
        c.write_result(out, None, formats.dequantise(codes[:n], scales[:n], format))


def _generate(case: Case, seed: int, device: Any, prepare: c.Prepare) -> dict[str, Any]:
    p, gen = case.params, c.generator(case, seed)
    rows, width, fmt = p["T"], p["N"], p["format"]
    codes = c.integers(gen, 0, 256, rows, width if fmt == "fp8_32" else width // 2, dtype=torch.uint8, device=device)
    low, high = (0, 128) if fmt == "fp4_16" else (80, 170)
    scales = c.integers(gen, low, high, rows, width // formats.GROUP_SIZE[fmt], dtype=torch.uint8, device=device)
    if rows > 1:
        scales[1, 0] = 0x7F if fmt == "fp4_16" else 0xFF  # NaN
    y = c.poisoned(rows, width, dtype=c.dtype_of(p["dtype"]), device=device)
    return {
        "codes": codes,
        "scales": scales,
        "format": fmt,
        "count": c.count_tensor(p.get("count"), device),
        "out": c.strided(y) if p.get("strided") else y,
    }


CARD = register(
    OpCard(
        name="dequantise",
        group="residual",
        summary="Codes and scales of a row format to values.",
        signature=(
            tensor("codes", "u8", "T _"),
            tensor("scales", "u8", "T _"),
            scalar("format", "str"),
            COUNT,
            out("out", "float", "T N"),
        ),
        reference=dequantise,
        rounding="exact in float32; one rounding if out is bf16",
        check=lambda args: check_row_format("dequantise", args, "out"),
        enumerate_cases=lambda: row_cases("dequantise"),
        generate=_generate,
    )
)
