"""Stored rows for kernels: where row slot s of a cache lies, and tiles of rows read from it or written to it.

The layout itself is `deepinfer_hal.row_layout`'s; `geometry` turns it into the three distances that a kernel needs.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import triton
import triton.language as tl
from deepinfer_hal import row_layout

from deepinfer_triton.numeric import (
    decode_e2m1,
    decode_e4m3,
    decode_scale,
    narrow,
    pack,
    quantise_groups,
    scale_groups,
    unpack,
)
from deepinfer_triton.sizes import next_power_of_2

FORMATS = row_layout.ROW_FORMATS


@dataclass(frozen=True)
class Geometry:
    """Byte distances in a cache block: row r has its codes at r * code_pitch and its scales at scale_base + r *
    scale_pitch.
    """

    block_rows: int
    code_pitch: int
    scale_base: int
    scale_pitch: int

    def constants(self, prefix: str = "") -> dict[str, int]:
        """The distances as constants of a kernel."""
        names = {"BLOCK_ROWS": self.block_rows, "CODE_PITCH": self.code_pitch}
        names |= {"SCALE_BASE": self.scale_base, "SCALE_PITCH": self.scale_pitch}
        return {prefix + name: value for name, value in names.items()}


@functools.cache
def geometry(format: str, width: int, block_rows: int) -> Geometry:
    """Distances of rows of `width` values; block_rows 0 is a window store, one packed row a block."""
    rows, codes, scales = (
        max(block_rows, 1),
        row_layout.code_bytes(format, width),
        row_layout.scale_bytes(format, width),
    )
    if format in row_layout.SECTIONED:
        return Geometry(rows, codes, rows * codes, scales)
    return Geometry(rows, codes + scales, codes, codes + scales)


def tile_width(width: int) -> int:
    """Columns of the tile that holds a row: a power of two, whole groups of every format."""
    return max(32, next_power_of_2(width))


@triton.jit
def row_offsets(
    slot, block_bytes, BLOCK_ROWS: tl.constexpr, CODE_PITCH: tl.constexpr, SCALE_BASE: tl.constexpr,
    SCALE_PITCH: tl.constexpr,
):  # fmt: skip
    """int64 byte offsets (codes, scales) of row slots."""
    block = (slot // BLOCK_ROWS).to(tl.int64) * block_bytes
    row = slot % BLOCK_ROWS
    return block + row * CODE_PITCH, block + SCALE_BASE + row * SCALE_PITCH


@triton.jit
def load_row_tile(
    cache, codes_at, scales_at, valid, ROWS: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, FORMAT: tl.constexpr
):
    """float32 [ROWS, TILE] of the rows of D values at byte offsets int64 [ROWS]; zeros past D and where not valid."""
    column = tl.arange(0, TILE)
    if FORMAT == "f32":
        at = (cache + codes_at[:, None] + 4 * column[None, :]).to(tl.pointer_type(tl.float32))
        values = tl.load(at, mask=valid[:, None] & (column < D)[None, :], other=0.0)
    elif FORMAT == "bf16":
        at = (cache + codes_at[:, None] + 2 * column[None, :]).to(tl.pointer_type(tl.bfloat16))
        values = tl.load(at, mask=valid[:, None] & (column < D)[None, :], other=0.0).to(tl.float32)
    else:
        SHARED: tl.constexpr = 16 if FORMAT == "fp4_16" else 32
        if FORMAT == "fp8_32":
            inside = valid[:, None] & (column < D)[None, :]
            codes = tl.load(cache + codes_at[:, None] + column[None, :], mask=inside, other=0)
            values = decode_e4m3(codes)
        else:
            pair = tl.arange(0, TILE // 2)
            inside = valid[:, None] & (pair < D // 2)[None, :]
            packed = tl.load(cache + codes_at[:, None] + pair[None, :], mask=inside, other=0)
            values = decode_e2m1(unpack(packed, ROWS, TILE))
        group = tl.arange(0, TILE // SHARED)
        inside = valid[:, None] & (group < D // SHARED)[None, :]
        scales = tl.load(cache + scales_at[:, None] + group[None, :], mask=inside, other=1)
        values = scale_groups(values, decode_scale(scales, FORMAT), ROWS, TILE, SHARED)
    return values


@triton.jit
def store_row(cache, codes_at, scales_at, x, D: tl.constexpr, TILE: tl.constexpr, FORMAT: tl.constexpr):
    """Quantises one row of D values, float32 [TILE], into the row at scalar byte offsets."""
    column = tl.arange(0, TILE)
    if FORMAT == "f32":
        at = (cache + codes_at + 4 * column).to(tl.pointer_type(tl.float32))
        tl.store(at, x, mask=column < D)
    elif FORMAT == "bf16":
        at = (cache + codes_at + 2 * column).to(tl.pointer_type(tl.bfloat16))
        tl.store(at, narrow(x, tl.bfloat16), mask=column < D)
    else:
        SHARED: tl.constexpr = 16 if FORMAT == "fp4_16" else 32
        GROUPS: tl.constexpr = TILE // SHARED
        codes, scale = quantise_groups(tl.reshape(x, (GROUPS, SHARED)), FORMAT)
        group = tl.arange(0, GROUPS)
        tl.store(cache + scales_at + group, scale.to(tl.uint8), mask=group < D // SHARED)
        if FORMAT == "fp8_32":
            at = group[:, None] * SHARED + tl.arange(0, SHARED)[None, :]
            tl.store(cache + codes_at + at, codes.to(tl.uint8), mask=at < D)
        else:
            at = group[:, None] * (SHARED // 2) + tl.arange(0, SHARED // 2)[None, :]
            tl.store(cache + codes_at + at, pack(codes, GROUPS, SHARED).to(tl.uint8), mask=at < D // 2)
