"""sample: one program per row: where top-k, top-p and min-p end, then the best of what survives under Gumbel noise.

If all survivors are among the logits that the search keeps in registers, noise is drawn for those alone. Otherwise the row is
read again: tiles get no noise that hold no survivor, or whose logits lie so far below the best so far that no noise could lift
them; and logarithms are taken only where a bound says that a tile may win.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer_triton.boundary import (
    bisect_kept,
    boundary_below,
    collect,
    key_of,
    row_weight_above,
    value_of,
    weigh,
    weight_above,
)
from deepinfer_triton.launch import launch
from deepinfer_triton.noise import LARGEST_NOISE, gumbel, gumbel_bound, top_word_of_id, top_words_of_ids
from deepinfer_triton.support import NVIDIA, offer, serves
from deepinfer_triton.targets import Target
from deepinfer_triton.vocabulary import FIRST_STAGES, LANES, STAGES, WARPS, first_of_largest, is_broken, load_logits

LOG2_E = tl.constexpr(1.4426950408889634)
SLACK = tl.constexpr(0.01)
"""More than a quick quotient and bound can be off."""

ALL_TIES = tl.constexpr(1 << 30)
LEAST_TARGET = tl.constexpr(1e-30)

UNKNOWN = tl.constexpr(-2)
"""No token yet: the row must be read again."""


@triton.jit
def ties_within(v, above, peak, rate, target):
    """How many logits equal to the boundary v belong, lowest ids first, when W above it is known: at least one."""
    number = tl.ceil((target - above) / weigh(v, peak, rate))
    return tl.where(above < target, tl.minimum(tl.maximum(number, 1.0), 1e9).to(tl.int32), ALL_TIES)


@triton.jit
def survivors(
    row, a0, a1, a2, a3, p0, p1, p2, p3, lowest, peak, top_k, top_p, temperature, V, LANES: tl.constexpr
):
    """(floor, ties, least, kept logits, their columns): logits above `floor` survive top-k and top-p, and the first `ties` of
    those equal to it; all logits above `least` are kept. A boundary below what is kept gives the kept ones up.
    """
    floor, ties = tl.full([], float("-inf"), tl.float32), tl.full([], ALL_TIES, tl.int32)
    least = tl.maximum(tl.max(a3, axis=0), value_of(key_of(lowest) - 1))
    for by_mass in range(2):
        if ((by_mass == 0) & (top_k > 0) & (top_k < V)) | ((by_mass == 1) & (top_p < 1)):
            rate = tl.where(by_mass == 1, LOG2_E / temperature, 0.0)
            target = top_k.to(tl.float32)
            if by_mass == 1:
                if floor >= least:
                    mass = weight_above(a0, a1, a2, a3, floor, peak, rate)
                else:
                    mass = row_weight_above(row, floor, peak, rate, V, LANES)
                mass += tl.where(ties < ALL_TIES, ties.to(tl.float32) * weigh(floor, peak, rate), 0.0)
                target = tl.maximum(mass * top_p, LEAST_TARGET)
            above = weight_above(a0, a1, a2, a3, least, peak, rate)
            if above >= target:
                v, above = bisect_kept(a0, a1, a2, a3, least, peak, 0.0, peak, rate, target)
            else:
                high = tl.maximum(tl.minimum(least, peak), lowest)
                v, above = boundary_below(row, lowest, high, above, peak, rate, target, V, LANES)
                least = tl.full([], float("inf"), tl.float32)
                a0 = tl.full([LANES], float("-inf"), tl.float32)
                a1, a2, a3 = a0, a0, a0
                p0 = tl.zeros([LANES], tl.int32)
                p1, p2, p3 = p0, p0, p0
            within = ties_within(v, above, peak, rate, target)
            ties = tl.where(v > floor, within, tl.where(v == floor, tl.minimum(ties, within), ties))
            floor = tl.maximum(floor, v)
    return floor, ties, least, a0, a1, a2, a3, p0, p1, p2, p3


@triton.jit
def last_tie(a0, a1, a2, a3, p0, p1, p2, p3, floor, ties):
    """The column of the last kept logit equal to `floor` that belongs, if only `ties` of them do."""
    low, high = 0, 0x7FFFFFFF
    level = (a0 == floor).to(tl.int32) + (a1 == floor).to(tl.int32) + (a2 == floor).to(tl.int32) + (a3 == floor).to(tl.int32)
    if tl.sum(level, axis=0) <= ties:
        low = high
    while low < high:
        middle = low + (high - low) // 2
        level = ((a0 == floor) & (p0 <= middle)).to(tl.int32) + ((a1 == floor) & (p1 <= middle)).to(tl.int32)
        level += ((a2 == floor) & (p2 <= middle)).to(tl.int32) + ((a3 == floor) & (p3 <= middle)).to(tl.int32)
        enough = tl.sum(level, axis=0) >= ties
        low, high = tl.where(enough, low, middle + 1), tl.where(enough, middle, high)
    return low


@triton.jit
def draw_level(x, column, keep, least, temperature, seed, position, purpose, best, token, LANES: tl.constexpr):
    """(best, token) after one level of kept logits, of equal noisy ones the lowest column."""
    if tl.max(keep.to(tl.int32), axis=0) > 0:
        scaled = tl.div_rn(x, tl.zeros([LANES], tl.float32) + temperature)
        noise = gumbel(top_word_of_id(seed, position, purpose, column))
        value, first = first_of_largest(tl.where(keep & (scaled >= least), scaled + noise, float("-inf")), column)
        token = tl.where(value > best, first, tl.where(value == best, tl.minimum(first, token), token))
        best = tl.maximum(best, value)
    return best, token


@triton.jit
def draw_kept(
    a0, a1, a2, a3, p0, p1, p2, p3, floor, ties, least, temperature, seed, position, purpose, LANES: tl.constexpr
):
    """The token of the best noisy logit among the kept ones that survive."""
    last = last_tie(a0, a1, a2, a3, p0, p1, p2, p3, floor, ties)
    keep0, keep1 = (a0 > floor) | ((a0 == floor) & (p0 <= last)), (a1 > floor) | ((a1 == floor) & (p1 <= last))
    keep2, keep3 = (a2 > floor) | ((a2 == floor) & (p2 <= last)), (a3 > floor) | ((a3 == floor) & (p3 <= last))
    best, token = tl.full([], float("-inf"), tl.float32), tl.full([], 0x7FFFFFFF, tl.int32)
    best, token = draw_level(a0, p0, keep0, least, temperature, seed, position, purpose, best, token, LANES)
    best, token = draw_level(a1, p1, keep1, least, temperature, seed, position, purpose, best, token, LANES)
    best, token = draw_level(a2, p2, keep2, least, temperature, seed, position, purpose, best, token, LANES)
    best, token = draw_level(a3, p3, keep3, least, temperature, seed, position, purpose, best, token, LANES)
    return token


@triton.jit
def draw_row(row, floor, ties, least, temperature, seed, position, purpose, V, LANES: tl.constexpr):
    """The token of the best noisy logit of the row; -1 if it has a NaN, +inf, or nothing but -inf."""
    lane = tl.arange(0, LANES)
    broken = tl.zeros([LANES], tl.int32)
    best, token, seen = float("-inf"), -1, 0
    inverse = 1.0 / temperature
    for start in tl.range(0, V, LANES, num_stages=STAGES):
        x = load_logits(row, start + lane, V)
        broken |= is_broken(x)
        hope = tl.where(x >= floor, x * inverse, float("-inf"))
        if tl.max(hope, axis=0) + (LARGEST_NOISE + SLACK) > best:
            top = top_words_of_ids(seed, position, purpose, start, LANES)
            if tl.max(hope + gumbel_bound(top), axis=0) + SLACK > best:
                level = x == floor
                keep = (x > floor) | (level & (seen + tl.cumsum(level.to(tl.int32), axis=0) <= ties))
                scaled = tl.div_rn(x, tl.zeros([LANES], tl.float32) + temperature)
                noisy = tl.where(keep & (scaled >= least), scaled + gumbel(top), float("-inf"))
                value, column = first_of_largest(noisy, start + lane)
                token = tl.where(value > best, column, token)
                best = tl.maximum(best, value)
        if ties < ALL_TIES:
            seen += tl.sum((x == floor).to(tl.int32), axis=0)
    return tl.where((tl.max(broken, axis=0) == 0) & (best > float("-inf")), token, -1)


@triton.jit
def draw_filtered(
    row, temperature, top_k, top_p, min_p, seed, position, purpose, V, LANES: tl.constexpr
):
    """(token, floor, ties, least) of a row with top-k, top-p or min-p: the token is -1 if the row is unusable, and UNKNOWN if
    some of what survives is not kept: logits above `floor`, `ties` of those equal to it, and of those the ones that come to
    `least` at the row's temperature.
    """
    a0, a1, a2, a3, p0, p1, p2, p3, same, low = collect(row, float("inf"), V, LANES, FIRST_STAGES)
    peak, lowest = tl.max(a0, axis=0), tl.min(low, axis=0)
    token, floor, ties, least = -1, float("-inf"), tl.full([], ALL_TIES, tl.int32), float("-inf")
    if (peak > float("-inf")) & (peak < float("inf")) & (lowest > float("-inf")):
        floor, ties, bound, a0, a1, a2, a3, p0, p1, p2, p3 = survivors(
            row, a0, a1, a2, a3, p0, p1, p2, p3, lowest, peak, top_k, top_p, temperature, V, LANES
        )
        least = tl.where(min_p > 0, tl.div_rn(peak, temperature) + tl.log(min_p), float("-inf"))
        surely_out = least * temperature - SLACK * (1.0 + tl.abs(peak))
        token = UNKNOWN
        if tl.maximum(floor, surely_out) > bound:
            token = draw_kept(
                a0, a1, a2, a3, p0, p1, p2, p3, floor, ties, least, temperature, seed, position, purpose, LANES
            )
    return token, floor, ties, least


@triton.jit
def greedy(row, V, LANES: tl.constexpr):
    """The token of the largest logit; -1 if the row is unusable."""
    lane = tl.arange(0, LANES)
    broken = tl.zeros([LANES], tl.int32)
    peak = tl.full([LANES], float("-inf"), tl.float32)
    where = tl.zeros([LANES], tl.int32)
    for start in tl.range(0, V, LANES, num_stages=FIRST_STAGES):
        x = load_logits(row, start + lane, V)
        broken |= is_broken(x)
        where = tl.where(x > peak, start, where)
        peak = tl.maximum(peak, x)
    best, token = first_of_largest(peak, where + lane)
    return tl.where((tl.max(broken, axis=0) == 0) & (best > float("-inf")), token, -1)


@triton.jit
def sample_kernel(
    logits, logits_stride, temperatures, top_ks, top_ps, min_ps, seeds, positions, purpose, tokens,
    V, LANES: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(0).to(tl.int64)
    row = logits + s * logits_stride
    temperature = tl.load(temperatures + s)
    top_k, top_p, min_p = tl.load(top_ks + s), tl.load(top_ps + s), tl.load(min_ps + s)
    seed, position = tl.load(seeds + s), tl.load(positions + s)
    if temperature > 0:
        token, floor, least = UNKNOWN, float("-inf"), float("-inf")
        ties = tl.full([], ALL_TIES, tl.int32)
        if ((top_k > 0) & (top_k < V)) | (top_p < 1) | (min_p > 0):
            token, floor, ties, least = draw_filtered(
                row, temperature, top_k, top_p, min_p, seed, position, purpose, V, LANES
            )
        if token == UNKNOWN:
            token = draw_row(row, floor, ties, least, temperature, seed, position, purpose, V, LANES)
    else:
        token = greedy(row, V, LANES)
    tl.store(tokens + s, token)


def sample(target: Target, logits, temperature, top_k, top_p, min_p, seeds, positions, purpose, tokens) -> None:
    rows, vocab = logits.shape
    launch(
        sample_kernel, (rows,), logits, logits.stride(0), temperature, top_k, top_p, min_p, seeds, positions, purpose,
        tokens, vocab, LANES=LANES, warps=WARPS,
    )  # fmt: skip


MAKERS = [offer("sample", sample, supports=serves(), targets=NVIDIA)]
