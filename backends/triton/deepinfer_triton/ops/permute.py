"""permute: a stable counting sort without a workspace, then a copy of rows.

Few pairs take one launch: the program of a pair counts the pairs that sort before it, which is its row, and copies; more
programs make the offsets. Many pairs take two: one program per expert counts what sorts before it, then numbers its own
pairs in order, and one more program marks the pairs without a row. Both give the same rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer_triton.launch import launch
from deepinfer_triton.numeric import valid_rows
from deepinfer_triton.overlap import overlap
from deepinfer_triton.rows import tile_width
from deepinfer_triton.sizes import cdiv, next_power_of_2
from deepinfer_triton.support import ACTIVATIONS, offer, serves
from deepinfer_triton.targets import Target

FEW_PAIRS = 2048
"""Up to so many pairs every pair looks at all others, if a program holds its row."""


@triton.jit
def place_pair(ids, pair, pairs, E: tl.constexpr, MANY: tl.constexpr):
    """The row of a pair, or -1 if its id is no expert."""
    mine = tl.load(ids + pair)
    other = tl.arange(0, MANY)
    chosen = tl.load(ids + other, mask=other < pairs, other=-1)
    earlier = (chosen < mine) | ((chosen == mine) & (other < pair))
    row = tl.sum(((chosen >= 0) & earlier).to(tl.int32), axis=0)
    return tl.where((mine >= 0) & (mine < E), row, -1)


@triton.jit
def store_offsets(ids, first, pairs, offsets, E: tl.constexpr, MANY: tl.constexpr, STEP: tl.constexpr):
    """Offsets of 16 experts: how many pairs have a lower expert."""
    expert = first + tl.arange(0, 16)
    before = tl.zeros([16], tl.int32)
    for start in range(0, MANY, STEP):
        other = start + tl.arange(0, STEP)
        chosen = tl.load(ids + other, mask=other < pairs, other=-1)
        lower = (chosen >= 0)[None, :] & (chosen[None, :] < expert[:, None])
        before += tl.sum(lower.to(tl.int32), axis=1)
    tl.store(offsets + expert, before, mask=expert <= E)


@triton.jit(do_not_specialize=["rows"])
def few_kernel(
    ids, x, x_stride, x_scale, count, rows, out, out_scale, offsets, source, inverse,
    E: tl.constexpr, K: tl.constexpr, MANY: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    overlap()
    pairs = valid_rows(count, rows) * K
    pair = tl.program_id(0)
    if pair < rows * K:
        if pair < pairs:
            token = (pair // K).to(tl.int64)
            column, group = tl.arange(0, TILE), tl.arange(0, TILE // 32)
            value = tl.load(x + token * x_stride + column, mask=column < WIDTH)  # comes while the row is found
            if x_scale is not None:
                scale = tl.load(x_scale + token * (WIDTH // 32) + group, mask=group < WIDTH // 32)
            row = place_pair(ids, pair, pairs, E, MANY)
            tl.store(inverse + pair, row)
            tl.store(source + row, pair, mask=row >= 0)
            to = row.to(tl.int64)
            tl.store(out + to * WIDTH + column, value, mask=(column < WIDTH) & (row >= 0))
            if x_scale is not None:
                tl.store(out_scale + to * (WIDTH // 32) + group, scale, mask=(group < WIDTH // 32) & (row >= 0))
    else:
        store_offsets(ids, (pair - rows * K) * 16, pairs, offsets, E, MANY, STEP)


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
    if rows * k <= FEW_PAIRS and tile_width(width) <= target.row_columns:
        many = max(16, next_power_of_2(rows * k))
        launch(
            few_kernel, (rows * k + experts // 16 + 1,), ids, x, x.stride(0), x_scale, count, rows, out, out_scale, offsets,
            source, inverse, E=experts, K=k, MANY=many, STEP=min(256, many), WIDTH=width,
            TILE=tile_width(width), early=True,
        )  # fmt: skip
        return
    tile = min(target.columns, tile_width(width))
    launch(sort_kernel, (experts + 1,), ids, count, rows, offsets, source, inverse, E=experts, K=k, TILE=target.columns)
    launch(
        copy_kernel, (rows * k, cdiv(width, tile)), x, x.stride(0), x_scale, count, rows, inverse, out,
        out_scale,
        K=k, WIDTH=width, TILE=tile,
    )  # fmt: skip


MAKERS = [offer("permute", permute, supports=serves(x=ACTIVATIONS, out=ACTIVATIONS))]
