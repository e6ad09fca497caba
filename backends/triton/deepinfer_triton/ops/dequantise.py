"""dequantise: one program per row, in tiles of whole groups."""

from __future__ import annotations

import triton
import triton.language as tl
from deepinfer_hal.formats import GROUP_SIZE

from deepinfer_triton.launch import launch
from deepinfer_triton.numeric import decode_e2m1, decode_e4m3, decode_scale, narrow, scale_groups, unpack, valid_rows
from deepinfer_triton.rows import tile_width
from deepinfer_triton.support import DENSE, group_size, offer, serves
from deepinfer_triton.targets import Target


@triton.jit(do_not_specialize=["rows"])
def dequantise_kernel(
    codes, scales, count, rows, out, out_stride, N: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0)
    if t < valid_rows(count, rows):
        row = t.to(tl.int64)
        for start in range(0, N, TILE):
            column = start + tl.arange(0, TILE)[None, :]
            group = start // GROUP + tl.arange(0, TILE // GROUP)[None, :]
            scale = tl.load(scales + row * (N // GROUP) + group, mask=group < N // GROUP, other=0)
            if FORMAT == "fp8_32":
                values = decode_e4m3(tl.load(codes + row * N + column, mask=column < N, other=0))
            else:
                byte = start // 2 + tl.arange(0, TILE // 2)[None, :]
                packed = tl.load(codes + row * (N // 2) + byte, mask=byte < N // 2, other=0)
                values = decode_e2m1(unpack(packed, 1, TILE))
            values = scale_groups(values, decode_scale(scale, FORMAT), 1, TILE, GROUP)
            tl.store(out + row * out_stride + column, narrow(values, out.dtype.element_ty), mask=column < N)


def dequantise(target: Target, codes, scales, format, count, out) -> None:
    rows, width = out.shape
    launch(
        dequantise_kernel, (rows,), codes, scales, count, rows, out, out.stride(0),
        N=width, TILE=min(target.columns, tile_width(width)), GROUP=group_size("dequantise", format), FORMAT=format,
    )  # fmt: skip


MAKERS = [offer("dequantise", dequantise, supports=serves(out=DENSE, format=tuple(GROUP_SIZE)))]
