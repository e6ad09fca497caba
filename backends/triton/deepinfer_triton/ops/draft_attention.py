"""draft_attention: one program per request and group of its query heads walks the window, then the block's own rows.

All queries of a block share its keys, so they are one list of heads; a program takes `target.head_group` of them. The pieces
and their merge are those of sparse_attention.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from deepinfer_triton.launch import launch
from deepinfer_triton.numeric import narrow, valid_rows
from deepinfer_triton.ops.sparse_attention import attend
from deepinfer_triton.rows import FORMATS, geometry, load_row_tile, row_offsets, tile_width
from deepinfer_triton.support import DENSE, NVIDIA, offer, serves
from deepinfer_triton.targets import Target


@triton.jit(do_not_specialize=["requests"])
def draft_attention_kernel(
    q, window, window_stride, window_base, window_origin, window_modulo, anchors, drafts, drafts_stride, sink, scale,
    count, requests, out,
    BLOCK_ROWS: tl.constexpr, CODE_PITCH: tl.constexpr, SCALE_BASE: tl.constexpr, SCALE_PITCH: tl.constexpr,
    FORMAT: tl.constexpr, WINDOW_TOKENS: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr, HP: tl.constexpr,
    D: tl.constexpr, TILE: tl.constexpr, KEYS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    anchor = -1
    if request < valid_rows(count, requests):
        anchor = tl.load(anchors + request)
    if anchor >= 0:
        head = tl.program_id(1) * HP + tl.arange(0, HP)
        column = tl.arange(0, TILE)
        inside = head < BLOCK * HEADS
        at = (request * (BLOCK * HEADS) + head)[:, None] * D + column[None, :]
        query = tl.load(q + at, mask=inside[:, None] & (column < D)[None, :], other=0.0)
        origin = tl.load(window_origin + request)
        base, modulo = tl.load(window_base + request), tl.load(window_modulo + request)
        first = tl.maximum(tl.maximum(anchor - WINDOW_TOKENS + 1, 0), origin)
        window_count = tl.maximum(anchor - first + 1, 0)
        peak = tl.full([HP], float("-inf"), tl.float32)
        total = tl.zeros([HP], tl.float32)
        acc = tl.zeros([TILE, HP], tl.float32)
        for start in range(0, window_count, KEYS):
            key = start + tl.arange(0, KEYS)
            slot = base + (first - origin + key) % modulo
            codes_at, scales_at = row_offsets(slot, window_stride, BLOCK_ROWS, CODE_PITCH, SCALE_BASE, SCALE_PITCH)
            there = key < window_count
            values = load_row_tile(window, codes_at, scales_at, there, KEYS, D, TILE, FORMAT)
            peak, total, acc = attend(query, values, there, scale, peak, total, acc, WIDE)
        for start in range(0, BLOCK, KEYS):
            key = start + tl.arange(0, KEYS)
            slot = request * BLOCK + key
            codes_at, scales_at = row_offsets(slot, drafts_stride, BLOCK_ROWS, CODE_PITCH, SCALE_BASE, SCALE_PITCH)
            there = key < BLOCK
            values = load_row_tile(drafts, codes_at, scales_at, there, KEYS, D, TILE, FORMAT)
            peak, total, acc = attend(query, values, there, scale, peak, total, acc, WIDE)
        bias = tl.load(sink + head % HEADS, mask=inside, other=0.0)
        highest = tl.maximum(peak, bias)
        kept = tl.exp(peak - highest)
        result = acc * (kept / (total * kept + tl.exp(bias - highest)))[None, :]
        at = out + (request * (BLOCK * HEADS) + head)[None, :] * D + column[:, None]
        tl.store(at, narrow(result, out.dtype.element_ty), mask=inside[None, :] & (column < D)[:, None])


def draft_attention(
    target: Target, q, window, window_base, window_origin, window_modulo, window_format, anchor, draft_kv, draft_block,
    sink, scale, window_tokens, count, out,
) -> None:  # fmt: skip
    requests, (heads, width) = anchor.shape[0], q.shape[1:]
    wide = "f32" in (target.dot, window_format) or q.dtype == torch.float32
    queries = draft_block * heads
    group = min(target.head_group, max(16, triton.next_power_of_2(queries)))
    launch(
        draft_attention_kernel, (requests, triton.cdiv(queries, group)), q, window, window.stride(0), window_base,
        window_origin, window_modulo, anchor, draft_kv, draft_kv.stride(0), sink, scale, count, requests, out,
        **geometry(window_format, width, 0).constants(), FORMAT=window_format, WINDOW_TOKENS=window_tokens,
        BLOCK=draft_block, HEADS=heads, HP=group, D=width, TILE=tile_width(width), KEYS=target.keys, WIDE=wide,
        warps=target.attention_warps, stages=1,
    )  # fmt: skip


MAKERS = [
    offer("draft_attention", draft_attention, supports=serves(q=DENSE, window_format=FORMATS), targets=NVIDIA)
]
