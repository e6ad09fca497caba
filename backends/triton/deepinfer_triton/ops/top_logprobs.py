"""top_logprobs: one program per row: its sum of exponentials and the chosen token's rank, then the best tokens one by one.

Every lane keeps the four first of its columns in the card's order, and the best of all lanes' firsts is taken again and
again. When a lane that had more than four has given its last, what comes after the last token taken is collected anew.
How many are asked for is no constant: requests differ in it, and none may wait for a compiler.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer_triton.launch import launch
from deepinfer_triton.numeric import MAGNITUDE, NAN_BITS, as_bits, as_float
from deepinfer_triton.support import NVIDIA, offer, serves
from deepinfer_triton.targets import Target
from deepinfer_triton.vocabulary import FIRST_STAGES, LANES, STAGES, WARPS, insert, is_broken, load_logits, softmax_stats

NONE = tl.constexpr(-0x80000000)
"""Below the key of every logit."""


@triton.jit
def keys_of(x):
    """int32 that order as float32 logits do, both zeros as one."""
    bits = as_bits(x + 0.0)
    return tl.where(bits < 0, bits ^ MAGNITUDE, bits)


@triton.jit
def rank_of(row, chosen, own, V, LANES: tl.constexpr):
    """(how many logits come before the chosen column's, whether the row has a NaN or +inf)."""
    lane = tl.arange(0, LANES)
    before = tl.zeros([LANES], tl.int32)
    broken = tl.zeros([LANES], tl.int32)
    for start in tl.range(0, V, LANES, num_stages=FIRST_STAGES):
        x = load_logits(row, start + lane, V)
        broken |= is_broken(x)
        before += ((x > own) | ((x == own) & (start + lane < chosen))).to(tl.int32)
    return tl.sum(before, axis=0), tl.max(broken, axis=0)


@triton.jit
def first_after(row, last_key, last_column, V, LANES: tl.constexpr):
    """Each lane's four first columns after (last_key, last_column): their keys and tile starts, in order."""
    lane = tl.arange(0, LANES)
    k0 = tl.full([LANES], NONE, tl.int32)
    k1, k2, k3 = k0, k0, k0
    p0 = tl.zeros([LANES], tl.int32)
    p1, p2, p3 = p0, p0, p0
    for start in tl.range(0, V, LANES, num_stages=STAGES):
        column = start + lane
        key = keys_of(load_logits(row, column, V))
        after = (key < last_key) | ((key == last_key) & (column > last_column))
        key = tl.where(after & (column < V), key, NONE)
        place = tl.zeros([LANES], tl.int32) + start
        k0, k1, k2, k3, p0, p1, p2, p3 = insert(key, place, k0, k1, k2, k3, p0, p1, p2, p3)
    return k0, k1, k2, k3, p0, p1, p2, p3


@triton.jit
def store_best(row, peak, log_total, ids, values, best, V, LANES: tl.constexpr):
    """The `best` first columns of a usable row in order, and their log-probabilities."""
    lane = tl.arange(0, LANES)
    last_key, last_column, taken = tl.full([], 0x7FFFFFFF, tl.int32), -1, 0
    while taken < best:
        k0, k1, k2, k3, p0, p1, p2, p3 = first_after(row, last_key, last_column, V, LANES)
        full = k3 > NONE
        complete = 1
        while (complete > 0) & (taken < best):
            last_key = tl.max(k0, axis=0)
            last_column = tl.min(tl.where(k0 == last_key, p0 + lane, 0x7FFFFFFF), axis=0)
            bits = tl.where(last_key < 0, last_key ^ MAGNITUDE, last_key)
            tl.store(ids + taken, last_column)
            tl.store(values + taken, as_float(bits) - peak - log_total)
            taken += 1
            gone = p0 + lane == last_column
            k0, p0 = tl.where(gone, k1, k0), tl.where(gone, p1, p0)
            k1, p1 = tl.where(gone, k2, k1), tl.where(gone, p2, p1)
            k2, p2 = tl.where(gone, k3, k2), tl.where(gone, p3, p2)
            k3 = tl.where(gone, NONE, k3)
            complete = 1 - tl.max((full & (k0 == NONE)).to(tl.int32), axis=0)


@triton.jit(do_not_specialize=["best"])
def top_logprobs_kernel(
    logits, logits_stride, chosen, chosen_logprob, chosen_rank, ids, values, best, V, LANES: tl.constexpr
):
    s = tl.program_id(0).to(tl.int64)
    row = logits + s * logits_stride
    token = tl.load(chosen + s)
    own = tl.load(row + tl.maximum(token, 0))
    before, broken = rank_of(row, token, own, V, LANES)
    peak, total = softmax_stats(row, V, LANES)
    log_total = tl.log(total)
    usable = (broken == 0) & (peak > float("-inf"))
    nan = as_float(tl.full([], NAN_BITS, tl.int32))
    tl.store(chosen_logprob + s, tl.where(usable & (token >= 0), own - peak - log_total, nan))
    tl.store(chosen_rank + s, tl.where(token >= 0, tl.where(usable, before + 1, 1), 0))
    if usable:
        store_best(row, peak, log_total, ids + s * best, values + s * best, best, V, LANES)
    else:  # no logarithm of such a row is a number
        for place in range(0, best):
            tl.store(ids + s * best + place, place)
            tl.store(values + s * best + place, float("-inf"))


def top_logprobs(target: Target, logits, chosen, chosen_logprob, chosen_rank, ids, values) -> None:
    rows, vocab = logits.shape
    launch(
        top_logprobs_kernel, (rows,), logits, logits.stride(0), chosen, chosen_logprob, chosen_rank, ids, values, ids.shape[1],
        vocab, LANES=LANES, warps=WARPS,
    )  # fmt: skip


MAKERS = [offer("top_logprobs", top_logprobs, supports=serves(), targets=NVIDIA)]
