"""grouped_linear: group g of the columns of x goes through its own matrix (wo_a, section 2.4 of the V4.1 notes).

y[t, g*N + n] = sum_k x[t, g*K + k] W[g, n, k], in FP32, rounded or quantised as in `linear`.
"""

from __future__ import annotations

from typing import Any

import torch

from deepinfer_hal.card import COUNT, Case, OpCard, out, register, tensor, weight
from deepinfer_hal.ops import _common as c
from deepinfer_hal.weights import WeightHandle


def grouped_linear(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight: WeightHandle,
    count: torch.Tensor | None,
    out: torch.Tensor,
    out_scale: torch.Tensor | None = None,
) -> None:
    """x [T, G*K] (+ x_scale [T, G*K/32] when u8), weight [G, N, K] -> out [T, G*N] (+ out_scale [T, G*N/32])."""
    n = c.valid_rows(count, x.shape[0])
    rows = c.load_rows(x, x_scale, n).unflatten(-1, (weight.shape[0], weight.shape[2]))
    c.write_result(out, out_scale, torch.einsum("tgk,gnk->tgn", rows, c.weight_values(weight, rows)).flatten(1))


def _cases() -> list[Case]:
    rows = [
        dict(T=0, G=2, K=128, N=64, x="bf16", w="bf16", out="bf16"),
        dict(T=1, G=2, K=1024, N=64, x="u8", w="fp8_block32", out="u8"),
        dict(T=3, G=2, K=1024, N=64, x="bf16", w="fp8_block32", out="bf16", strided=True),
        dict(T=33, G=2, K=256, N=64, x="u8", w="fp8_block32", out="u8", count=20),
        dict(T=33, G=2, K=64, N=16, x="f32", w="f32", out="f32"),
        dict(T=5, G=4, K=64, N=16, x="u8", w="fp8_block32", out="u8", count=3),
        dict(T=2, G=8, K=4096, N=64, x="u8", w="fp8_block32", out="bf16"),
        dict(T=5, G=2, K=256, N=64, x="u8", w="fp8_block32", out="f32", far="-100..100"),
        dict(T=70, G=2, K=128, N=96, x="u8", w="fp8_block32", out="bf16", far="-100..100"),
    ]
    return [Case("grouped_linear", row) for row in rows]


def _generate(case: Case, seed: int, device: Any, prepare: c.Prepare) -> dict[str, Any]:
    p, gen = case.params, c.generator(case, seed)
    groups = p["G"]
    x, x_scale = c.normal(gen, p["T"], groups * p["K"], device=device), None
    if p["x"] == "u8":
        x, x_scale = c.quantised(x)
    else:
        x = x.to(c.dtype_of(p["x"]))
    if p["out"] == "u8":
        y, y_scale = c.poisoned_pair(p["T"], groups * p["N"], device)
    else:
        y, y_scale = c.poisoned(p["T"], groups * p["N"], dtype=c.dtype_of(p["out"]), device=device), None
    if p.get("strided"):
        x, y = c.strided(x), c.strided(y)
    prepare = c.far_scales(p.get("far"), gen, x_scale, prepare)
    handle = c.make_weight(prepare, "wo_a", p["w"], gen, groups, p["N"], p["K"], device=device)
    count = c.count_tensor(p.get("count"), device)
    return {"x": x, "x_scale": x_scale, "weight": handle, "count": count, "out": y, "out_scale": y_scale}


def _check(args: dict[str, Any]) -> None:
    c.check_pairs("grouped_linear", args, ("x", "x_scale"), ("out", "out_scale"))


CARD = register(
    OpCard(
        name="grouped_linear",
        group="gemm",
        summary="Block-diagonal projection: each group of columns has its own matrix.",
        signature=(
            tensor("x", "act", "T G*K"),
            tensor("x_scale", "u8", "T G*K/32", optional=True),
            weight("weight", "G N K"),
            COUNT,
            out("out", "act", "T G*N"),
            out("out_scale", "u8", "T G*N/32", optional=True),
        ),
        reference=grouped_linear,
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
