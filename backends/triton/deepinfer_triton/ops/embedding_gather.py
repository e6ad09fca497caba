"""embedding_gather: one program per token and column tile copies a decoded table row to every stream."""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer_triton.launch import launch
from deepinfer_triton.numeric import narrow, valid_rows
from deepinfer_triton.sizes import cdiv, next_power_of_2
from deepinfer_triton.support import DENSE, offer, serves
from deepinfer_triton.targets import Target
from deepinfer_triton.weights import load_weight_tile, stored, weight_arguments


@triton.jit(do_not_specialize=["rows"])
def embedding_gather_kernel(
    ids, values, scales, count, rows, out, M: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr, MATRIX: tl.constexpr, SCALES: tl.constexpr, FORMAT: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0)
    if t < valid_rows(count, rows):
        token = tl.load(ids + t)
        row = tl.where(token >= 0, token, N) + tl.zeros([1], tl.int32)  # a row past the table reads as zeros
        start = tl.program_id(1) * TILE
        value = load_weight_tile(values, scales, row, start, N, K, 1, TILE, FORMAT)
        column = start + tl.arange(0, TILE)[None, :]
        for j in tl.static_range(M):
            at = out + (t.to(tl.int64) * M + j) * K + column
            tl.store(at, narrow(value, out.dtype.element_ty), mask=column < K)


def embedding_gather(target: Target, ids, table, count, out) -> None:
    kept = stored(table)
    rows, streams, hidden = out.shape
    tile = min(target.columns, max(32, next_power_of_2(hidden)))
    launch(
        embedding_gather_kernel, (rows, cdiv(hidden, tile)), ids, kept.values, kept.scales, count, rows, out,
        M=streams, **weight_arguments(kept), TILE=tile,
    )  # fmt: skip


MAKERS = [offer("embedding_gather", embedding_gather, supports=serves(out=DENSE))]
