"""route_topk: one program per token picks its experts one after the other; counts are integer atomics, so they are
exact.

An expert's rank is one int64 that orders by score and then by lower id (NaN first, -inf last, nobody twice), so that a
pick is a single maximum. softplus(x) = max(x, 0) + log1p(exp(-|x|)), with log1p by its own series: a fast logarithm would
lose the small scores.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer_triton.launch import launch
from deepinfer_triton.numeric import MAGNITUDE, as_bits, log1p_of_fraction, valid_rows
from deepinfer_triton.overlap import overlap
from deepinfer_triton.sizes import next_power_of_2
from deepinfer_triton.support import NVIDIA, offer, serves
from deepinfer_triton.targets import Target

TAKEN = tl.constexpr(-(2**62))
"""Below the rank of every expert that may still be taken."""


@triton.jit
def root_softplus(x):
    return tl.sqrt(tl.where(x > 0, x, 0.0) + log1p_of_fraction(tl.exp(-tl.abs(x))))


@triton.jit
def zero_kernel(out, N: tl.constexpr, TILE: tl.constexpr):
    overlap()
    at = tl.arange(0, TILE)
    tl.store(out + at, tl.zeros([TILE], tl.int32), mask=at < N)


@triton.jit(do_not_specialize=["rows"])
def route_topk_kernel(
    logits, bias, scaling, expert_map, count, rows, ids, weights, counts,
    E: tl.constexpr, TILE: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    overlap()
    t = tl.program_id(0)
    if t < valid_rows(count, rows):
        expert = tl.arange(0, TILE)
        inside = expert < E
        score = root_softplus(tl.load(logits + t.to(tl.int64) * E + expert, mask=inside, other=0.0))
        value = score + tl.load(bias + expert, mask=inside, other=0.0)
        bits = as_bits(tl.where(value == 0, 0.0, value))
        key = tl.where(value == value, bits ^ ((bits >> 31) & MAGNITUDE), MAGNITUDE).to(tl.int64)
        rank = tl.where(inside, key * TILE + (TILE - 1 - expert), TAKEN)
        place = tl.arange(0, KP)
        chosen = tl.zeros([KP], tl.int32)
        for j in tl.static_range(K):
            best = tl.max(rank, axis=0)
            rank = tl.where(rank == best, TAKEN, rank)
            chosen = tl.where(place == j, TILE - 1 - (best & (TILE - 1)).to(tl.int32), chosen)
        wanted = place < K
        picked = root_softplus(tl.load(logits + t.to(tl.int64) * E + chosen, mask=wanted, other=0.0))
        total = tl.sum(tl.where(wanted, picked, 0.0), axis=0)
        tl.store(weights + t * K + place, picked / (total + 1e-20) * scaling, mask=wanted)
        physical = chosen
        if expert_map is not None:
            physical = tl.load(expert_map + chosen, mask=wanted, other=-1)
        tl.store(ids + t * K + place, physical, mask=wanted)
        tl.atomic_add(counts + tl.maximum(physical, 0), 1, mask=wanted & (physical >= 0))


def route_topk(target: Target, logits, bias, k, scaling, expert_map, count, ids, weights, counts) -> None:
    rows, experts = logits.shape
    physical = counts.shape[0]
    launch(zero_kernel, (1,), counts, N=physical, TILE=next_power_of_2(physical), early=True)
    launch(
        route_topk_kernel, (rows,), logits, bias, scaling, expert_map, count, rows, ids, weights, counts,
        E=experts, TILE=next_power_of_2(experts), K=k, KP=next_power_of_2(k), early=True,
    )  # fmt: skip


MAKERS = [offer("route_topk", route_topk, supports=serves(), targets=NVIDIA)]
