"""Where top-k and top-p end in a row, and top-k log-probabilities, with so few lanes that the registers do not hold them.

Runs in Triton's interpreter, as `test_triton_kernels.py` does and beside it.
"""

from __future__ import annotations

import os

import pytest
import torch
from deepinfer_hal.ops.top_logprobs import top_logprobs

triton = pytest.importorskip("triton", reason="Triton is not here; tests/triton/test_toolchains.py runs this file")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the interpreter is chosen by TRITON_INTERPRET=1 before Triton is imported", allow_module_level=True)

import triton.language as tl  # noqa: E402
from deepinfer_triton.boundary import collect  # noqa: E402
from deepinfer_triton.ops.sample import survivors  # noqa: E402
from deepinfer_triton.ops.top_logprobs import top_logprobs_kernel  # noqa: E402

V, LANES = 600, 32
"""19 tiles of 32 lanes: four kept logits a lane are a fifth of the row."""


@triton.jit
def survivors_kernel(logits, top_k, top_p, temperature, floor, ties, V: tl.constexpr, LANES: tl.constexpr):
    a0, a1, a2, a3, p0, p1, p2, p3, same, low = collect(logits, float("inf"), V, LANES, 1)
    peak, lowest = tl.max(a0, axis=0), tl.min(low, axis=0)
    k, p, t = tl.load(top_k), tl.load(top_p), tl.load(temperature)
    found, number, *rest = survivors(logits, a0, a1, a2, a3, p0, p1, p2, p3, lowest, peak, k, p, t, V, LANES)
    tl.store(floor, found)
    tl.store(ties, number)


def kept(logits: torch.Tensor, top_k: int, top_p: float, temperature: float) -> list[int]:
    """Columns that survive by what the kernel finds."""
    floor, ties = torch.zeros(1), torch.zeros(1, dtype=torch.int32)
    given = (torch.tensor([top_k], dtype=torch.int32), torch.tensor([top_p]), torch.tensor([temperature]))
    survivors_kernel[(1,)](logits, *given, floor, ties, V=V, LANES=LANES)
    level = (logits == floor).nonzero()[:, 0].tolist()
    return sorted((logits > floor).nonzero()[:, 0].tolist() + level[: int(ties)])


def expected(logits: torch.Tensor, top_k: int, top_p: float, temperature: float) -> list[int]:
    """The same by sorting, in float64."""
    scaled = logits.double() / temperature
    order = scaled.sort(descending=True, stable=True).indices
    order = order[scaled[order] > float("-inf")]
    if 0 < top_k < V:
        order = order[:top_k]
    if top_p < 1:
        mass = scaled[order].softmax(0)
        before = mass.cumsum(0) - mass
        order = order[: max(int((before < top_p).sum()), 1)]
    return sorted(order.tolist())


def row(kind: str) -> torch.Tensor:
    gen = torch.Generator().manual_seed(77)
    x = torch.randn(V, generator=gen) * 3
    if kind == "ties":
        x = (x * 2).round() / 2
    elif kind == "level":
        x = torch.full((V,), -1.25)
    elif kind == "banned":
        x[torch.rand(V, generator=gen) < 0.7] = float("-inf")
    elif kind == "steep":
        x = -torch.arange(V).float().exp2().clamp(max=1e30)[torch.randperm(V, generator=gen)]
    elif kind == "signs":
        x = torch.randn(V, generator=gen) * 1e-3
        x[::50] = 0.0
        x[25::50] = -0.0
    elif kind == "one lane":
        x[5::LANES] += 20
    return x


SETTINGS = [(333, 1.0, 1.0), (0, 0.93, 2.5), (150, 0.71, 1.3)]
EDGES = [(1, 1.0, 1.0), (7, 1.0, 1.0), (0, 0.3, 1.0), (0, 0.0, 1.0)]


@pytest.mark.parametrize(
    ("kind", "top_k", "top_p", "temperature"),
    [(kind, *one) for kind in ("random", "ties", "level", "banned", "steep", "signs", "one lane") for one in SETTINGS]
    + [("random", *one) for one in EDGES],
)
def test_the_survivors_of_top_k_and_top_p_are_those_of_a_sort(kind, top_k, top_p, temperature):
    logits = row(kind)
    assert kept(logits, top_k, top_p, temperature) == expected(logits, top_k, top_p, temperature)


@pytest.mark.parametrize("kind", ["random", "ties", "level", "banned", "one lane"])
def test_the_best_tokens_come_in_order_when_one_lane_holds_more_than_it_keeps(kind):
    logits, best = row(kind)[None], 40
    chosen = torch.tensor([17], dtype=torch.int32)

    def outputs():
        ints = [torch.zeros(1, dtype=torch.int32), torch.zeros(1, best, dtype=torch.int32)]
        return [torch.zeros(1), ints[0], ints[1], torch.zeros(1, best)]

    want, got = outputs(), outputs()
    top_logprobs(logits, chosen, *want)
    top_logprobs_kernel[(1,)](logits, V, chosen, *got, best, V=V, LANES=LANES)
    assert torch.equal(got[1], want[1]) and torch.equal(got[2], want[2])
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[3], want[3], rtol=1e-5, atol=1e-5)
