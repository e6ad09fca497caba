"""Passes over a row of logits by one program: what the kernels of sampling share.

A row of 129 280 logits is 517 KB: it does not fit the registers and shared memory of one multiprocessor, but 64 of them fit
the L2 cache, so that only a kernel's first pass reads memory. Lane l of a pass sees the columns l, LANES + l, ... in order.
"""

from __future__ import annotations

import triton
import triton.language as tl

LANES, WARPS = 2048, 8
"""256 threads with eight logits each: what registers allow beside four sorted levels of logits and columns a lane."""

WIDE_LANES, WIDE_WARPS = 4096, 16
"""Of the passes that keep little."""

STAGES, FIRST_STAGES = tl.constexpr(4), tl.constexpr(8)
"""Tiles on their way from the cache, and from memory in a first pass: a row's program has a multiprocessor to itself and must
fill its share of the bandwidth."""


@triton.jit
def load_logits(row, column, V):
    """float32 logits of the columns; -inf past the vocabulary."""
    return tl.load(row + column, mask=column < V, other=float("-inf"))


@triton.jit
def is_broken(x):
    """int32: NaN or +inf, which make a row unusable."""
    return ((x != x) | (x == float("inf"))).to(tl.int32)


@triton.jit
def first_of_largest(value, column):
    """(largest value, the lowest of its columns) of a tile; -1 as NaN's column, if all are NaN."""
    best = tl.max(value, axis=0)
    return best, tl.min(tl.where(value == best, column, 0x7FFFFFFF), axis=0)


@triton.jit
def insert(x, place, a0, a1, a2, a3, p0, p1, p2, p3):
    """Every lane's four largest values in order, each with its place, after another came; of equal ones the first stays first."""
    over0, over1, over2, over3 = x > a0, x > a1, x > a2, x > a3
    a3, p3 = tl.where(over3, tl.where(over2, a2, x), a3), tl.where(over3, tl.where(over2, p2, place), p3)
    a2, p2 = tl.where(over2, tl.where(over1, a1, x), a2), tl.where(over2, tl.where(over1, p1, place), p2)
    a1, p1 = tl.where(over1, tl.where(over0, a0, x), a1), tl.where(over1, tl.where(over0, p0, place), p1)
    return tl.where(over0, x, a0), a1, a2, a3, tl.where(over0, place, p0), p1, p2, p3


@triton.jit
def softmax_stats(row, V, LANES: tl.constexpr):
    """(largest logit, sum of exp(x - largest)) of a row in one pass: every lane rescales its own sum."""
    lane = tl.arange(0, LANES)
    peak = tl.full([LANES], float("-inf"), tl.float32)
    total = tl.zeros([LANES], tl.float32)
    for start in tl.range(0, V, LANES, num_stages=STAGES):
        x = load_logits(row, start + lane, V)
        highest = tl.maximum(peak, x)
        safe = tl.where(highest == float("-inf"), 0.0, highest)
        total = total * tl.exp(peak - safe) + tl.exp(x - safe)
        peak = highest
    largest = tl.max(peak, axis=0)
    return largest, tl.sum(total * tl.exp(peak - tl.where(largest == float("-inf"), 0.0, largest)), axis=0)
