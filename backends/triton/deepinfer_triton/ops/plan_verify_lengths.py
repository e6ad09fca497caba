"""plan_verify_lengths: one program sorts the gains of all drafts, sums them up, and takes the best of all prefixes.

Gain and place are one int64 key, so that the order is total: equal gains keep the order of their places.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer_triton.launch import launch
from deepinfer_triton.numeric import as_bits, as_float
from deepinfer_triton.sizes import next_power_of_2
from deepinfer_triton.support import NVIDIA, offer, serves
from deepinfer_triton.targets import Target

PLACE_BITS = tl.constexpr(24)
NO_DRAFT = tl.constexpr(1 << 60)
"""Larger than every key; its negative is smaller."""


@triton.jit
def chance(confidence, inside):
    """float32 in 0..1, NaN as 0."""
    value = tl.load(confidence, mask=inside, other=0.0)
    return tl.where(value > 0, tl.minimum(value, 1.0), 0.0)


@triton.jit
def key_of_gain(gain, place):
    """int64, smaller for a larger gain in 0..1, then for a lower place."""
    return ((0 - as_bits(gain)).to(tl.int64) << PLACE_BITS) | place.to(tl.int64)


@triton.jit(do_not_specialize=["sizes", "base_rows", "requests"])
def plan_verify_lengths_kernel(
    confidence, stride, cost, sizes, base_rows, requests, lengths,
    B: tl.constexpr, NP: tl.constexpr, RP: tl.constexpr,
):  # fmt: skip
    place = tl.arange(0, NP)
    inside = place < requests * B
    gain = tl.full([NP], 1.0, tl.float32)
    for i in tl.static_range(B):  # of the drafts up to its own, in order
        upto = inside & (i <= place % B)
        gain = tl.where(upto, gain * chance(confidence + (place // B) * stride + i, upto), gain)
    ordered = tl.sort(tl.where(inside, key_of_gain(gain, place), NO_DRAFT))
    sorted_gain = as_float((0 - (ordered >> PLACE_BITS)).to(tl.int32))
    expected = requests + tl.cumsum(tl.where(inside, sorted_gain, 0.0), axis=0)
    rows = tl.minimum(base_rows + place + 1, sizes - 1)
    rate = tl.where(inside, tl.div_rn(expected, tl.load(cost + rows, mask=inside, other=1.0)), float("-inf"))
    best = tl.max(rate, axis=0)
    without = tl.div_rn(requests.to(tl.float32), tl.load(cost + tl.minimum(base_rows, sizes - 1)))
    last = tl.min(tl.where(rate == best, place, NP), axis=0)
    limit = tl.sum(tl.where(place == last, ordered, 0), axis=0)
    limit = tl.where(best > without, limit, -NO_DRAFT)
    request = tl.arange(0, RP)
    there = request < requests
    product = tl.full([RP], 1.0, tl.float32)
    length = tl.zeros([RP], tl.int32)
    for i in tl.static_range(B):
        product *= chance(confidence + request * stride + i, there)
        length += (key_of_gain(product, request * B + i) <= limit).to(tl.int32)
    tl.store(lengths + request, length, mask=there)


def plan_verify_lengths(target: Target, confidence, cost, base_rows, lengths) -> None:
    requests, width = confidence.shape
    if requests == 0:
        return
    drafts = next_power_of_2(max(requests * width, 2))
    launch(
        plan_verify_lengths_kernel, (1,), confidence, confidence.stride(0), cost, cost.shape[0], base_rows, requests,
        lengths, B=width, NP=drafts, RP=next_power_of_2(requests), warps=min(16, max(4, drafts // 256)),
    )  # fmt: skip


MAKERS = [offer("plan_verify_lengths", plan_verify_lengths, supports=serves(), targets=NVIDIA)]
