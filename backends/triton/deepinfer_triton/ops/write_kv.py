"""write_kv and store_draft_kv: norm, rope, quantise and store of a row in one program, rounding where their cards
say.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer_triton.launch import launch
from deepinfer_triton.numeric import narrow, valid_rows
from deepinfer_triton.overlap import overlap
from deepinfer_triton.rows import FORMATS, geometry, row_offsets, store_row, tile_width
from deepinfer_triton.support import DENSE, offer, serves
from deepinfer_triton.targets import Target


@triton.jit(do_not_specialize=["rows"])
def write_kv_kernel(
    x, x_stride, norm_weight, eps, positions, table, slots, count, rows, cache, block_bytes, latent,
    BLOCK_ROWS: tl.constexpr, CODE_PITCH: tl.constexpr, SCALE_BASE: tl.constexpr, SCALE_PITCH: tl.constexpr,
    D: tl.constexpr, R: tl.constexpr, TILE: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    overlap()
    t = tl.program_id(0)
    if t < valid_rows(count, rows):
        slot, position = tl.load(slots + t), tl.load(positions + t).to(tl.int64)
        column = tl.arange(0, TILE)
        inside = column < D
        row = x + t.to(tl.int64) * x_stride
        # All loads that need no slot come before it is asked. The other half of each pair is normed again: a second read
        # costs less than moving values between lanes.
        value = tl.load(row + column, mask=inside, other=0.0).to(tl.float32)
        partner = tl.load(row + (column ^ 1), mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(norm_weight + column, mask=inside, other=0.0).to(tl.float32)
        partner_weight = tl.load(norm_weight + (column ^ 1), mask=inside, other=0.0).to(tl.float32)
        if slot >= 0:
            turns = inside & (column >= D - R) & (position >= 0)
            angles = table + position * R + (column - (D - R)) // 2
            cos = tl.load(angles, mask=turns, other=1.0)
            sin = tl.load(angles + R // 2, mask=turns, other=0.0)
            factor = tl.rsqrt(tl.sum(value * value, axis=0) / D + eps)
            normed = narrow(weight * value * factor, x.dtype.element_ty)
            if latent is not None:
                kept = narrow(normed.to(tl.float32), latent.dtype.element_ty)
                tl.store(latent + t.to(tl.int64) * D + column, kept, mask=inside)
            partner = narrow(partner_weight * partner * factor, x.dtype.element_ty).to(tl.float32)
            value = normed.to(tl.float32)
            turned = value * cos + partner * tl.where(column % 2 == 0, 0.0 - sin, sin)
            result = narrow(tl.where(turns, turned, value), x.dtype.element_ty).to(tl.float32)
            codes_at, scales_at = row_offsets(slot, block_bytes, BLOCK_ROWS, CODE_PITCH, SCALE_BASE, SCALE_PITCH)
            store_row(cache, codes_at, scales_at, result, D, TILE, FORMAT)


def write_kv(
    target: Target, x, norm_weight, eps, positions, table, slots, format, block_rows, count, cache, latent=None
) -> None:
    rows, width = x.shape
    launch(
        write_kv_kernel, (rows,), x, x.stride(0), norm_weight, eps, positions, table, slots, count, rows,
        cache, cache.stride(0), latent, **geometry(format, width, block_rows).constants(),
        D=width, R=table.shape[1], TILE=tile_width(width), FORMAT=format, early=True,
    )  # fmt: skip


def store_draft_kv(target: Target, x, norm_weight, eps, positions, table, slots, format, count, cache) -> None:
    write_kv(target, x, norm_weight, eps, positions, table, slots, format, 0, count, cache)


_SUPPORTS = serves(x=DENSE, format=FORMATS)
MAKERS = [
    offer("write_kv", write_kv, supports=_SUPPORTS),
    offer("store_draft_kv", store_draft_kv, supports=_SUPPORTS),
]
