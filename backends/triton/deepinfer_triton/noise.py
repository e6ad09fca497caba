"""Random numbers for kernels: the device half of `deepinfer_hal.philox`, whose counters and rounding these are."""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer_triton.numeric import as_bits, log1p_of_fraction

LARGEST_NOISE = tl.constexpr(17.33)
"""No Gumbel noise is larger: -log(-log(1 - 2^-25)) = 25 log 2 = 17.3287."""

LN2 = tl.constexpr(0.6931472)


@triton.jit
def top_words(seed, position, purpose, group):
    """int32 upper 24 bits of the four words of each block: seed int64, position int32 scalars, group int32 [G]."""
    zero = group * 0
    w0, w1, w2, w3 = tl.philox(seed, zero + position, zero + purpose, group, zero)
    return (w0 >> 8).to(tl.int32), (w1 >> 8).to(tl.int32), (w2 >> 8).to(tl.int32), (w3 >> 8).to(tl.int32)


@triton.jit
def top_words_of_ids(seed, position, purpose, start, LANES: tl.constexpr):
    """int32 [LANES]: the upper 24 bits of the words of ids start .. start + LANES; start is a multiple of 4."""
    w0, w1, w2, w3 = top_words(seed, position, purpose, start // 4 + tl.arange(0, LANES // 4))
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (LANES,))


@triton.jit
def top_word_of_id(seed, position, purpose, token):
    """The upper 24 bits of the word of each id, a scalar or a tile."""
    w0, w1, w2, w3 = top_words(seed, position, purpose, token // 4)
    word = token % 4
    return tl.where(word == 0, w0, tl.where(word == 1, w1, tl.where(word == 2, w2, w3)))


@triton.jit
def uniform(top):
    """float32 (top + 1/2) 2^-24, below 1."""
    return tl.minimum((top.to(tl.float32) + 0.5) * 5.9604645e-08, 0.99999994)


@triton.jit
def gumbel(top):
    """float32 -log(-log(u)). Above one half 1 - u is exact and u is not."""
    upper = top >= 8388608
    distance = (tl.where(upper, 16777215 - top, top).to(tl.float32) + 0.5) * 5.9604645e-08
    near_one = log1p_of_fraction(0.0 - tl.where(upper, distance, 0.25))
    negative_log = 0.0 - tl.where(upper, near_one, tl.log(distance))
    return 0.0 - tl.log(negative_log)


@triton.jit
def gumbel_bound(top):
    """float32, cheap: more than the noise, by at most 0.7 where that is large. -log(-log(u)) < -log(1 - u)."""
    beside_one = (16777215 - top).to(tl.float32) + 0.5
    return (151 - (as_bits(beside_one) >> 23)).to(tl.float32) * LN2  # 24 + 127
