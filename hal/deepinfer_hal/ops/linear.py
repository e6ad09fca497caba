"""linear: y = x W^T, the dense projections of the model (section 2 of the V4.1 notes: weights are [out, in], no bias).

x is dense (bf16, f32) or fp8_32 codes with scales; W is any checkpoint format; the sum over K is FP32; y is rounded
once to the dtype of `out`, or quantised to fp8_32 straight from the FP32 sum.
"""

from __future__ import annotations

from typing import Any

import torch

from deepinfer_hal.card import COUNT, Case, OpCard, out, register, tensor, weight
from deepinfer_hal.ops import _common as c
from deepinfer_hal.weights import WeightHandle


def linear(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight: WeightHandle,
    count: torch.Tensor | None,
    out: torch.Tensor,
    out_scale: torch.Tensor | None = None,
) -> None:
    """x [T, K] (+ x_scale [T, K/32] when u8), weight [N, K] -> out [T, N] (+ out_scale [T, N/32] when u8)."""
    n = c.valid_rows(count, x.shape[0])
    rows = c.load_rows(x, x_scale, n)
    c.write_result(out, out_scale, rows @ c.weight_values(weight, rows).T)


def _cases() -> list[Case]:
    rows = [
        dict(T=0, K=256, N=64, x="bf16", w="bf16", out="bf16"),
        dict(T=1, K=256, N=64, x="u8", w="fp8_block32", out="bf16"),
        dict(T=3, K=64, N=2048, x="u8", w="fp8_block32", out="bf16"),
        dict(T=33, K=256, N=512, x="u8", w="fp8_block32", out="u8"),
        dict(T=33, K=256, N=259, x="bf16", w="bf16", out="f32", strided=True),
        dict(T=3, K=96, N=70, x="u8", w="fp8_block32", out="f32"),
        dict(T=33, K=256, N=256, x="f32", w="f32", out="f32"),
        dict(T=33, K=256, N=64, x="bf16", w="fp8_block32", out="bf16", count=7),
        dict(T=4, K=256, N=64, x="bf16", w="fp4_row32", out="u8", count=0),
        dict(T=2, K=1280, N=2048, x="u8", w="fp8_block32", out="bf16", strided=True),
        dict(T=5, K=5120, N=384, x="bf16", w="bf16", out="f32"),
        dict(T=5, K=512, N=96, x="u8", w="fp8_block32", out="f32", far="-100..100"),
        dict(T=70, K=256, N=256, x="u8", w="fp8_block32", out="bf16", far="-100..100"),
        dict(T=3, K=256, N=64, x="u8", w="fp8_block32", out="u8", far="0..100"),
    ]
    return [Case("linear", row) for row in rows]


def _generate(case: Case, seed: int, device: Any, prepare: c.Prepare) -> dict[str, Any]:
    p, gen = case.params, c.generator(case, seed)
    x, x_scale = c.normal(gen, p["T"], p["K"], device=device), None
    if p["x"] == "u8":
        x, x_scale = c.quantised(x)
    else:
        x = x.to(c.dtype_of(p["x"]))
    y, y_scale = c.poisoned_pair(p["T"], p["N"] // 32 * 32, device)
    if p["out"] != "u8":
        y, y_scale = c.poisoned(p["T"], p["N"], dtype=c.dtype_of(p["out"]), device=device), None
    if p.get("strided"):
        x, y = c.strided(x), c.strided(y)
    prepare = c.far_scales(p.get("far"), gen, x_scale, prepare)
    handle = c.make_weight(prepare, "linear", p["w"], gen, p["N"], p["K"], device=device)
    count = c.count_tensor(p.get("count"), device)
    return {"x": x, "x_scale": x_scale, "weight": handle, "count": count, "out": y, "out_scale": y_scale}


def _check(args: dict[str, Any]) -> None:
    c.check_pairs("linear", args, ("x", "x_scale"), ("out", "out_scale"))


CARD = register(
    OpCard(
        name="linear",
        group="gemm",
        summary="y = x W^T with dense or quantised activations and weights of any checkpoint format.",
        signature=(
            tensor("x", "act", "T K"),
            tensor("x_scale", "u8", "T K/32", optional=True),
            weight("weight", "N K"),
            COUNT,
            out("out", "act", "T N"),
            out("out_scale", "u8", "T N/32", optional=True),
        ),
        reference=linear,
        rounding="FP32 sum over K; one rounding to out's dtype, or fp8_32 straight from the sum",
        invariance="a row's bits depend on the row and the weight only",
        reference_invariant="no",
        tolerance=c.matmul_tolerance,
        check=_check,
        enumerate_cases=_cases,
        generate=_generate,
        cost=c.matmul_cost,
    )
)
