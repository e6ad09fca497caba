"""load_kv: one program per few rows, so that as many loads are under way as a copy needs."""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer_triton.launch import launch
from deepinfer_triton.numeric import narrow
from deepinfer_triton.rows import FORMATS, geometry, load_row_tile, row_offsets, tile_width
from deepinfer_triton.sizes import cdiv
from deepinfer_triton.support import DENSE, offer, serves
from deepinfer_triton.targets import Target

ROWS = 8


@triton.jit
def load_kv_kernel(
    cache, block_bytes, slots, total, out,
    BLOCK_ROWS: tl.constexpr, CODE_PITCH: tl.constexpr, SCALE_BASE: tl.constexpr, SCALE_PITCH: tl.constexpr,
    D: tl.constexpr, TILE: tl.constexpr, FORMAT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots + n, mask=n < total, other=-1)
    codes_at, scales_at = row_offsets(tl.maximum(slot, 0), block_bytes, BLOCK_ROWS, CODE_PITCH, SCALE_BASE, SCALE_PITCH)
    value = load_row_tile(cache, codes_at, scales_at, slot >= 0, ROWS, D, TILE, FORMAT)
    column = tl.arange(0, TILE)[None, :]
    at = out + n.to(tl.int64)[:, None] * D + column
    tl.store(at, narrow(value, out.dtype.element_ty), mask=(slot >= 0)[:, None] & (column < D))


def load_kv(target: Target, cache, slots, format, block_rows, out) -> None:
    width, total = out.shape[1], slots.shape[0]
    launch(
        load_kv_kernel, (cdiv(total, ROWS),), cache, cache.stride(0), slots, total, out,
        **geometry(format, width, block_rows).constants(), D=width, TILE=tile_width(width), FORMAT=format, ROWS=ROWS,
    )  # fmt: skip


MAKERS = [offer("load_kv", load_kv, supports=serves(out=DENSE, format=FORMATS))]
