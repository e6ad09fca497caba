"""engram_hash: one program per token; the products wrap in int64 as the card says, and the remainder is never negative."""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer_triton.launch import launch
from deepinfer_triton.numeric import valid_rows
from deepinfer_triton.sizes import next_power_of_2
from deepinfer_triton.support import offer, serves
from deepinfer_triton.targets import Target


@triton.jit(do_not_specialize=["rows", "pad"])
def engram_hash_kernel(
    ngrams, token_map, multipliers, primes, offsets, pad, count, rows, out,
    VOCAB: tl.constexpr, N: tl.constexpr, Q: tl.constexpr, QP: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    if t < valid_rows(count, rows):
        head = tl.arange(0, QP)
        known = True
        mixed = tl.zeros([], tl.int64)
        for r in tl.static_range(N):
            token = tl.load(ngrams + t * N + r)
            known = known & (token >= 0) & (token < VOCAB)
            found = tl.load(token_map + token, mask=known, other=0)
            compressed = tl.where(known, found, pad).to(tl.int64)
            mixed = mixed ^ (compressed * tl.load(multipliers + r))
            if r > 0:
                column = (r - 1) * Q + head
                inside = head < Q
                prime = tl.load(primes + column, mask=inside, other=1)
                rest = mixed % prime
                rest = tl.where(rest < 0, rest + prime, rest)
                row = rest + tl.load(offsets + column, mask=inside, other=0)
                tl.store(out + t * ((N - 1) * Q) + column, row, mask=inside)


def engram_hash(target: Target, ngrams, token_map, multipliers, primes, offsets, pad, count, out) -> None:
    rows, size = ngrams.shape
    heads = primes.shape[0] // (size - 1)
    launch(
        engram_hash_kernel, (rows,), ngrams, token_map, multipliers, primes, offsets, pad, count, rows, out,
        VOCAB=token_map.shape[0], N=size, Q=heads, QP=next_power_of_2(heads), warps=1,
    )  # fmt: skip


MAKERS = [offer("engram_hash", engram_hash, supports=serves())]
