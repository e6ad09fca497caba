"""Selection on the twin over rows longer than local memory: the card's columns exactly, ties to the lower, whatever the order."""

from __future__ import annotations

import pytest
import torch
from deepinfer_ascend import twin
from deepinfer_hal.card import get_card
from deepinfer_hal.errors import BackendError

pytestmark = pytest.mark.skipif(twin.module() is None, reason=str(twin.unavailable_reason()))


def scores(kind: str, columns: int) -> torch.Tensor:
    """float32 [2, columns] with some that are never picked."""
    drawn = torch.randn(2, columns, generator=torch.Generator().manual_seed(columns))
    made = {
        "random": drawn,
        "rising": drawn.sort(dim=1).values,
        "falling": drawn.sort(dim=1, descending=True).values,
        "few values": drawn.round(),
        "one value": torch.full_like(drawn, -1.5),
        "zeros of both signs": torch.where(drawn > 0, 0.0, -0.0),
        "extremes": torch.where(drawn > 1, float("inf"), torch.where(drawn < -1, torch.finfo().min, 1e-42)),
        "hardly any": torch.where(drawn > 3.5, drawn, float("-inf")),
    }[kind].clone()
    made[1, ::7], made[1, 1::11] = float("nan"), float("-inf")
    return made


def topk(x: torch.Tensor, k: int, call, candidates: torch.Tensor | None = None) -> torch.Tensor:
    rows = torch.full((x.shape[0], k), -9, dtype=torch.int32)
    call(x, candidates, 8, None, rows)
    return rows


KINDS = ("random", "rising", "falling", "few values", "one value", "zeros of both signs", "extremes", "hardly any")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("columns", "k"), [(30000, 512), (10240, 64), (12289, 4096)])
def test_the_best_columns_of_a_long_row_are_the_references(kind, columns, k):
    card, x = get_card("select_topk"), scores(kind, columns)
    assert torch.equal(topk(x, k, twin.bind(card)), topk(x, k, card.reference))


def test_a_row_of_a_million_columns_is_served():
    card, x = get_card("select_topk"), scores("random", 1 << 20)
    assert torch.equal(topk(x, 512, twin.bind(card)), topk(x, 512, card.reference))


def test_candidate_blocks_stand_for_their_rows_across_chunks():
    card, x = get_card("select_topk"), scores("few values", 24000)
    drawn = [torch.randperm(9000, generator=torch.Generator().manual_seed(row))[:3000] for row in (1, 2)]
    candidates = torch.stack([one.sort().values for one in drawn]).to(torch.int32)
    candidates[1, -40:] = -1
    assert torch.equal(topk(x, 256, twin.bind(card), candidates), topk(x, 256, card.reference, candidates))


@pytest.mark.parametrize(("block", "kind"), [(8, "random"), (8, "few values"), (16, "falling"), (5, "rising"), (99, "one value")])
def test_the_best_blocks_of_a_long_row_are_the_references(block, kind):
    card, x = get_card("select_candidate_blocks"), scores(kind, 100003)
    visible, found = torch.tensor([100003, 70001], dtype=torch.int32), []
    for call in (twin.bind(card), card.reference):
        out = torch.full((2, 300), -9, dtype=torch.int32)
        call(x, visible, block, None, out)
        found.append(out)
    assert torch.equal(*found)


def test_more_columns_than_local_memory_picks_are_refused_with_the_numbers():
    with pytest.raises(BackendError, match="at most 4096 columns picked, got 5000"):
        topk(scores("random", 6000), 5000, twin.bind(get_card("select_topk")))
