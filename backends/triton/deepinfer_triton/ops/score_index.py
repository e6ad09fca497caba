"""score_index: one program per token and column tile decodes keys once and scores them for all heads.

Products of two MXFP4 values and their scales are exact in BF16 operands; heads are added in FP32 in the tile's own
order, which no other row or column can change.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from deepinfer_triton.launch import launch
from deepinfer_triton.numeric import decode_e2m1, decode_ue8m0, scale_groups, unpack, valid_rows
from deepinfer_triton.rows import FORMATS, geometry, load_row_tile, row_offsets, tile_width
from deepinfer_triton.sizes import cdiv, next_power_of_2
from deepinfer_triton.support import ACTIVATIONS, offer, serves
from deepinfer_triton.targets import Target


@triton.jit
def load_query(q, q_scale, t, HEADS: tl.constexpr, HP: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr):
    """float32 [HP, TILE]: the heads of a token's query, zeros past them."""
    head = tl.arange(0, HP)[:, None]
    if q_scale is None:
        column = tl.arange(0, TILE)[None, :]
        at = q + (t * HEADS + head) * D + column
        return tl.load(at, mask=(head < HEADS) & (column < D), other=0.0).to(tl.float32)
    else:
        byte = tl.arange(0, TILE // 2)[None, :]
        at = q + (t * HEADS + head) * (D // 2) + byte
        packed = tl.load(at, mask=(head < HEADS) & (byte < D // 2), other=0)
        group = tl.arange(0, TILE // 32)[None, :]
        at = q_scale + (t * HEADS + head) * (D // 32) + group
        scale = tl.load(at, mask=(head < HEADS) & (group < D // 32), other=127)
        values = decode_e2m1(unpack(packed, HP, TILE))
        return scale_groups(values, decode_ue8m0(scale), HP, TILE, 32)


@triton.jit(do_not_specialize=["rows", "width", "candidate_stride", "table_stride"])
def score_index_kernel(
    q, q_scale, weights, weights_stride, cache, block_bytes, block_table, table_stride, row_to_req, visible, candidates,
    candidate_stride, count, rows, scores, width,
    BLOCK_ROWS: tl.constexpr, CODE_PITCH: tl.constexpr, SCALE_BASE: tl.constexpr, SCALE_PITCH: tl.constexpr,
    HEADS: tl.constexpr, HP: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, FORMAT: tl.constexpr,
    CANDIDATE_BLOCK: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    if t < valid_rows(count, rows):
        request = tl.load(row_to_req + t)
        if request >= 0:
            column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
            key = column
            if candidates is not None:
                at = candidates + t * candidate_stride + column // CANDIDATE_BLOCK
                chosen = tl.load(at, mask=column < width, other=-1)
                key = tl.where(chosen >= 0, chosen * CANDIDATE_BLOCK + column % CANDIDATE_BLOCK, 0x7FFFFFFF)
            there = (key < tl.load(visible + t)) & (column < width)
            at = block_table + request.to(tl.int64) * table_stride + key // BLOCK_ROWS
            block = tl.load(at, mask=there, other=0)
            slot = block.to(tl.int64) * BLOCK_ROWS + key % BLOCK_ROWS
            codes_at, scales_at = row_offsets(slot, block_bytes, BLOCK_ROWS, CODE_PITCH, SCALE_BASE, SCALE_PITCH)
            keys = load_row_tile(cache, codes_at, scales_at, there, COLUMNS, D, TILE, FORMAT)
            query = load_query(q, q_scale, t, HEADS, HP, D, TILE)
            if WIDE:
                products = tl.dot(keys, tl.trans(query), input_precision="ieee")
            else:
                products = tl.dot(keys.to(tl.bfloat16), tl.trans(query.to(tl.bfloat16)))
            head = tl.arange(0, HP)
            weight = tl.load(weights + t * weights_stride + head, mask=head < HEADS, other=0.0).to(tl.float32)
            # a comparison that NaN fails, so that NaN stays NaN
            total = tl.sum(tl.where(products < 0, 0.0, products) * weight[None, :], axis=1)
            tl.store(scores + t * width + column, tl.where(there, total, float("-inf")), mask=column < width)


def score_index(
    target: Target, q, q_scale, weights, cache, block_table, row_to_req, visible, candidates, candidate_block, format,
    block_rows, count, scores,
) -> None:  # fmt: skip
    rows, heads, stored_width = q.shape
    depth = stored_width if q_scale is None else 2 * stored_width
    wide = target.dot == "f32" or format == "f32" or q.dtype == torch.float32
    width = scores.shape[1]
    launch(
        score_index_kernel, (rows, cdiv(width, target.index_columns)), q, q_scale, weights, weights.stride(0),
        cache, cache.stride(0), block_table, block_table.stride(0), row_to_req, visible, candidates,
        0 if candidates is None else candidates.stride(0), count, rows, scores, width,
        **geometry(format, depth, block_rows).constants(), HEADS=heads, HP=max(16, next_power_of_2(heads)),
        D=depth, TILE=tile_width(depth), FORMAT=format, CANDIDATE_BLOCK=candidate_block, COLUMNS=target.index_columns,
        WIDE=wide,
    )  # fmt: skip


MAKERS = [offer("score_index", score_index, supports=serves(q=(*ACTIVATIONS, "mxfp4_32"), format=FORMATS))]
