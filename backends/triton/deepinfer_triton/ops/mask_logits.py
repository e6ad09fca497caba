"""mask_logits: one program per row and 8192 ids counts the history's ids, penalises and bans; then biases, one lane each.

Counts are a product: for a piece of the history, [id / 64 is i] x [id % 64 is j] adds one to place (i, j) of the program's
ids. Both factors are zeros and ones, so the FP32 sums are exact and need neither memory nor an order. Rows without penalties
skip it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer_triton.launch import launch
from deepinfer_triton.sizes import cdiv
from deepinfer_triton.support import NVIDIA, offer, serves
from deepinfer_triton.targets import Target

HIGH, LOW = 128, 64
"""A program's ids as a table: id = base + i * LOW + j."""

PIECE = 64
"""Tokens of the history that one product counts."""

ENTRIES = 64
"""Biases of a program."""


@triton.jit
def count_ids(
    counts, ids, first, last, base, HIGH: tl.constexpr, LOW: tl.constexpr, PIECE: tl.constexpr, WIDE: tl.constexpr
):
    """float32 [HIGH, LOW] counts plus how often each of the program's ids is among ids[first:last]."""
    for start in range(first, last, PIECE):
        at = start + tl.arange(0, PIECE)
        token = tl.load(ids + at, mask=at < last, other=-1) - base
        token = tl.where((at < last) & (token >= 0), token, -1)
        upper = (token >> 6)[None, :] == tl.arange(0, HIGH)[:, None]
        lower = (token & 63)[:, None] == tl.arange(0, LOW)[None, :]
        if WIDE:
            counts = tl.dot(upper.to(tl.float32), lower.to(tl.float32), counts, input_precision="ieee")
        else:
            counts = tl.dot(upper.to(tl.bfloat16), lower.to(tl.bfloat16), counts)
    return counts


@triton.jit
def is_allowed(allowed, words, s, token, inside):
    """Whether the row's mask has the token's bit; without a mask it has all."""
    if allowed is None:
        return inside
    else:
        word = tl.load(allowed + s * words + token // 32, mask=inside, other=0)
        return inside & (((word >> (token % 32)) & 1) > 0)


@triton.jit
def mask_kernel(
    history, history_stride, slots, prompt_len, length, repetition, presence, frequency, allowed, words, logits,
    logits_stride,
    V, HIGH: tl.constexpr, LOW: tl.constexpr, PIECE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(0).to(tl.int64)
    base = tl.program_id(1) * (HIGH * LOW)
    token = base + tl.arange(0, HIGH)[:, None] * LOW + tl.arange(0, LOW)[None, :]
    inside = token < V
    open_ids = is_allowed(allowed, words, s, token, inside)
    at = logits + s * logits_stride + token
    factor, once, each = tl.load(repetition + s), tl.load(presence + s), tl.load(frequency + s)
    slot = tl.load(slots + s)
    if (slot >= 0) & ((factor != 1) | (once != 0) | (each != 0)):
        ids, end = history + slot.to(tl.int64) * history_stride, tl.load(length + s)
        prompt = tl.minimum(tl.maximum(tl.load(prompt_len + s), 0), end)
        output = count_ids(tl.zeros([HIGH, LOW], tl.float32), ids, prompt, end, base, HIGH, LOW, PIECE, WIDE)
        seen = count_ids(output, ids, 0, prompt, base, HIGH, LOW, PIECE, WIDE) > 0
        x = tl.load(at, mask=open_ids & seen, other=0.0)
        x = tl.where(x > 0, tl.div_rn(x, tl.zeros([HIGH, LOW], tl.float32) + factor), x * factor)
        x = x - each * output
        x = x - tl.where(output > 0, once, 0.0)
        tl.store(at, x, mask=open_ids & seen)
    if allowed is not None:
        tl.store(at, tl.full([HIGH, LOW], float("-inf"), tl.float32), mask=inside & (open_ids == 0))


@triton.jit(do_not_specialize=["rows", "entries", "steps"])
def bias_kernel(
    offsets, ids, values, allowed, words, logits, logits_stride, rows, entries, steps,
    V, ENTRIES: tl.constexpr,
):  # fmt: skip
    """The first entry of an id in its row adds the values of all that name it, in their order."""
    entry = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    inside = entry < tl.minimum(tl.load(offsets + rows), entries)
    low = tl.zeros([ENTRIES], tl.int32)
    high = low + rows
    for _ in range(steps):  # the last row that starts at or before the entry
        middle = (low + high) // 2
        begins = tl.load(offsets + middle, mask=inside, other=0) <= entry
        low, high = tl.where(begins, middle, low), tl.where(begins, high, middle)
    first = tl.load(offsets + low, mask=inside, other=0)
    last = tl.load(offsets + low + 1, mask=inside, other=0)
    token = tl.load(ids + entry, mask=inside, other=-1)
    inside = inside & (token >= 0) & (token < V)
    s = low.to(tl.int64)
    inside = is_allowed(allowed, words, s, tl.maximum(token, 0), inside)
    at = logits + s * logits_stride + token
    x = tl.load(at, mask=inside, other=0.0)
    begin = tl.min(tl.where(inside, first, 0x7FFFFFFF), axis=0)
    end = tl.max(tl.where(inside, last, 0), axis=0)
    for other in range(begin, end):
        same = (tl.load(ids + other) == token) & (other >= first) & (other < last)
        x = tl.where(same, x + tl.load(values + other), x)
        inside = inside & ((same == 0) | (other >= entry))
    tl.store(at, x, mask=inside)


def mask_logits(
    target: Target, history, slots, prompt_len, length, repetition, presence, frequency, bias_offsets, bias_ids,
    bias_values, allowed, logits,
) -> None:  # fmt: skip
    rows, vocab = logits.shape
    words = 0 if allowed is None else allowed.shape[1]
    launch(
        mask_kernel, (rows, cdiv(vocab, HIGH * LOW)), history, history.stride(0), slots, prompt_len, length,
        repetition, presence, frequency, allowed, words, logits, logits.stride(0), vocab,
        HIGH=HIGH, LOW=LOW, PIECE=PIECE, WIDE=target.dot == "f32", warps=8,
    )  # fmt: skip
    if rows:
        launch(
            bias_kernel, (cdiv(bias_ids.shape[0], ENTRIES),), bias_offsets, bias_ids, bias_values, allowed, words,
            logits, logits.stride(0), rows, bias_ids.shape[0], rows.bit_length(), vocab, ENTRIES=ENTRIES, warps=2,
        )  # fmt: skip


MAKERS = [offer("mask_logits", mask_logits, supports=serves(), targets=NVIDIA)]
