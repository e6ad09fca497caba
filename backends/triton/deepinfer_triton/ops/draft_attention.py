"""draft_attention: one program per request, group of its query heads and part of the output's columns.

All queries of a block share its keys, so they are one list of heads. Keys are the window rows, then the block's own; pieces
are cut and merged as in sparse_attention, but with the heads on the long side of the products, since a block has five times
as many. A program scores keys in parts of their columns, so that no tile is too large for the registers; the programs of
one group's output parts score the same keys, in the same order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from deepinfer_triton.launch import launch
from deepinfer_triton.numeric import narrow, valid_rows
from deepinfer_triton.rows import FORMATS, geometry, load_row_tile, row_offsets, tile_width
from deepinfer_triton.sizes import cdiv, next_power_of_2
from deepinfer_triton.support import DENSE, NVIDIA, offer, serves
from deepinfer_triton.targets import Target


@triton.jit
def load_part(
    cache, codes_at, scales_at, there, start, KEYS: tl.constexpr, D: tl.constexpr, PART: tl.constexpr, FORMAT: tl.constexpr
):
    """float32 [KEYS, PART]: columns from `start` on, a multiple of PART, of the rows at the offsets; zeros past D."""
    if FORMAT == "f32":
        return load_row_tile(cache, codes_at + 4 * start, scales_at, there, KEYS, D, PART, FORMAT)
    elif FORMAT == "bf16":
        return load_row_tile(cache, codes_at + 2 * start, scales_at, there, KEYS, D, PART, FORMAT)
    elif FORMAT == "fp8_32":
        return load_row_tile(cache, codes_at + start, scales_at + start // 32, there, KEYS, D, PART, FORMAT)
    else:
        SHARED: tl.constexpr = 16 if FORMAT == "fp4_16" else 32
        return load_row_tile(cache, codes_at + start // 2, scales_at + start // SHARED, there, KEYS, D, PART, FORMAT)


@triton.jit
def attend_part(
    q, query_at, inside, cache, codes_at, scales_at, there, scale, first_column, peak, total, acc,
    KEYS: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, PART: tl.constexpr, OUT: tl.constexpr, FORMAT: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """One piece of keys joins a running softmax: peak, total [HP], acc [HP, OUT] of the columns from first_column on."""
    score = tl.zeros([acc.shape[0], KEYS], tl.float32)
    for start in tl.static_range(0, TILE, PART):
        column = start + tl.arange(0, PART)
        query = tl.load(q + query_at[:, None] + column[None, :], mask=inside[:, None] & (column < D)[None, :], other=0.0)
        keys = load_part(cache, codes_at, scales_at, there, start, KEYS, D, PART, FORMAT)
        if WIDE:
            score = tl.dot(query.to(tl.float32), tl.trans(keys), score, input_precision="ieee")
        else:
            score = tl.dot(query, tl.trans(keys.to(tl.bfloat16)), score)
    score = tl.where(there[None, :], score * scale, float("-inf"))
    highest = tl.maximum(peak, tl.max(score, axis=1))
    kept = tl.exp(peak - highest)
    weight = tl.exp(score - highest[:, None])
    acc = acc * kept[:, None]
    values = load_part(cache, codes_at, scales_at, there, first_column, KEYS, D, OUT, FORMAT)
    if WIDE:
        acc = tl.dot(weight, values, acc, input_precision="ieee")
    else:
        coarse = weight.to(tl.bfloat16)
        acc = tl.dot(coarse, values.to(tl.bfloat16), acc)
        acc = tl.dot((weight - coarse.to(tl.float32)).to(tl.bfloat16), values.to(tl.bfloat16), acc)
    return highest, total * kept + tl.sum(weight, axis=1), acc


@triton.jit(do_not_specialize=["requests"])
def draft_attention_kernel(
    q, window, window_stride, window_base, window_origin, window_modulo, anchors, drafts, drafts_stride, sink, scale,
    count, requests, out,
    BLOCK_ROWS: tl.constexpr, CODE_PITCH: tl.constexpr, SCALE_BASE: tl.constexpr, SCALE_PITCH: tl.constexpr,
    FORMAT: tl.constexpr, WINDOW_TOKENS: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr, HP: tl.constexpr,
    D: tl.constexpr, TILE: tl.constexpr, PART: tl.constexpr, OUT: tl.constexpr, KEYS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    anchor = -1
    if request < valid_rows(count, requests):
        anchor = tl.load(anchors + request)
    if anchor >= 0:
        head = tl.program_id(1) * HP + tl.arange(0, HP)
        inside = head < BLOCK * HEADS
        query_at = (request * (BLOCK * HEADS) + head) * D
        first_column = tl.program_id(2) * OUT
        origin = tl.load(window_origin + request)
        base, modulo = tl.load(window_base + request), tl.load(window_modulo + request)
        first = tl.maximum(tl.maximum(anchor - WINDOW_TOKENS + 1, 0), origin)
        window_count = tl.maximum(anchor - first + 1, 0)
        peak = tl.full([HP], float("-inf"), tl.float32)
        total = tl.zeros([HP], tl.float32)
        acc = tl.zeros([HP, OUT], tl.float32)
        for start in range(0, window_count, KEYS):
            key = start + tl.arange(0, KEYS)
            slot = base + (first - origin + key) % modulo
            codes_at, scales_at = row_offsets(slot, window_stride, BLOCK_ROWS, CODE_PITCH, SCALE_BASE, SCALE_PITCH)
            peak, total, acc = attend_part(
                q, query_at, inside, window, codes_at, scales_at, key < window_count, scale, first_column, peak, total, acc,
                KEYS, D, TILE, PART, OUT, FORMAT, WIDE,
            )  # fmt: skip
        for start in range(0, BLOCK, KEYS):
            key = start + tl.arange(0, KEYS)
            slot = request * BLOCK + key
            codes_at, scales_at = row_offsets(slot, drafts_stride, BLOCK_ROWS, CODE_PITCH, SCALE_BASE, SCALE_PITCH)
            peak, total, acc = attend_part(
                q, query_at, inside, drafts, codes_at, scales_at, key < BLOCK, scale, first_column, peak, total, acc,
                KEYS, D, TILE, PART, OUT, FORMAT, WIDE,
            )  # fmt: skip
        bias = tl.load(sink + head % HEADS, mask=inside, other=0.0)
        highest = tl.maximum(peak, bias)
        kept = tl.exp(peak - highest)
        result = acc * (kept / (total * kept + tl.exp(bias - highest)))[:, None]
        column = first_column + tl.arange(0, OUT)
        at = out + query_at[:, None] + column[None, :]
        tl.store(at, narrow(result, out.dtype.element_ty), mask=inside[:, None] & (column < D)[None, :])


def draft_attention(
    target: Target, q, window, window_base, window_origin, window_modulo, window_format, anchor, draft_kv, draft_block,
    sink, scale, window_tokens, count, out,
) -> None:  # fmt: skip
    requests, (heads, width) = anchor.shape[0], q.shape[1:]
    wide = "f32" in (target.dot, window_format) or q.dtype == torch.float32
    queries, tile = draft_block * heads, tile_width(width)
    group = min(target.draft_heads, max(16, next_power_of_2(queries)))
    part, columns = min(128, tile), min(target.draft_columns, tile)
    launch(
        draft_attention_kernel, (requests, cdiv(queries, group), cdiv(width, columns)), q, window,
        window.stride(0), window_base, window_origin, window_modulo, anchor, draft_kv, draft_kv.stride(0), sink, scale, count,
        requests, out, **geometry(window_format, width, 0).constants(), FORMAT=window_format, WINDOW_TOKENS=window_tokens,
        BLOCK=draft_block, HEADS=heads, HP=group, D=width, TILE=tile, PART=part, OUT=columns, KEYS=target.draft_keys,
        WIDE=wide, warps=target.draft_warps, stages=1,
    )  # fmt: skip


MAKERS = [
    offer("draft_attention", draft_attention, supports=serves(q=DENSE, window_format=FORMATS), targets=NVIDIA)
]
