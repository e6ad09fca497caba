"""Picking the k best of a row without sorting: the k-th largest key by its bits, then one ordered pass.

Scores become int32 keys that order as they do (-0 as 0, NaN as -inf), so that counting decides and ties are exact. The
k-th largest key grows by two bits in each of 16 passes over the row; everything above it is in, and of the keys equal to
it the first that still fit. A row's result depends on its own scores alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer_triton.numeric import as_bits

LEAST = tl.constexpr(-2147483648)
"""The key of what does not exist."""
MINUS_INFINITY = tl.constexpr(-2139095041)
"""The key of -inf: 0xFF800000 with its magnitude inverted."""


@triton.jit
def ordered_keys(score):
    """float32 scores as int32 keys in the same order."""
    score = tl.where(score == score, score, float("-inf"))
    bits = as_bits(tl.where(score == 0, 0.0, score))
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def load_keys(scores, t, K, candidates, candidate_stride, visible, unit, BLOCK: tl.constexpr, BP: tl.constexpr):
    """int32 keys of a row's units: single columns, or with `visible` the blocks of BLOCK columns."""
    if visible is None:
        there = unit < K
        score = tl.load(scores + t * K + unit, mask=there, other=float("-inf"))
        if candidates is not None:
            block = tl.load(candidates + t * candidate_stride + unit // BLOCK, mask=there, other=-1)
            score = tl.where(block >= 0, score, float("-inf"))
        return tl.where(there, ordered_keys(score), LEAST)
    else:
        seen = tl.load(visible + t)
        inner = tl.arange(0, BP)
        column = unit[:, None] * BLOCK + inner[None, :]
        live = (column < tl.minimum(seen, K)) & (inner < BLOCK)[None, :]
        key = ordered_keys(tl.load(scores + t * K + column, mask=live, other=float("-inf")))
        best = tl.max(key, axis=1)
        newest = (seen > 0) & (unit == (seen - 1) // BLOCK)
        best = tl.where(newest, 0x7F800000, best)
        return tl.where(unit * BLOCK < K, best, LEAST)


@triton.jit
def kth_key(
    scores, t, K, candidates, candidate_stride, visible, units, wanted,
    BLOCK: tl.constexpr, BP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The largest key that at least `wanted` units of the row reach."""
    found = tl.full([], LEAST, tl.int32)
    for digit in range(16):
        step = tl.full([], 1, tl.int32) << (30 - 2 * digit)
        first, second = found + step, found + step + step
        third = second + step
        reached = tl.zeros([TILE], tl.int32)
        reached_second = tl.zeros([TILE], tl.int32)
        reached_third = tl.zeros([TILE], tl.int32)
        for start in range(0, units, TILE):
            unit = start + tl.arange(0, TILE)
            key = load_keys(scores, t, K, candidates, candidate_stride, visible, unit, BLOCK, BP)
            reached += (key >= first).to(tl.int32)
            reached_second += (key >= second).to(tl.int32)
            reached_third += (key >= third).to(tl.int32)
        steps = (tl.sum(reached, axis=0) >= wanted).to(tl.int32)
        steps += (tl.sum(reached_second, axis=0) >= wanted).to(tl.int32)
        steps += (tl.sum(reached_third, axis=0) >= wanted).to(tl.int32)
        found += steps * step
    return found


@triton.jit(do_not_specialize=["rows", "K", "candidate_stride"])
def select_kernel(
    scores, K, candidates, candidate_stride, visible, count, rows, out, wanted,
    BLOCK: tl.constexpr, BP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    last = rows
    if count is not None:
        last = tl.minimum(tl.load(count), rows)
    if t < last:
        units = K
        if visible is not None:
            units = (K + BLOCK - 1) // BLOCK
        most = tl.minimum(wanted, units)
        kth = kth_key(scores, t, K, candidates, candidate_stride, visible, units, most, BLOCK, BP, TILE)
        above = tl.zeros([TILE], tl.int32)
        for start in range(0, units, TILE):
            unit = start + tl.arange(0, TILE)
            key = load_keys(scores, t, K, candidates, candidate_stride, visible, unit, BLOCK, BP)
            above += (key > kth).to(tl.int32)
        room = most - tl.sum(above, axis=0)
        ties, taken = 0, 0
        for start in range(0, units, TILE):
            unit = start + tl.arange(0, TILE)
            key = load_keys(scores, t, K, candidates, candidate_stride, visible, unit, BLOCK, BP)
            equal = (key == kth).to(tl.int32)
            in_time = ties + tl.cumsum(equal, axis=0) <= room
            picked = (key > MINUS_INFINITY) & ((key > kth) | ((equal > 0) & in_time))
            place = taken + tl.cumsum(picked.to(tl.int32), axis=0) - 1
            name = unit
            if candidates is not None:
                block = tl.load(candidates + t * candidate_stride + unit // BLOCK, mask=picked, other=0)
                name = block * BLOCK + unit % BLOCK
            tl.store(out + t * wanted + place, name, mask=picked)
            ties += tl.sum(equal, axis=0)
            taken += tl.sum(picked.to(tl.int32), axis=0)
        for start in range(0, wanted, TILE):
            place = start + tl.arange(0, TILE)
            tl.store(out + t * wanted + place, tl.full([TILE], -1, tl.int32), mask=(place >= taken) & (place < wanted))
