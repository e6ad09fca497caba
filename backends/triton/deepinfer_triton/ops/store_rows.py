"""store_window_kv, store_compressed_kv and store_index_k: one program quantises one row into its slot.

Three cards, one op: they differ in the caches that they are meant for, and the format says how the row lies there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer_triton.launch import launch
from deepinfer_triton.numeric import valid_rows
from deepinfer_triton.rows import FORMATS, geometry, row_offsets, store_row, tile_width
from deepinfer_triton.support import DENSE, offer, serves
from deepinfer_triton.targets import Target


@triton.jit(do_not_specialize=["rows"])
def store_rows_kernel(
    x, x_stride, slots, count, rows, cache, block_bytes,
    BLOCK_ROWS: tl.constexpr, CODE_PITCH: tl.constexpr, SCALE_BASE: tl.constexpr, SCALE_PITCH: tl.constexpr,
    D: tl.constexpr, TILE: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0)
    if t < valid_rows(count, rows):
        slot = tl.load(slots + t)
        if slot >= 0:
            column = tl.arange(0, TILE)
            value = tl.load(x + t.to(tl.int64) * x_stride + column, mask=column < D, other=0.0).to(tl.float32)
            codes_at, scales_at = row_offsets(slot, block_bytes, BLOCK_ROWS, CODE_PITCH, SCALE_BASE, SCALE_PITCH)
            store_row(cache, codes_at, scales_at, value, D, TILE, FORMAT)


def store_paged(target: Target, x, slots, format, block_rows, count, cache) -> None:
    rows, width = x.shape
    launch(
        store_rows_kernel, (rows,), x, x.stride(0), slots, count, rows, cache, cache.stride(0),
        **geometry(format, width, block_rows).constants(), D=width, TILE=tile_width(width), FORMAT=format,
    )  # fmt: skip


def store_window(target: Target, x, slots, format, count, cache) -> None:
    store_paged(target, x, slots, format, 0, count, cache)


_SUPPORTS = serves(x=DENSE, format=FORMATS)
MAKERS = [
    offer("store_window_kv", store_window, supports=_SUPPORTS),
    offer("store_compressed_kv", store_paged, supports=_SUPPORTS),
    offer("store_index_k", store_paged, supports=_SUPPORTS),
]
