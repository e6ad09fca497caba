"""confidence_head: one program per row; the sum over hidden state and Markov embedding is float64.

Rows differ in size by orders of magnitude and the sum cancels, so float32 partial sums would use up the card's tolerance.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer_triton.launch import launch
from deepinfer_triton.sizes import next_power_of_2
from deepinfer_triton.support import DENSE, NVIDIA, offer, serves
from deepinfer_triton.targets import Target

LIMIT = tl.constexpr(60.0)


@triton.jit
def dot_with(x, weight, N: tl.constexpr, TILE: tl.constexpr):
    """float64 x[:N] . weight[:N]."""
    total = tl.zeros([TILE], tl.float64)
    for start in tl.static_range(0, N, TILE):
        column = start + tl.arange(0, TILE)
        inside = column < N
        value = tl.load(x + column, mask=inside, other=0.0).to(tl.float64)
        total += value * tl.load(weight + column, mask=inside, other=0.0).to(tl.float64)
    return tl.sum(total, axis=0)


@triton.jit
def confidence_head_kernel(
    raw, raw_stride, mu, mu_stride, weight, temperature, logit, probability,
    H: tl.constexpr, R: tl.constexpr, TILE: tl.constexpr, R_TILE: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    value = dot_with(raw + t * raw_stride, weight, H, TILE) + dot_with(mu + t * mu_stride, weight + H, R, R_TILE)
    value = value.to(tl.float32)
    tl.store(logit + t, value)
    scaled = value / temperature
    limited = tl.minimum(tl.maximum(scaled, -LIMIT), LIMIT)
    limited = tl.where(scaled == scaled, limited, scaled)  # a NaN stays one
    tl.store(probability + t, 1.0 / (1.0 + tl.exp(-limited)))


def confidence_head(target: Target, raw, mu, weight, temperature, logit, probability) -> None:
    rows, hidden = raw.shape
    rank = mu.shape[1]
    launch(
        confidence_head_kernel, (rows,), raw, raw.stride(0), mu, mu.stride(0), weight, float(temperature), logit,
        probability, H=hidden, R=rank, TILE=min(target.columns, next_power_of_2(hidden)),
        R_TILE=next_power_of_2(max(rank, 1)),
    )  # fmt: skip


MAKERS = [
    offer("confidence_head", confidence_head, supports=serves(raw=DENSE, mu=DENSE, weight=DENSE), targets=NVIDIA)
]
