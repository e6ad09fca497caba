"""grouped_linear: a tile of output columns lies in one group's matrix, or sees all groups that it touches.

Columns of a narrow group share a tile, and a scale, with their neighbours': then each touched matrix is multiplied and
its own features are kept.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from deepinfer_triton.gemm import dot_of, product_tile, store_tile
from deepinfer_triton.launch import launch
from deepinfer_triton.numeric import valid_rows
from deepinfer_triton.ops.linear import DTYPE_NAMES
from deepinfer_triton.sizes import cdiv
from deepinfer_triton.support import ACTIVATIONS, offer, serves
from deepinfer_triton.targets import Target
from deepinfer_triton.weights import stored, weight_arguments


@triton.jit(do_not_specialize=["rows"])
def grouped_linear_kernel(
    x, x_stride, x_scale, values, scales, count, rows, out, out_stride, out_scale,
    N: tl.constexpr, K: tl.constexpr, MATRIX: tl.constexpr, SCALES: tl.constexpr, FORMAT: tl.constexpr,
    G: tl.constexpr, TOUCHED: tl.constexpr,
    FEATURES: tl.constexpr, TOKENS: tl.constexpr, DEPTH: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    tile, t_tile = tl.program_id(0), tl.program_id(1)
    last = valid_rows(count, rows)
    if t_tile * TOKENS < last:
        t = t_tile * TOKENS + tl.arange(0, TOKENS)
        column = tile * FEATURES + tl.arange(0, FEATURES)
        total = tl.zeros([FEATURES, TOKENS], tl.float32)
        for i in tl.static_range(TOUCHED):
            group = tl.minimum(tile * FEATURES // N + i, G - 1)
            mine = column // N == group
            n = tl.where(mine, column - group * N, N)
            part_scale, matrix_scales = x_scale, scales
            if x_scale is not None:
                part_scale = x_scale + group * (K // 32)
            if scales is not None:
                matrix_scales = scales + group * SCALES
            acc = product_tile(
                x + group * K, part_scale, x_stride, t, t < last, values + group.to(tl.int64) * MATRIX, matrix_scales, n,
                N, K, FEATURES, TOKENS, DEPTH, FORMAT, DOT, G * K // 32, PRECISE=out.dtype.element_ty == tl.float32,
            )  # fmt: skip
            if TOUCHED == 1:
                total = acc
            else:
                total = tl.where(mine[:, None], acc, total)
        store_tile(total, out, out_scale, out_stride, t, t < last, column, tile, G * N, FEATURES, TOKENS)


def grouped_linear(target: Target, x, x_scale, weight, count, out, out_scale=None) -> None:
    kept = stored(weight)
    rows, (groups, features, _) = x.shape[0], weight.shape
    coded = out.dtype == torch.uint8
    aligned = features % target.features == 0
    grid = (cdiv(groups * features, target.features), cdiv(rows, target.tokens))
    launch(
        grouped_linear_kernel, grid, x, x.stride(0), x_scale if x.dtype == torch.uint8 else None, kept.values,
        kept.scales, count, rows, out, out.stride(0), out_scale if coded else None, **weight_arguments(kept),
        G=groups, TOUCHED=1 if aligned else min(groups, cdiv(target.features - 1, features) + 1),
        FEATURES=target.features, TOKENS=target.tokens, DEPTH=target.depth,
        DOT=dot_of(target.dot, DTYPE_NAMES[x.dtype], kept.format), warps=target.gemm_warps, stages=3,
    )  # fmt: skip


MAKERS = [offer("grouped_linear", grouped_linear, supports=serves(x=ACTIVATIONS, out=ACTIVATIONS))]
