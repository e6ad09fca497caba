"""linear: every tile of the output is one program that goes over all of K."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from deepinfer_triton.gemm import dot_of, product_tile, store_tile
from deepinfer_triton.launch import launch
from deepinfer_triton.numeric import valid_rows
from deepinfer_triton.sizes import cdiv
from deepinfer_triton.support import ACTIVATIONS, offer, serves
from deepinfer_triton.targets import Target
from deepinfer_triton.weights import stored, weight_arguments

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float32: "f32", torch.uint8: "u8"}


@triton.jit(do_not_specialize=["rows"])
def linear_kernel(
    x, x_stride, x_scale, values, scales, count, rows, out, out_stride, out_scale,
    N: tl.constexpr, K: tl.constexpr, MATRIX: tl.constexpr, SCALES: tl.constexpr, FORMAT: tl.constexpr,
    FEATURES: tl.constexpr, TOKENS: tl.constexpr, DEPTH: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    n_tile, t_tile = tl.program_id(0), tl.program_id(1)
    last = valid_rows(count, rows)
    if t_tile * TOKENS < last:
        t = t_tile * TOKENS + tl.arange(0, TOKENS)
        n = n_tile * FEATURES + tl.arange(0, FEATURES)
        acc = product_tile(
            x, x_scale, x_stride, t, t < last, values, scales, n, N, K, FEATURES, TOKENS, DEPTH, FORMAT, DOT,
            PRECISE=out.dtype.element_ty == tl.float32,
        )
        store_tile(acc, out, out_scale, out_stride, t, t < last, n, n_tile, N, FEATURES, TOKENS)


def linear(target: Target, x, x_scale, weight, count, out, out_scale=None) -> None:
    kept = stored(weight)
    rows, features = x.shape[0], weight.shape[0]
    coded = out.dtype == torch.uint8
    grid = (cdiv(features, target.features), cdiv(rows, target.tokens))
    launch(
        linear_kernel, grid, x, x.stride(0), x_scale if x.dtype == torch.uint8 else None, kept.values, kept.scales,
        count, rows, out, out.stride(0), out_scale if coded else None, **weight_arguments(kept),
        FEATURES=target.features, TOKENS=target.tokens, DEPTH=target.depth,
        DOT=dot_of(target.dot, DTYPE_NAMES[x.dtype], kept.format), warps=target.gemm_warps, stages=3,
    )  # fmt: skip


MAKERS = [offer("linear", linear, supports=serves(x=ACTIVATIONS, out=ACTIVATIONS))]
