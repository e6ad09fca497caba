"""swiglu_quantise: the clamped SwiGLU of an expert, times its routing weight (V4.1 notes, section 2.9).

a = min(gate, limit), b = clamp(up, -limit, limit); out = silu(a) * b * w in FP32: the routing weight multiplies before
the quantisation and before the down projection. Columns 0..I-1 of gate_up are the gate, I..2I-1 the up part.
"""

from __future__ import annotations

from typing import Any

import torch

from deepinfer_hal.card import Case, OpCard, Tolerance, out, register, scalar, sum_tolerance, tensor
from deepinfer_hal.errors import BadCall
from deepinfer_hal.ops import _common as c


def swiglu_quantise(
    gate_up: torch.Tensor,
    weights: torch.Tensor | None,
    source: torch.Tensor | None,
    limit: float,
    rows: torch.Tensor | None,
    out: torch.Tensor,
    out_scale: torch.Tensor | None = None,
) -> None:
    """gate_up [M, 2I]; row r is weighed by weights[source[r]] (1 without weights); rows i32 [1] is the device count.

    out is dense [M, I], or u8 codes with out_scale [M, I/32]; rows past the count stay untouched.
    """
    n = c.valid_rows(rows, gate_up.shape[0])
    gate, up = c.wide(gate_up[:n]).chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    value = gate / (1 + torch.exp(-gate)) * up
    if weights is not None:
        value = value * c.wide(weights[source[:n].long()])[:, None]
    c.write_result(out, out_scale, value)


def _cases() -> list[Case]:
    rows = [
        dict(M=0, I=128, x="bf16", out="bf16"),
        dict(M=1, I=128, x="bf16", out="u8", weighed=True),
        dict(M=66, I=128, x="bf16", out="u8", weighed=True, rows=40),
        dict(M=66, I=128, x="f32", out="f32", weighed=True, rows=66),
        dict(M=33, I=128, x="bf16", out="bf16", strided=True),
        dict(M=3, I=2304, x="bf16", out="u8", rows=2),
        dict(M=8, I=32, x="f32", out="u8", weighed=True, rows=0),
    ]
    return [Case("swiglu_quantise", row) for row in rows]


def _generate(case: Case, seed: int, device: Any, prepare: c.Prepare) -> dict[str, Any]:
    p, gen = case.params, c.generator(case, seed)
    rows, width = p["M"], p["I"]
    gate_up = c.normal(gen, rows, 2 * width, dtype=c.dtype_of(p["x"]), device=device, scale=5.0)
    weights = source = None
    if p.get("weighed"):
        weights = torch.rand(rows, generator=gen).to(device)
        source = torch.randperm(rows, generator=gen).to(torch.int32).to(device)
    y, y_scale = c.poisoned_pair(rows, width, device)
    if p["out"] != "u8":
        y, y_scale = c.poisoned(rows, width, dtype=c.dtype_of(p["out"]), device=device), None
    return {
        "gate_up": c.strided(gate_up) if p.get("strided") else gate_up,
        "weights": weights,
        "source": source,
        "limit": 10.0,
        "rows": c.count_tensor(p.get("rows"), device),
        "out": y,
        "out_scale": y_scale,
    }


def _check(args: dict[str, Any]) -> None:
    c.check_pairs("swiglu_quantise", args, ("out", "out_scale"))
    if (args["weights"] is None) != (args["source"] is None):
        raise BadCall("swiglu_quantise: weights and source go together; give both or neither")


def _tolerance(args: dict[str, Any], name: str) -> Tolerance:
    return sum_tolerance(torch.float32 if args["out"].dtype == torch.uint8 else args["out"].dtype, 4, 1.0)


CARD = register(
    OpCard(
        name="swiglu_quantise",
        group="moe",
        summary="Clamped SwiGLU times the routing weight, dense or quantised.",
        signature=(
            tensor("gate_up", "float", "M 2*I"),
            tensor("weights", "f32", "_", optional=True),
            tensor("source", "i32", "M", optional=True),
            scalar("limit", "float"),
            tensor("rows", "i32", "1", optional=True),
            out("out", "act", "M I"),
            out("out_scale", "u8", "M I/32", optional=True),
        ),
        reference=swiglu_quantise,
        rounding="FP32 throughout; one rounding to out's dtype, or fp8_32 straight from FP32",
        reference_invariant="unknown",
        tolerance=_tolerance,
        check=_check,
        enumerate_cases=_cases,
        generate=_generate,
    )
)
