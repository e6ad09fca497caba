"""quantise: one program per row and tile of whole groups. Programs that set a row's flag all store the same byte."""

from __future__ import annotations

import triton
import triton.language as tl
from deepinfer_hal.formats import GROUP_SIZE

from deepinfer_triton.launch import launch
from deepinfer_triton.numeric import pack, quantise_groups, valid_rows
from deepinfer_triton.overlap import overlap
from deepinfer_triton.rows import tile_width
from deepinfer_triton.sizes import cdiv
from deepinfer_triton.support import DENSE, group_size, offer, serves
from deepinfer_triton.targets import Target


@triton.jit(do_not_specialize=["rows"])
def quantise_kernel(
    x, x_stride, count, rows, codes, scales, flags, N: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
):  # fmt: skip
    overlap()
    t = tl.program_id(0)
    GROUPS: tl.constexpr = TILE // GROUP
    if t < valid_rows(count, rows):
        row, start = t.to(tl.int64), tl.program_id(1) * TILE
        at = start + tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        value = tl.load(x + row * x_stride + at, mask=at < N, other=0.0).to(tl.float32)
        code, scale = quantise_groups(value, FORMAT)
        group = start // GROUP + tl.arange(0, GROUPS)
        inside = group < N // GROUP
        tl.store(scales + row * (N // GROUP) + group, scale.to(tl.uint8), mask=inside)
        if FORMAT == "fp8_32":
            tl.store(codes + row * N + at, code.to(tl.uint8), mask=at < N)
        else:
            byte = start // 2 + tl.arange(0, GROUPS)[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :]
            packed = pack(code, GROUPS, GROUP).to(tl.uint8)
            tl.store(codes + row * (N // 2) + byte, packed, mask=byte < N // 2)
        if flags is not None:
            broken = (scale == (127 if FORMAT == "fp4_16" else 255)) & inside
            bad = tl.max(broken.to(tl.int32), axis=0)
            tl.store(flags + t, (tl.load(flags + t).to(tl.int32) | 1).to(tl.uint8), mask=bad > 0)


def quantise(target: Target, x, format, count, codes, scales, flags=None) -> None:
    rows, width = x.shape
    tile = min(target.columns, tile_width(width))
    launch(
        quantise_kernel, (rows, cdiv(width, tile)), x, x.stride(0), count, rows, codes, scales, flags,
        N=width, TILE=tile, GROUP=group_size("quantise", format), FORMAT=format, early=True,
    )  # fmt: skip


MAKERS = [offer("quantise", quantise, supports=serves(x=DENSE, format=tuple(GROUP_SIZE)))]
