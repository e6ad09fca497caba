"""permute: a stable counting sort without a workspace, then a copy of rows.

One program per expert counts what sorts before it, then numbers its own pairs in order; one more program marks the
pairs without a row. Every program reads all ids: 24 576 of them for 4 096 tokens, which stay in the cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer_triton.launch import launch
from deepinfer_triton.numeric import valid_rows
from deepinfer_triton.support import ACTIVATIONS, offer, serves
from deepinfer_triton.targets import Target


@triton.jit(do_not_specialize=["rows"])
def sort_kernel(ids, count, rows, offsets, source, inverse, E: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr):
    expert = tl.program_id(0)  # E is the program of ids that are no expert
    pairs = valid_rows(count, rows) * K
    before = tl.zeros([TILE], tl.int32)
    for start in range(0, pairs, TILE):
        pair = start + tl.arange(0, TILE)
        chosen = tl.load(ids + pair, mask=pair < pairs, other=-1)
        before += ((chosen >= 0) & (chosen < expert)).to(tl.int32)
    row = tl.sum(before, axis=0)
    tl.store(offsets + expert, row)
    for start in range(0, pairs, TILE):
        pair = start + tl.arange(0, TILE)
        chosen = tl.load(ids + pair, mask=pair < pairs, other=-1)
        if expert < E:
            mine = (chosen == expert).to(tl.int32)
            place = row + tl.cumsum(mine, axis=0) - 1
            tl.store(source + place, pair, mask=mine > 0)
            tl.store(inverse + pair, place, mask=mine > 0)
            row += tl.sum(mine, axis=0)
        else:
            tl.store(
                inverse + pair, tl.full([TILE], -1, tl.int32), mask=((chosen < 0) | (chosen >= E)) & (pair < pairs)
            )


@triton.jit(do_not_specialize=["rows"])
def copy_kernel(
    x, x_stride, x_scale, count, rows, inverse, out, out_scale, K: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr
):
    pair = tl.program_id(0)
    if pair < valid_rows(count, rows) * K:
        row = tl.load(inverse + pair).to(tl.int64)
        if row >= 0:
            token = (pair // K).to(tl.int64)
            column = tl.program_id(1) * TILE + tl.arange(0, TILE)
            value = tl.load(x + token * x_stride + column, mask=column < WIDTH)
            tl.store(out + row * WIDTH + column, value, mask=column < WIDTH)
            if x_scale is not None:
                group = tl.program_id(1) * (TILE // 32) + tl.arange(0, TILE // 32)
                scale = tl.load(x_scale + token * (WIDTH // 32) + group, mask=group < WIDTH // 32)
                tl.store(out_scale + row * (WIDTH // 32) + group, scale, mask=group < WIDTH // 32)


def permute(target: Target, x, x_scale, ids, experts, count, out, out_scale, offsets, source, inverse) -> None:
    rows, k = ids.shape
    width = x.shape[1]
    tile = min(target.columns, max(32, triton.next_power_of_2(width)))
    launch(sort_kernel, (experts + 1,), ids, count, rows, offsets, source, inverse, E=experts, K=k, TILE=target.columns)
    launch(
        copy_kernel, (rows * k, triton.cdiv(width, tile)), x, x.stride(0), x_scale, count, rows, inverse, out,
        out_scale,
        K=k, WIDTH=width, TILE=tile,
    )  # fmt: skip


MAKERS = [offer("permute", permute, supports=serves(x=ACTIVATIONS, out=ACTIVATIONS))]
