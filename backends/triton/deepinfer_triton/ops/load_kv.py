"""load_kv: one program per row."""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer_triton.launch import launch
from deepinfer_triton.numeric import narrow
from deepinfer_triton.rows import FORMATS, geometry, load_row_tile, row_offsets, tile_width
from deepinfer_triton.support import DENSE, offer, serves
from deepinfer_triton.targets import Target


@triton.jit
def load_kv_kernel(
    cache, block_bytes, slots, out,
    BLOCK_ROWS: tl.constexpr, CODE_PITCH: tl.constexpr, SCALE_BASE: tl.constexpr, SCALE_PITCH: tl.constexpr,
    D: tl.constexpr, TILE: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0)
    slot = tl.load(slots + n)
    if slot >= 0:
        one = slot + tl.zeros([1], tl.int32)
        codes_at, scales_at = row_offsets(one, block_bytes, BLOCK_ROWS, CODE_PITCH, SCALE_BASE, SCALE_PITCH)
        value = load_row_tile(cache, codes_at, scales_at, one >= 0, 1, D, TILE, FORMAT)
        column = tl.arange(0, TILE)[None, :]
        tl.store(out + n.to(tl.int64) * D + column, narrow(value, out.dtype.element_ty), mask=column < D)


def load_kv(target: Target, cache, slots, format, block_rows, out) -> None:
    width = out.shape[1]
    launch(
        load_kv_kernel, (slots.shape[0],), cache, cache.stride(0), slots, out,
        **geometry(format, width, block_rows).constants(), D=width, TILE=tile_width(width), FORMAT=format,
    )  # fmt: skip


MAKERS = [offer("load_kv", load_kv, supports=serves(out=DENSE, format=FORMATS))]
