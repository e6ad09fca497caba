"""The sample kernel: right by its card on the twin, with the same bits for any core count and scheduler seed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "backends/ascend"), str(ROOT / "tests/conformance")]

from deepinfer_ascend import twin  # noqa: E402
from deepinfer_hal.card import get_card  # noqa: E402
from harness import case_id, cases_of, run_case  # noqa: E402

pytestmark = pytest.mark.skipif(twin.module() is None, reason=str(twin.unavailable_reason()))


@pytest.mark.parametrize(("card", "case"), cases_of("rms_norm"), ids=case_id)
def test_agrees_with_the_card(card, case):
    run_case(card, case, twin.bind(card))


def test_bits_do_not_depend_on_cores_or_seed():
    card = get_card("rms_norm")
    case = list(card.enumerate_cases())[3]
    results = []
    for cores, seed in ((4, 1), (36, 7), (28, 99)):
        args = card.generate(case, 5, "cpu", None)
        twin.bind(card)(**args, stream=twin.module().Stream(cores=cores, seed=seed))
        results.append([args[name] for name in ("out", "out_codes", "out_scales")])
    for other in results[1:]:
        assert all(
            torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(results[0], other, strict=True)
        )
