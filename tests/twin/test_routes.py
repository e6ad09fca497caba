"""Routes on the twin where logits or biases are not finite: k different experts, in the card's order."""

from __future__ import annotations

import pytest
import torch
from deepinfer_ascend import twin
from deepinfer_hal.card import get_card

pytestmark = pytest.mark.skipif(twin.module() is None, reason=str(twin.unavailable_reason()))

NAN, INF = float("nan"), float("inf")


def routes(logits: torch.Tensor, bias: torch.Tensor, k: int, call) -> tuple[torch.Tensor, ...]:
    rows, experts = logits.shape
    ids, weights = torch.full((rows, k), -9, dtype=torch.int32), torch.full((rows, k), 5.0)
    counts = torch.full((experts,), -9, dtype=torch.int32)
    call(logits, bias, k, 1.5, None, None, ids, weights, counts)
    return ids, weights, counts


@pytest.mark.parametrize("experts", [8, 128, 384])
@pytest.mark.parametrize("kind", ["one NaN", "all NaN", "infinite", "NaN and infinite", "few biases above -inf"])
def test_no_expert_is_taken_twice(kind, experts):
    logits = torch.randn(3, experts, generator=torch.Generator().manual_seed(experts))
    bias = torch.zeros(experts)
    if kind == "one NaN":
        logits[1, 5] = NAN
    elif kind == "all NaN":
        logits[1] = NAN
    elif kind == "infinite":
        logits[1, 3] = INF
    elif kind == "NaN and infinite":
        logits[1, 2], logits[1, 6] = INF, NAN
    else:
        bias[2:] = -INF
    card = get_card("route_topk")
    got, want = routes(logits, bias, 6, twin.bind(card)), routes(logits, bias, 6, card.reference)
    assert torch.equal(got[0], want[0]) and torch.equal(got[2], want[2])
    for row in (0, 2):  # the neighbours
        assert torch.allclose(got[1][row], want[1][row], rtol=1e-5)
    assert torch.equal(got[1].isnan(), want[1].isnan())
