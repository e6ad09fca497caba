"""sparse_attention: one program per row and group of heads walks that row's own key list, left to right.

Products are made transposed, K q^T and K^T p^T, so that the keys fill the matrix unit's long side for any number of
heads. Keys are the window rows, then the selected rows; a step gathers `target.keys` of one kind, wherever they lie,
decodes them to values that BF16 holds exactly, and uses them as key and value. Probabilities are split into two BF16
numbers, so their product with the values keeps FP32's precision. The list is never split between programs: how long
other rows' lists are cannot change a row's bits. Window and selected rows are cut into pieces apart, finer than the
card's 64 keys: the same sums within its tolerance, not the same bits as a kernel with pieces of 64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from deepinfer_triton.launch import launch
from deepinfer_triton.numeric import narrow, valid_rows
from deepinfer_triton.rows import FORMATS, geometry, load_row_tile, row_offsets, tile_width
from deepinfer_triton.sizes import cdiv, next_power_of_2
from deepinfer_triton.support import DENSE, offer, serves
from deepinfer_triton.targets import Target


@triton.jit
def selected_count(rows, t, stride, K: tl.constexpr, KP: tl.constexpr):
    """How many selected rows come before the first -1."""
    if rows is None:
        return 0
    else:
        place = tl.arange(0, KP)
        row = tl.load(rows + t * stride + place, mask=place < K, other=-1)
        return tl.min(tl.where(row < 0, place, KP), axis=0)


@triton.jit
def attend(query, values, there, scale, peak, total, acc, WIDE: tl.constexpr):
    """One piece of keys joins a running softmax: peak, total [HP], acc [TILE, HP]; values [KEYS, TILE], query [HP,
    TILE].
    """
    if WIDE:
        score = tl.dot(values, tl.trans(query.to(tl.float32)), input_precision="ieee") * scale
    else:
        kv = values.to(tl.bfloat16)
        score = tl.dot(kv, tl.trans(query)) * scale
    score = tl.where(there[:, None], score, float("-inf"))
    highest = tl.maximum(peak, tl.max(score, axis=0))
    kept = tl.exp(peak - highest)
    weight = tl.exp(score - highest[None, :])
    acc = acc * kept[None, :]
    if WIDE:
        acc = tl.dot(tl.trans(values), weight, acc, input_precision="ieee")
    else:
        coarse = weight.to(tl.bfloat16)
        acc = tl.dot(tl.trans(kv), coarse, acc)
        acc = tl.dot(tl.trans(kv), (weight - coarse.to(tl.float32)).to(tl.bfloat16), acc)
    return highest, total * kept + tl.sum(weight, axis=0), acc


@triton.jit(do_not_specialize=["count_rows", "table_stride"])
def sparse_attention_kernel(
    q, q_token, q_head, window, window_stride, window_base, window_origin, window_modulo, compressed, block_bytes,
    block_table, table_stride, rows, rows_stride, row_to_req, positions, sink, scale, count, count_rows, out,
    W_BLOCK_ROWS: tl.constexpr, W_CODE_PITCH: tl.constexpr, W_SCALE_BASE: tl.constexpr, W_SCALE_PITCH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, CODE_PITCH: tl.constexpr, SCALE_BASE: tl.constexpr, SCALE_PITCH: tl.constexpr,
    WINDOW_FORMAT: tl.constexpr, FORMAT: tl.constexpr, WINDOW_TOKENS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    HEADS: tl.constexpr, HP: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, KEYS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    request, position = -1, -1
    if t < valid_rows(count, count_rows):
        request, position = tl.load(row_to_req + t), tl.load(positions + t)
    if (request >= 0) & (position >= 0):
        head = tl.program_id(1) * HP + tl.arange(0, HP)
        column = tl.arange(0, TILE)
        inside = (head < HEADS)[:, None] & (column < D)[None, :]
        query = tl.load(q + t * q_token + head[:, None] * q_head + column[None, :], mask=inside, other=0.0)
        origin = tl.load(window_origin + request)
        base, modulo = tl.load(window_base + request), tl.load(window_modulo + request)
        first = tl.maximum(tl.maximum(position - WINDOW_TOKENS + 1, 0), origin)
        window_count = tl.maximum(position - first + 1, 0)
        selected = selected_count(rows, t, rows_stride, K, KP)
        peak = tl.full([HP], float("-inf"), tl.float32)
        total = tl.zeros([HP], tl.float32)
        acc = tl.zeros([TILE, HP], tl.float32)
        for start in range(0, window_count, KEYS):
            key = start + tl.arange(0, KEYS)
            slot = base + (first - origin + key) % modulo
            codes_at, scales_at = row_offsets(
                slot, window_stride, W_BLOCK_ROWS, W_CODE_PITCH, W_SCALE_BASE, W_SCALE_PITCH
            )
            there = key < window_count
            values = load_row_tile(window, codes_at, scales_at, there, KEYS, D, TILE, WINDOW_FORMAT)
            peak, total, acc = attend(query, values, there, scale, peak, total, acc, WIDE)
        if rows is not None:
            for start in range(0, selected, KEYS):
                key = start + tl.arange(0, KEYS)
                there = key < selected
                row = tl.load(rows + t * rows_stride + key, mask=there, other=0)
                at = block_table + request.to(tl.int64) * table_stride + row // BLOCK_ROWS
                slot = tl.load(at, mask=there, other=0).to(tl.int64) * BLOCK_ROWS + row % BLOCK_ROWS
                codes_at, scales_at = row_offsets(slot, block_bytes, BLOCK_ROWS, CODE_PITCH, SCALE_BASE, SCALE_PITCH)
                values = load_row_tile(compressed, codes_at, scales_at, there, KEYS, D, TILE, FORMAT)
                peak, total, acc = attend(query, values, there, scale, peak, total, acc, WIDE)
        bias = tl.load(sink + head, mask=head < HEADS, other=0.0)
        highest = tl.maximum(peak, bias)
        kept = tl.where(window_count + selected > 0, tl.exp(peak - highest), 0.0)
        total = total * kept + tl.exp(bias - highest)
        result = acc * (kept / total)[None, :]
        at = out + (t * HEADS + head[None, :]) * D + column[:, None]
        tl.store(at, narrow(result, out.dtype.element_ty), mask=(head < HEADS)[None, :] & (column < D)[:, None])


def sparse_attention(
    target: Target, q, window, window_base, window_origin, window_modulo, window_format, compressed, block_table,
    compressed_format, block_rows, rows, row_to_req, positions, sink, scale, window_tokens, count, out,
) -> None:  # fmt: skip
    tokens, heads, width = q.shape
    chosen = 0 if rows is None else rows.shape[1]
    if chosen == 0:
        rows, block_rows, compressed_format = None, 1, window_format
    wide = "f32" in (target.dot, window_format, compressed_format) or q.dtype == torch.float32
    group = min(target.head_group, max(16, next_power_of_2(heads)))
    launch(
        sparse_attention_kernel, (tokens, cdiv(heads, group)), q, q.stride(0), q.stride(1), window,
        window.stride(0), window_base, window_origin, window_modulo, compressed,
        0 if rows is None else compressed.stride(0), block_table, 0 if rows is None else block_table.stride(0), rows,
        chosen, row_to_req, positions, sink, scale,
        count, tokens, out,
        **geometry(window_format, width, 0).constants("W_"),
        **geometry(compressed_format, width, block_rows).constants(),
        WINDOW_FORMAT=window_format, FORMAT=compressed_format, WINDOW_TOKENS=window_tokens,
        K=chosen, KP=next_power_of_2(max(chosen, 1)), HEADS=heads, HP=group, D=width, TILE=tile_width(width),
        KEYS=target.keys, WIDE=wide, warps=target.attention_warps, stages=1,
    )  # fmt: skip


MAKERS = [
    offer(
        "sparse_attention", sparse_attention,
        supports=serves(q=DENSE, window_format=FORMATS, compressed_format=FORMATS),
    )
]  # fmt: skip
