"""rope: one program per token and a few heads; the last r dims are read once as pairs and written in place."""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer_triton.launch import launch
from deepinfer_triton.numeric import narrow, valid_rows
from deepinfer_triton.overlap import overlap
from deepinfer_triton.sizes import cdiv, next_power_of_2
from deepinfer_triton.support import DENSE, offer, serves
from deepinfer_triton.targets import Target


@triton.jit
def rotate(pairs, cos, sin, INVERSE: tl.constexpr):
    """float32 pairs [..., N, 2] turned by the angles of cos, sin [..., N], or by the negative angles."""
    even, odd = tl.split(pairs)
    if INVERSE:
        return tl.join(even * cos + odd * sin, odd * cos - even * sin)
    else:
        return tl.join(even * cos - odd * sin, even * sin + odd * cos)


@triton.jit(do_not_specialize=["rows", "heads"])
def rope_kernel(
    positions, table, count, rows, heads, x, token_stride, head_stride, first, R: tl.constexpr, TILE: tl.constexpr,
    HEADS: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    overlap()
    t = tl.program_id(0)
    if t < valid_rows(count, rows):
        position = tl.load(positions + t)
        column, row = tl.arange(0, TILE), x + t.to(tl.int64) * token_stride + first
        if HEADS == 1:  # a tile of one dimension, which every compiler takes
            at, inside = row + tl.program_id(1).to(tl.int64) * head_stride + column, column < R
        else:
            head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
            at = row + head[:, None].to(tl.int64) * head_stride + column[None, :]
            inside = (head < heads)[:, None] & (column < R)[None, :]
        values = tl.load(at, mask=inside, other=0.0).to(tl.float32)  # does not wait for the position
        if position >= 0:
            pair = tl.arange(0, TILE // 2)
            angles = table + position.to(tl.int64) * R + pair
            cos = tl.load(angles, mask=pair < R // 2, other=0.0)
            sin = tl.load(angles + R // 2, mask=pair < R // 2, other=0.0)
            if HEADS == 1:
                turned = tl.reshape(rotate(tl.reshape(values, (TILE // 2, 2)), cos, sin, INVERSE), (TILE,))
            else:
                pairs = tl.reshape(values, (HEADS, TILE // 2, 2))
                turned = tl.reshape(rotate(pairs, cos[None, :], sin[None, :], INVERSE), (HEADS, TILE))
            tl.store(at, narrow(turned, x.dtype.element_ty), mask=inside)


def rope(target: Target, positions, table, inverse, count, x) -> None:
    rows, heads, width = x.shape
    turned = table.shape[1]
    together = min(target.rope_heads, next_power_of_2(heads)) if heads else 1
    launch(
        rope_kernel, (rows, cdiv(heads, together)), positions, table, count, rows, heads, x, x.stride(0),
        x.stride(1), width - turned,
        R=turned, TILE=next_power_of_2(turned), HEADS=together, INVERSE=bool(inverse),
        warps=4 if together > 4 else 1, early=True,
    )  # fmt: skip


MAKERS = [offer("rope", rope, supports=serves(x=DENSE))]
