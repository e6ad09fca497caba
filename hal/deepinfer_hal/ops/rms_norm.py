"""rms_norm: y = w * x / sqrt(mean(x^2) + eps), optionally with fp8_32 codes of y (section 2 of the V4.1 notes).

Computed in FP32 and rounded once to the dtype of `out` (of x when `out` is None); codes come from the rounded value.
"""

from __future__ import annotations

from typing import Any

import torch

from deepinfer_hal.card import COUNT, Case, OpCard, Tolerance, out, register, scalar, sum_tolerance, tensor
from deepinfer_hal.errors import BadCall
from deepinfer_hal.ops import _common as c


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    count: torch.Tensor | None,
    out: torch.Tensor | None,
    out_codes: torch.Tensor | None = None,
    out_scales: torch.Tensor | None = None,
) -> None:
    """x [T, N], weight [N] -> out [T, N] and / or out_codes [T, N] with out_scales [T, N/32]."""
    rows = c.wide(x[: c.valid_rows(count, x.shape[0])])
    mean = c.row_sum(rows * rows) / x.shape[-1]
    y = c.wide(weight) * rows * torch.rsqrt(mean + eps)[:, None]
    y = y.to(x.dtype if out is None else out.dtype)
    if out is not None:
        c.write_result(out, None, y)
    if out_codes is not None:
        c.write_result(out_codes, out_scales, y)


def _cases() -> list[Case]:
    rows = [
        dict(T=0, N=256, x="bf16", out="bf16"),
        dict(T=1, N=64, x="bf16", out="bf16"),
        dict(T=3, N=512, x="bf16", out="bf16", strided=True),
        dict(T=33, N=256, x="bf16", out="bf16", codes=True),
        dict(T=33, N=256, x="bf16", out=None, codes=True, count=9),
        dict(T=33, N=256, x="f32", out="f32", w="f32", count=32),
        dict(T=5, N=256, x="f32", out="bf16", w="f32"),
        dict(T=4, N=128, x="bf16", out="bf16", zero=True),
        dict(T=2, N=5120, x="bf16", out="bf16", codes=True),
    ]
    return [Case("rms_norm", row) for row in rows]


def _generate(case: Case, seed: int, device: Any, prepare: c.Prepare) -> dict[str, Any]:
    p, gen = case.params, c.generator(case, seed)
    x = c.normal(gen, p["T"], p["N"], dtype=c.dtype_of(p["x"]), device=device, scale=0.0 if p.get("zero") else 3.0)
    y = None if p["out"] is None else c.poisoned(p["T"], p["N"], dtype=c.dtype_of(p["out"]), device=device)
    if p.get("strided"):
        x, y = c.strided(x), c.strided(y)
    codes, scales = c.poisoned_pair(p["T"], p["N"], device) if p.get("codes") else (None, None)
    return {
        "x": x,
        "weight": (1 + c.normal(gen, p["N"], scale=0.1)).to(c.dtype_of(p.get("w", "bf16"))).to(device),
        "eps": 1e-20,
        "count": c.count_tensor(p.get("count"), device),
        "out": y,
        "out_codes": codes,
        "out_scales": scales,
    }


def _check(args: dict[str, Any]) -> None:
    c.check_pairs("rms_norm", args, ("out_codes", "out_scales"))
    if args["out"] is None and args["out_codes"] is None:
        raise BadCall("rms_norm: give out, out_codes or both; both are None")


def _tolerance(args: dict[str, Any], name: str) -> Tolerance:
    dtype = args["x"].dtype if args["out"] is None else args["out"].dtype
    return sum_tolerance(dtype, args["x"].shape[-1], c.largest(args["weight"]) / args["x"].shape[-1])


CARD = register(
    OpCard(
        name="rms_norm",
        group="residual",
        summary="Root-mean-square norm with an optional quantised copy of the result.",
        signature=(
            tensor("x", "float", "T N"),
            tensor("weight", "float", "N"),
            scalar("eps", "float"),
            COUNT,
            out("out", "float", "T N", optional=True),
            out("out_codes", "u8", "T N", optional=True),
            out("out_scales", "u8", "T N/32", optional=True),
        ),
        reference=rms_norm,
        rounding="FP32 throughout; one rounding to out's dtype (x's without out); codes from the rounded value",
        invariance="a row's bits depend on the row and the weight only",
        reference_invariant="yes",
        tolerance=_tolerance,
        check=_check,
        enumerate_cases=_cases,
        generate=_generate,
    )
)
