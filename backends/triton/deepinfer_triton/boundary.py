"""Where top-k and top-p end in a row of logits: the boundary value of a weight, found without sorting and without memory.

With weights w(x) = 2^((x - peak) rate), the boundary of a target is the largest logit v with W(>= v) >= target, where
W(>= v) is the weight of all logits from v up. A rate of 0 counts (top-k), log2(e) / temperature weighs by probability.

Every lane keeps its four largest logits in registers. All logits above the largest fourth of a lane are among them (about
a thousand of 129 280 in random order), and a boundary up there is found by bisection in registers. One below is bracketed
by passes over the row, each with four thresholds at once, until the rest fits the registers. Sums have a fixed order and
rounding is monotone, so W falls as v rises and the bracket always holds.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer_triton.numeric import MAGNITUDE, as_bits, as_float
from deepinfer_triton.vocabulary import STAGES, insert, load_logits

LINEAR_PASSES = tl.constexpr(3)
"""Passes of a round that split the bracket evenly by value, after which what is left is collected."""

LAST_ROUND = tl.constexpr(40)


@triton.jit
def key_of(x):
    """int64 that orders as the float32 scalar does."""
    bits = as_bits(x)
    return tl.where(bits < 0, bits ^ MAGNITUDE, bits).to(tl.int64)


@triton.jit
def value_of(key):
    """The float32 scalar of an int64 key."""
    bits = key.to(tl.int32)
    return as_float(tl.where(bits < 0, bits ^ MAGNITUDE, bits))


@triton.jit
def weigh(x, peak, rate):
    """The weight of finite logits: 1 where rate is 0."""
    return tl.exp2((x - peak) * rate)


@triton.jit
def collect(row, ceiling, V, LANES: tl.constexpr, STAGES: tl.constexpr):
    """Of each lane the four largest logits up to `ceiling`, descending, their columns, how often the first occurs, and the
    least finite logit of all, -inf where there is a NaN.
    """
    lane = tl.arange(0, LANES)
    a0 = tl.full([LANES], float("-inf"), tl.float32)
    a1, a2, a3, low = a0, a0, a0, 0.0 - a0
    p0 = tl.zeros([LANES], tl.int32)
    p1, p2, p3, ties = p0, p0, p0, p0
    for start in tl.range(0, V, LANES, num_stages=STAGES):
        x = load_logits(row, start + lane, V)
        low = tl.minimum(low, tl.where(x > float("-inf"), x, tl.where(x == x, float("inf"), float("-inf"))))
        x = tl.where(x <= ceiling, x, float("-inf"))
        ties = tl.where(x > a0, 1, ties + (x == a0).to(tl.int32))
        a0, a1, a2, a3, p0, p1, p2, p3 = insert(x, start + lane, a0, a1, a2, a3, p0, p1, p2, p3)
    return a0, a1, a2, a3, p0, p1, p2, p3, ties, low


@triton.jit
def weight_above(a0, a1, a2, a3, least, peak, rate):
    """W of the kept logits above `least`."""
    total = tl.where(a0 > least, weigh(a0, peak, rate), 0.0) + tl.where(a1 > least, weigh(a1, peak, rate), 0.0)
    total += tl.where(a2 > least, weigh(a2, peak, rate), 0.0) + tl.where(a3 > least, weigh(a3, peak, rate), 0.0)
    return tl.sum(total, axis=0)


@triton.jit
def row_weight_above(row, least, peak, rate, V, LANES: tl.constexpr):
    """W of the row's logits above `least`."""
    lane = tl.arange(0, LANES)
    total = tl.zeros([LANES], tl.float32)
    for start in tl.range(0, V, LANES, num_stages=STAGES):
        x = load_logits(row, start + lane, V)
        total += tl.where(x > least, weigh(x, peak, rate), 0.0)
    return tl.sum(total, axis=0)


@triton.jit
def bisect_kept(a0, a1, a2, a3, least, ceiling, above, peak, rate, target):
    """(boundary, W above it) among kept logits in (least, ceiling], where above + W(> least) reaches the target."""
    w0, w1, w2, w3 = weigh(a0, peak, rate), weigh(a1, peak, rate), weigh(a2, peak, rate), weigh(a3, peak, rate)
    low, high = key_of(least) + 1, key_of(ceiling)
    while low < high:
        middle = (low + high + 1) >> 1
        v = value_of(middle)
        total = tl.where(a0 >= v, w0, 0.0) + tl.where(a1 >= v, w1, 0.0)
        total += tl.where(a2 >= v, w2, 0.0) + tl.where(a3 >= v, w3, 0.0)
        reached = above + tl.sum(total, axis=0) >= target
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle - 1)
    v = value_of(low)
    return v, above + weight_above(a0, a1, a2, a3, v, peak, rate)


