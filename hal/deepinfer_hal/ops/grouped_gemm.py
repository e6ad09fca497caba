"""grouped_gemm: rows sorted by expert, each run of rows through its own matrix (V4.1 notes, section 2.9).

Rows offsets[e] .. offsets[e+1] of x use W[e]: out = x W[e]^T in FP32, rounded or quantised as in `linear`.
"""

from __future__ import annotations

from typing import Any

import torch

from deepinfer_hal.card import Case, OpCard, out, register, tensor, weight
from deepinfer_hal.ops import _common as c
from deepinfer_hal.weights import WeightHandle


def grouped_gemm(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight: WeightHandle,
    offsets: torch.Tensor,
    out: torch.Tensor,
    out_scale: torch.Tensor | None = None,
) -> None:
    """x [M, K] (+ x_scale [M, K/32] when u8), weight [E, N, K], offsets i32 [E+1] -> out [M, N].

    Rows from offsets[E] on stay untouched; an expert without rows costs nothing.
    """
    bounds = offsets.tolist()
    for expert, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
        if start == stop:
            continue
        rows = c.load_rows(x[start:stop], None if x_scale is None else x_scale[start:stop])
        value = rows @ c.weight_values(weight.slot(expert), rows).T
        c.write_result(out[start:stop], None if out_scale is None else out_scale[start:stop], value)


def _cases() -> list[Case]:
    rows = [
        dict(M=0, E=8, K=256, N=256, x="bf16", w="fp4_row32", out="bf16"),
        dict(M=1, E=8, K=256, N=256, x="u8", w="fp4_row32", out="bf16"),
        dict(M=3, E=8, K=128, N=256, x="u8", w="fp4_row32", out="f32", spare=5),
        dict(M=66, E=8, K=256, N=256, x="u8", w="fp4_row32", out="bf16", spare=2),
        dict(M=66, E=8, K=256, N=256, x="bf16", w="bf16", out="bf16", one_expert=3),
        dict(M=20, E=4, K=64, N=64, x="f32", w="f32", out="f32", spare=20),
        dict(M=6, E=16, K=128, N=96, x="u8", w="fp8_block32", out="u8"),
        dict(M=12, E=384, K=64, N=64, x="u8", w="fp4_row32", out="bf16"),
        dict(M=20, E=4, K=256, N=128, x="u8", w="fp4_row32", out="f32", far="0..100"),
        dict(M=80, E=2, K=256, N=128, x="u8", w="fp4_row32", out="bf16", far="0..100"),
        dict(M=9, E=4, K=256, N=64, x="u8", w="fp4_row32", out="bf16", far="-100..100"),
    ]
    return [Case("grouped_gemm", row) for row in rows]


def _generate(case: Case, seed: int, device: Any, prepare: c.Prepare) -> dict[str, Any]:
    p, gen = case.params, c.generator(case, seed)
    rows, experts = p["M"] + p.get("spare", 0), p["E"]
    x, x_scale = c.normal(gen, rows, p["K"], device=device), None
    if p["x"] == "u8":
        x, x_scale = c.quantised(x)
    else:
        x = x.to(c.dtype_of(p["x"]))
    owners = torch.randint(0, experts, (p["M"],), generator=gen)
    if "one_expert" in p:
        owners[:] = p["one_expert"]
    ends = torch.bincount(owners, minlength=experts).cumsum(0)
    offsets = torch.cat((torch.zeros(1, dtype=torch.long), ends)).to(torch.int32).to(device)
    y, y_scale = c.poisoned_pair(rows, p["N"], device)
    if p["out"] != "u8":
        y, y_scale = c.poisoned(rows, p["N"], dtype=c.dtype_of(p["out"]), device=device), None
    prepare = c.far_scales(p.get("far"), gen, x_scale, prepare)
    handle = c.make_weight(prepare, "experts_gate_up", p["w"], gen, experts, p["N"], p["K"], device=device)
    return {"x": x, "x_scale": x_scale, "weight": handle, "offsets": offsets, "out": y, "out_scale": y_scale}


def _check(args: dict[str, Any]) -> None:
    c.check_pairs("grouped_gemm", args, ("x", "x_scale"), ("out", "out_scale"))


CARD = register(
    OpCard(
        name="grouped_gemm",
        group="gemm",
        summary="Expert projections: rows sorted by expert, each run with its own matrix.",
        signature=(
            tensor("x", "act", "M K"),
            tensor("x_scale", "u8", "M K/32", optional=True),
            weight("weight", "E N K"),
            tensor("offsets", "i32", "E+1"),
            out("out", "act", "M N"),
            out("out_scale", "u8", "M N/32", optional=True),
        ),
        reference=grouped_gemm,
        rounding="FP32 sum over K; one rounding to out's dtype, or fp8_32 straight from the sum",
        empty="no rows, or an expert without rows: nothing is written for it; rows from offsets[E] on stay untouched",
        invariance="a row's bits depend on the row and its expert's matrix only",
        reference_invariant="no",
        tolerance=c.matmul_tolerance,
        check=_check,
        enumerate_cases=_cases,
        generate=_generate,
        cost=c.matmul_cost,
    )
)
