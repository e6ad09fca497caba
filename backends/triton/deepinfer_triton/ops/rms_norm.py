"""rms_norm: one program per row, two passes over it in tiles of fixed width; codes come from the rounded value."""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer_triton.launch import launch
from deepinfer_triton.numeric import narrow, quantise_groups, valid_rows
from deepinfer_triton.rows import tile_width
from deepinfer_triton.support import DENSE, offer, serves
from deepinfer_triton.targets import Target


@triton.jit(do_not_specialize=["rows"])
def rms_norm_kernel(
    x, x_stride, weight, eps, count, rows, out, out_stride, codes, scales, N: tl.constexpr, TILE: tl.constexpr
):
    t = tl.program_id(0)
    if t < valid_rows(count, rows):
        row = x + t.to(tl.int64) * x_stride
        squares = tl.zeros([TILE], tl.float32)
        for start in range(0, N, TILE):
            column = start + tl.arange(0, TILE)
            value = tl.load(row + column, mask=column < N, other=0.0).to(tl.float32)
            squares += value * value
        factor = tl.rsqrt(tl.sum(squares, axis=0) / N + eps)
        for start in range(0, N, TILE):
            column = start + tl.arange(0, TILE)
            inside = column < N
            value = tl.load(row + column, mask=inside, other=0.0).to(tl.float32)
            y = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) * value * factor
            if out is not None:
                y = narrow(y, out.dtype.element_ty)
                tl.store(out + t.to(tl.int64) * out_stride + column, y, mask=inside)
            else:
                y = narrow(y, x.dtype.element_ty)
            if codes is not None:
                grouped = tl.reshape(y.to(tl.float32), (TILE // 32, 32))
                code, scale = quantise_groups(grouped, "fp8_32")
                group = start // 32 + tl.arange(0, TILE // 32)
                at = group[:, None] * 32 + tl.arange(0, 32)[None, :]
                tl.store(codes + t.to(tl.int64) * N + at, code.to(tl.uint8), mask=at < N)
                tl.store(scales + t.to(tl.int64) * (N // 32) + group, scale.to(tl.uint8), mask=group < N // 32)


def rms_norm(target: Target, x, weight, eps, count, out, out_codes=None, out_scales=None) -> None:
    rows, width = x.shape
    tile = min(target.columns, tile_width(width))
    launch(
        rms_norm_kernel, (rows,), x, x.stride(0), weight, eps, count, rows, out, 0 if out is None else out.stride(0),
        out_codes, out_scales, N=width, TILE=tile,
    )  # fmt: skip


MAKERS = [offer("rms_norm", rms_norm, supports=serves(x=DENSE, out=DENSE))]
