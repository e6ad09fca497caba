"""rms_norm: one program per row, which holds the row, or takes a long one in two passes of tiles of fixed width; codes
come from the rounded value.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer_triton.launch import launch
from deepinfer_triton.numeric import narrow, quantise_groups, valid_rows
from deepinfer_triton.overlap import overlap
from deepinfer_triton.rows import tile_width
from deepinfer_triton.support import DENSE, offer, serves
from deepinfer_triton.targets import Target


@triton.jit
def store_normed(
    y, row, start, dtype: tl.constexpr, out, out_stride, codes, scales, N: tl.constexpr, TILE: tl.constexpr
):
    """Rounds columns start .. of a normed row, float32 [TILE], to out's dtype (dtype without out) and quantises those."""
    column = start + tl.arange(0, TILE)
    if out is not None:
        y = narrow(y, out.dtype.element_ty)
        tl.store(out + row * out_stride + column, y, mask=column < N)
    else:
        y = narrow(y, dtype)
    if codes is not None:
        code, scale = quantise_groups(tl.reshape(y.to(tl.float32), (TILE // 32, 32)), "fp8_32")
        tl.store(codes + row * N + column, tl.reshape(code, (TILE,)).to(tl.uint8), mask=column < N)
        group = start // 32 + tl.arange(0, TILE // 32)
        tl.store(scales + row * (N // 32) + group, scale.to(tl.uint8), mask=group < N // 32)


@triton.jit(do_not_specialize=["rows"])
def rms_norm_kernel(
    x, x_stride, weight, eps, count, rows, out, out_stride, codes, scales, N: tl.constexpr, TILE: tl.constexpr
):
    overlap()
    t = tl.program_id(0)
    if t < valid_rows(count, rows):
        row = t.to(tl.int64)
        if N <= TILE:
            column = tl.arange(0, TILE)
            value = tl.load(x + row * x_stride + column, mask=column < N, other=0.0).to(tl.float32)
            scale = tl.load(weight + column, mask=column < N, other=0.0).to(tl.float32)
            factor = tl.rsqrt(tl.sum(value * value, axis=0) / N + eps)
            store_normed(scale * value * factor, row, 0, x.dtype.element_ty, out, out_stride, codes, scales, N, TILE)
        else:
            squares = tl.zeros([TILE], tl.float32)
            for start in range(0, N, TILE):
                column = start + tl.arange(0, TILE)
                value = tl.load(x + row * x_stride + column, mask=column < N, other=0.0).to(tl.float32)
                squares += value * value
            factor = tl.rsqrt(tl.sum(squares, axis=0) / N + eps)
            for start in range(0, N, TILE):
                column = start + tl.arange(0, TILE)
                value = tl.load(x + row * x_stride + column, mask=column < N, other=0.0).to(tl.float32)
                scale = tl.load(weight + column, mask=column < N, other=0.0).to(tl.float32)
                y = scale * value * factor
                store_normed(y, row, start, x.dtype.element_ty, out, out_stride, codes, scales, N, TILE)


def rms_norm(target: Target, x, weight, eps, count, out, out_codes=None, out_scales=None) -> None:
    rows, width = x.shape
    whole = tile_width(width)
    tile = whole if whole <= target.row_columns else target.columns
    launch(
        rms_norm_kernel, (rows,), x, x.stride(0), weight, eps, count, rows, out, 0 if out is None else out.stride(0),
        out_codes, out_scales, N=width, TILE=tile, warps=min(16, max(1, tile // 256)), early=True,
    )  # fmt: skip


MAKERS = [offer("rms_norm", rms_norm, supports=serves(x=DENSE, out=DENSE))]
