"""markov_logits: the previous tokens' embeddings are gathered first; then every tile of the logits is one product."""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer_triton.gemm import dot_of, product_tile
from deepinfer_triton.launch import launch
from deepinfer_triton.ops.embedding_gather import embedding_gather_kernel
from deepinfer_triton.ops.linear import DTYPE_NAMES
from deepinfer_triton.sizes import cdiv, next_power_of_2
from deepinfer_triton.support import DENSE, NVIDIA, offer, serves
from deepinfer_triton.targets import Target
from deepinfer_triton.weights import stored, weight_arguments


@triton.jit(do_not_specialize=["rows"])
def markov_logits_kernel(
    base, base_stride, mu, values, scales, rows, out, out_stride,
    N: tl.constexpr, K: tl.constexpr, MATRIX: tl.constexpr, SCALES: tl.constexpr, FORMAT: tl.constexpr,
    FEATURES: tl.constexpr, TOKENS: tl.constexpr, DEPTH: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    n = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    acc = product_tile(mu, None, K, t, t < rows, values, scales, n, N, K, FEATURES, TOKENS, DEPTH, FORMAT, DOT, None, True)
    inside = (t < rows)[:, None] & (n < N)[None, :]
    row = t.to(tl.int64)[:, None]
    total = tl.trans(acc) + tl.load(base + row * base_stride + n[None, :], mask=inside, other=0.0)
    tl.store(out + row * out_stride + n[None, :], total, mask=inside)


def markov_logits(target: Target, base, prev, embed, head, out, mu) -> None:
    rows, vocab = base.shape
    table, matrix = stored(embed), stored(head)
    launch(
        embedding_gather_kernel, (rows, 1), prev, table.values, table.scales, None, rows, mu, M=1,
        **weight_arguments(table), TILE=max(32, next_power_of_2(mu.shape[1])),
    )  # fmt: skip
    grid = (cdiv(vocab, target.features), cdiv(rows, target.tokens))
    launch(
        markov_logits_kernel, grid, base, base.stride(0), mu, matrix.values, matrix.scales, rows, out, out.stride(0),
        **weight_arguments(matrix), FEATURES=target.features, TOKENS=target.tokens, DEPTH=target.depth,
        DOT=dot_of(target.dot, DTYPE_NAMES[mu.dtype], matrix.format), warps=target.gemm_warps, stages=3,
    )  # fmt: skip


MAKERS = [offer("markov_logits", markov_logits, supports=serves(mu=DENSE), targets=NVIDIA)]