@triton.jit
def threshold(low, high, part: tl.constexpr, by_key):
    """The part-th of four thresholds inside (low, high]: evenly by value, or by key, which always ends."""
    evenly = low + (high - low) * (part * 0.2)
    first, last = key_of(low), key_of(high)
    keyed = value_of(first + ((last - first) * part + 4) // 5)
    return tl.where(by_key, keyed, tl.minimum(tl.maximum(evenly, low), high))


@triton.jit
def narrow_bracket(row, low, high, above, by_key, peak, rate, target, V, LANES: tl.constexpr):
    """One pass: the bracket [low, high] around the boundary and W above it, about a fifth as wide."""
    lane = tl.arange(0, LANES)
    t1, t2 = threshold(low, high, 1, by_key), threshold(low, high, 2, by_key)
    t3, t4 = threshold(low, high, 3, by_key), threshold(low, high, 4, by_key)
    s1 = tl.zeros([LANES], tl.float32)
    s2, s3, s4 = s1, s1, s1
    for start in tl.range(0, V, LANES, num_stages=STAGES):
        x = load_logits(row, start + lane, V)
        w = weigh(x, peak, rate)
        s1 += tl.where(x >= t1, w, 0.0)
        s2 += tl.where(x >= t2, w, 0.0)
        s3 += tl.where(x >= t3, w, 0.0)
        s4 += tl.where(x >= t4, w, 0.0)
    low, high, above = cut(low, high, above, t1, tl.sum(s1, axis=0), target)
    low, high, above = cut(low, high, above, t2, tl.sum(s2, axis=0), target)
    low, high, above = cut(low, high, above, t3, tl.sum(s3, axis=0), target)
    return cut(low, high, above, t4, tl.sum(s4, axis=0), target)


@triton.jit
def cut(low, high, above, t, weight, target):
    """The bracket after W(>= t) = weight is known."""
    reached = weight >= target
    below = value_of(key_of(t) - 1)
    outside = reached | (t > high) | (t <= low)
    raised = tl.where(reached & (t > low), tl.minimum(t, high), low)
    above = tl.where(outside, above, weight)
    high = tl.where(outside, high, tl.maximum(below, low))
    return raised, high, above


@triton.jit
def boundary_below(row, low, high, above, peak, rate, target, V, LANES: tl.constexpr):
    """(v, W above v) where v lies in [low, high] and W above `high` is known: rounds of passes over the row."""
    rounds = 0
    while (low < high) & (rounds < LAST_ROUND):
        for _ in range(LINEAR_PASSES):
            low, high, above = narrow_bracket(row, low, high, above, rounds > 0, peak, rate, target, V, LANES)
        if low < high:
            low, high, above = finish(row, low, high, above, peak, rate, target, V, LANES)
        rounds += 1
    return low, above


@triton.jit
def finish(row, low, high, above, peak, rate, target, V, LANES: tl.constexpr):
    """Collects what is left of a bracket: low and high meet if the boundary is its largest logit or is kept."""
    a0, a1, a2, a3, p0, p1, p2, p3, ties, rest = collect(row, high, V, LANES, STAGES)
    top = tl.max(a0, axis=0)
    least = tl.maximum(tl.max(a3, axis=0), value_of(key_of(low) - 1))
    with_top = above + tl.sum(tl.where(a0 == top, ties, 0), axis=0).to(tl.float32) * weigh(top, peak, rate)
    with_kept = above + weight_above(a0, a1, a2, a3, least, peak, rate)
    if with_top >= target:
        low, high = top, top
    elif least >= top:
        high, above = tl.maximum(value_of(key_of(top) - 1), low), with_top
    elif with_kept >= target:
        low, above = bisect_kept(a0, a1, a2, a3, least, top, above, peak, rate, target)
        high = low
    else:
        high, above = tl.maximum(least, low), with_kept
    return low, high, above
