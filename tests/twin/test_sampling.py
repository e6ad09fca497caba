"""The sampling kernels on the twin: draws equal to the reference's, filters at exact ties."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "backends/ascend"))

from deepinfer_ascend import twin  # noqa: E402
from deepinfer_hal.card import get_card  # noqa: E402

pytestmark = pytest.mark.skipif(twin.module() is None, reason=str(twin.unavailable_reason()))

NEVER = float("-inf")


def both(logits: torch.Tensor, **settings) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of the twin and of the reference; settings default to plain sampling at temperature 0.8."""
    rows = logits.shape[0]
    args = {
        "logits": logits,
        "temperature": torch.full((rows,), 0.8),
        "top_k": torch.zeros(rows, dtype=torch.int32),
        "top_p": torch.ones(rows),
        "min_p": torch.zeros(rows),
        "seeds": torch.arange(rows) * 0x9E3779B97F4A7C15 - (1 << 40),
        "positions": torch.arange(rows, dtype=torch.int32) - 2,
        "purpose": 0,
    } | settings
    found, expected = torch.full((2, rows), -7, dtype=torch.int32)
    twin.bind(get_card("sample"))(**args, tokens=found)
    get_card("sample").reference(**args, tokens=expected)
    return found, expected


def normal(rows: int, vocab: int) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(5)) * 2


@pytest.mark.parametrize("purpose", [0, 2])
@pytest.mark.parametrize(("rows", "vocab"), [(200, 61), (4, 6001)])
def test_plain_draws_are_the_references_across_pieces_of_the_vocabulary(rows, vocab, purpose):
    found, expected = both(normal(rows, vocab), purpose=purpose)
    assert torch.equal(found, expected)
    assert len(set(found.tolist())) > 3


def test_equal_logits_leave_the_choice_to_the_noise_alone():
    """Each token is then the largest of the row's Philox words, so a wrong bit anywhere shows."""
    found, expected = both(torch.zeros(64, 512))
    assert torch.equal(found, expected)


def test_filtered_draws_are_the_references():
    rows, gen = 120, torch.Generator().manual_seed(9)
    settings = {
        "top_k": torch.randint(0, 60, (rows,), generator=gen, dtype=torch.int32),
        "top_p": torch.rand(rows, generator=gen),
        "min_p": torch.rand(rows, generator=gen) * 0.2,
    }
    found, expected = both(normal(rows, 333), **settings)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("vocab", [40, 5000])
def test_a_tie_at_the_edge_of_top_k_keeps_the_lower_ids(vocab):
    """All logits are equal: top-k keeps the first k ids, wherever a piece of the vocabulary ends."""
    for k in (1, 3, vocab // 2):
        found, expected = both(torch.zeros(24, vocab), top_k=torch.full((24,), k, dtype=torch.int32))
        assert torch.equal(found, expected)
        assert int(found.max()) < k


def test_a_tie_at_the_edge_of_top_p_keeps_as_many_lower_ids_as_the_share_needs():
    found, expected = both(torch.zeros(40, 64), top_p=torch.full((40,), 10.5 / 64))
    assert torch.equal(found, expected)
    assert int(found.max()) == 10


def test_top_p_of_nothing_keeps_the_best_token():
    logits = normal(8, 100)
    assert torch.equal(both(logits, top_p=torch.zeros(8))[0], logits.argmax(1).int())


def test_rows_that_cannot_be_sampled_from_give_minus_one_and_banned_tokens_never_come():
    logits = normal(5, 2100)
    logits[0, 2050], logits[1, 3], logits[2] = float("nan"), float("inf"), NEVER
    logits[3] = NEVER
    logits[3, 2099] = -50.0
    found, _ = both(logits)
    assert found[:4].tolist() == [-1, -1, -1, 2099]
    assert found[4] >= 0


def test_log_probabilities_list_banned_tokens_last_and_in_order():
    logits = torch.tensor([[1.0, NEVER, 2.0, NEVER, 1.0]])
    outs = torch.zeros(1), torch.zeros(1, dtype=torch.int32), torch.zeros(1, 5, dtype=torch.int32), torch.zeros(1, 5)
    twin.bind(get_card("top_logprobs"))(logits, torch.tensor([4], dtype=torch.int32), *outs)
    assert outs[2].tolist() == [[2, 0, 4, 1, 3]] and outs[1].tolist() == [3]
    assert outs[3][0, 3:].tolist() == [NEVER, NEVER]
    torch.testing.assert_close(outs[3][0, :3], logits.log_softmax(1)[0, [2, 0, 4]])
