"""engram_lookup: gathers rows of the Engram table side by side (V4.1 notes, section 2.10).

A table row is d e4m3 codes with one ue8m0 scale per 32, exactly an fp8_32 row: stored bytes are copied, or decoded.
"""

from __future__ import annotations

from typing import Any

import torch

from deepinfer_hal import formats
from deepinfer_hal.card import COUNT, Case, OpCard, out, register, tensor, weight
from deepinfer_hal.errors import BadCall
from deepinfer_hal.ops import _common as c
from deepinfer_hal.ops._cost import touching, weight_rows_bytes
from deepinfer_hal.weights import WeightHandle

ZERO_SCALE = 127
"""The scale code (1.0) of a row outside the table, whose codes are all 0."""


def engram_lookup(
    rows: torch.Tensor,
    table: WeightHandle,
    count: torch.Tensor | None,
    out: torch.Tensor,
    out_scale: torch.Tensor | None = None,
) -> None:
    """rows i64 [T, C], table [rows, d] -> out u8 [T, C*d] with out_scale u8 [T, C*d/32], or dense [T, C*d].

    A row outside the table (-1) gives zeros.
    """
    n = c.valid_rows(count, rows.shape[0])
    stored = table.canonical()
    inside = (rows[:n] >= 0) & (rows[:n] < table.shape[0])
    index = rows[:n].where(inside, 0).to(stored.values.device)
    codes = stored.values[index].to(out.device).where(inside[..., None], 0)
    scales = stored.scales[index].to(out.device).where(inside[..., None], ZERO_SCALE)
    if out.dtype == torch.uint8:
        out[:n], out_scale[:n] = codes.flatten(1), scales.flatten(1)
    else:
        c.write_result(out, None, formats.dequantise(codes, scales, "fp8_32").flatten(1))


def _cases() -> list[Case]:
    rows = [
        dict(T=0, C=6, rows=1000, d=32, out="u8"),
        dict(T=1, C=6, rows=1000, d=32, out="u8"),
        dict(T=33, C=24, rows=1000, d=32, out="u8", count=29),
        dict(T=33, C=6, rows=1000, d=64, out="bf16"),
        dict(T=3, C=24, rows=4000, d=256, out="u8"),
        dict(T=3, C=4, rows=50, d=32, out="f32"),
    ]
    return [Case("engram_lookup", row) for row in rows]


def _generate(case: Case, seed: int, device: Any, prepare: c.Prepare) -> dict[str, Any]:
    p, gen = case.params, c.generator(case, seed)
    tokens, columns = p["T"], p["C"]
    rows = c.integers(gen, 0, p["rows"], tokens, columns, dtype=torch.int64, device=device)
    if tokens > 1:
        rows[0, 0], rows[1, 1], rows[1, 2] = -1, p["rows"], p["rows"] - 1
    y, y_scale = c.poisoned_pair(tokens, columns * p["d"], device)
    if p["out"] != "u8":
        y, y_scale = c.poisoned(tokens, columns * p["d"], dtype=c.dtype_of(p["out"]), device=device), None
    return {
        "rows": rows,
        "table": c.make_weight(prepare, "engram_table", "fp8_row32", gen, p["rows"], p["d"], device=device),
        "count": c.count_tensor(p.get("count"), device),
        "out": y,
        "out_scale": y_scale,
    }


def _check(args: dict[str, Any]) -> None:
    c.check_pairs("engram_lookup", args, ("out", "out_scale"))
    stored = args["table"].canonical().format
    if stored != "fp8_row32":
        raise BadCall(f"engram_lookup: the table must be stored as fp8_row32, it is {stored}")


CARD = register(
    OpCard(
        name="engram_lookup",
        group="input",
        summary="Gathers Engram table rows, as stored bytes or decoded.",
        signature=(
            tensor("rows", "i64", "T C"),
            weight("table", "R d"),
            COUNT,
            out("out", "act", "T C*d"),
            out("out_scale", "u8", "T C*d/32", optional=True),
        ),
        reference=engram_lookup,
        rounding="none: stored bytes, or their exact value rounded once to out's dtype",
        check=_check,
        enumerate_cases=_cases,
        generate=_generate,
        cost=touching(table=lambda args: weight_rows_bytes(args["table"], args["rows"].numel())),
    )
)
