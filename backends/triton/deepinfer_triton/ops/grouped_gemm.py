"""grouped_gemm: tiles never straddle experts, and which expert a tile has is found on the device.

The grid has a tile for every TOKENS rows and one more per expert, the most that any split of the rows can need; a
program whose tile does not exist returns at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from deepinfer_triton.gemm import dot_of, product_tile, store_tile
from deepinfer_triton.launch import launch
from deepinfer_triton.ops.linear import DTYPE_NAMES
from deepinfer_triton.sizes import cdiv, next_power_of_2
from deepinfer_triton.support import ACTIVATIONS, offer, serves
from deepinfer_triton.targets import Target
from deepinfer_triton.weights import stored, weight_arguments


@triton.jit
def expert_of_tile(offsets, tile, E: tl.constexpr, EP: tl.constexpr, TOKENS: tl.constexpr):
    """(expert, first row, end row) of a tile; expert is E when there are fewer tiles."""
    e = tl.arange(0, EP)
    starts = tl.load(offsets + e, mask=e < E, other=0)
    ends = tl.load(offsets + e + 1, mask=e < E, other=0)
    tiles = (ends - starts + TOKENS - 1) // TOKENS
    done = tl.cumsum(tiles, axis=0)
    expert = tl.sum(((done <= tile) & (e < E)).to(tl.int32), axis=0)
    mine = e == expert
    start = tl.sum(tl.where(mine, starts + (tile - (done - tiles)) * TOKENS, 0), axis=0)
    return expert, start, tl.sum(tl.where(mine, ends, 0), axis=0)


@triton.jit
def grouped_gemm_kernel(
    x, x_stride, x_scale, values, scales, offsets, out, out_stride, out_scale,
    N: tl.constexpr, K: tl.constexpr, MATRIX: tl.constexpr, SCALES: tl.constexpr, FORMAT: tl.constexpr,
    E: tl.constexpr, EP: tl.constexpr,
    FEATURES: tl.constexpr, TOKENS: tl.constexpr, DEPTH: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    n_tile, tile = tl.program_id(0), tl.program_id(1)
    expert, start, end = expert_of_tile(offsets, tile, E, EP, TOKENS)
    if expert < E:
        t = start + tl.arange(0, TOKENS)
        n = n_tile * FEATURES + tl.arange(0, FEATURES)
        matrix = values + expert.to(tl.int64) * MATRIX
        matrix_scales = scales
        if scales is not None:
            matrix_scales = scales + expert.to(tl.int64) * SCALES
        acc = product_tile(
            x, x_scale, x_stride, t, t < end, matrix, matrix_scales, n, N, K, FEATURES, TOKENS, DEPTH, FORMAT, DOT,
            PRECISE=out.dtype.element_ty == tl.float32,
        )
        store_tile(acc, out, out_scale, out_stride, t, t < end, n, n_tile, N, FEATURES, TOKENS)


def grouped_gemm(target: Target, x, x_scale, weight, offsets, out, out_scale=None) -> None:
    kept = stored(weight)
    rows, (experts, features, _) = x.shape[0], weight.shape
    if rows == 0:
        return
    coded = out.dtype == torch.uint8
    grid = (cdiv(features, target.features), cdiv(rows, target.tokens) + min(experts, rows))
    launch(
        grouped_gemm_kernel, grid, x, x.stride(0), x_scale if x.dtype == torch.uint8 else None, kept.values,
        kept.scales, offsets, out, out.stride(0), out_scale if coded else None, **weight_arguments(kept),
        E=experts, EP=next_power_of_2(experts), FEATURES=target.features, TOKENS=target.tokens,
        DEPTH=target.depth,
        DOT=dot_of(target.dot, DTYPE_NAMES[x.dtype], kept.format), warps=target.gemm_warps, stages=3,
    )  # fmt: skip


MAKERS = [offer("grouped_gemm", grouped_gemm, supports=serves(x=ACTIVATIONS, out=ACTIVATIONS))]
