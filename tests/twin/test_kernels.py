"""Every AscendC kernel on the twin: its card's smaller cases by the basic checks; no core count or seed moves a bit.

The whole table of checks on every case is `deepinfer hal test --backend ascend:twin`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "backends/ascend"), str(ROOT / "tests/conformance")]

from deepinfer_ascend import twin  # noqa: E402
from deepinfer_ascend.backend import TWIN_INDEX, AscendBackend  # noqa: E402
from deepinfer_hal.card import get_card  # noqa: E402
from deepinfer_hal.errors import BadCall  # noqa: E402
from harness import run_case  # noqa: E402

pytestmark = pytest.mark.skipif(twin.module() is None, reason=str(twin.unavailable_reason()))

CASES = 2
"""Cases of a card, the smallest that have rows."""


def prepare(role, canonical):
    return AscendBackend().prepare_weight(TWIN_INDEX, role, canonical)


def smoke_cases(op: str) -> list:
    """The first cases of a card whose arguments are not empty."""
    card, found = get_card(op), []
    for case in card.enumerate_cases():
        if case.params.get("requests", "0+1") and 0 not in [case.params.get(key, 1) for key in ("T", "M", "S", "R", "rows")]:
            found.append(case)
        if len(found) == CASES:
            break
    return found


@pytest.mark.parametrize("op", twin.ops())
def test_agrees_with_the_card(op):
    cases = smoke_cases(op)
    assert cases
    for case in cases:
        run_case(get_card(op), case, twin.bind(get_card(op)), prepare=prepare)


def outputs(op, case, stream):
    card = get_card(op)
    args = card.generate(case, 5, "cpu", prepare)
    twin.bind(card)(**args, stream=stream)
    written = [args[arg.name] for arg in card.signature if arg.kind in ("out", "inout")]
    return [t.contiguous().view(torch.uint8).clone() for t in written if t is not None]


@pytest.mark.parametrize("op", [op for op in twin.ops() if op != "rms_norm"])
def test_bits_do_not_depend_on_cores_or_seed(op):
    case = smoke_cases(op)[-1]
    first = outputs(op, case, twin.module().Stream(cores=8, seed=7))
    assert first
    other = outputs(op, case, twin.module().Stream(cores=36, seed=99))
    assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_a_call_that_local_memory_cannot_hold_is_refused_with_the_numbers():
    card = get_card("route_topk")
    case = next(iter(card.enumerate_cases()))
    args = card.generate(case, 0, "cpu", None)
    args["logits"], args["bias"] = torch.zeros(0, 4096), torch.zeros(4096)
    with pytest.raises(Exception, match="at most 2048 experts in local memory, got 4096") as caught:
        twin.bind(card)(**args)
    assert not isinstance(caught.value, BadCall)


def test_calls_made_while_arguments_are_read_do_not_disturb():
    """Reading a weight's layout runs Python, where another thread's call can come in between."""
    card, other = get_card("linear"), get_card("rms_norm")
    args = card.generate(smoke_cases("linear")[0], 5, "cpu", prepare)
    inner = other.generate(smoke_cases("rms_norm")[0], 5, "cpu", prepare)
    whole = args["weight"]

    class Interrupted:
        @property
        def native(self):
            twin.bind(other)(**inner)
            return whole.native

    twin.bind(card)(**args)
    first = args["out"].clone()
    args["out"].zero_()
    twin.bind(card)(**{**args, "weight": Interrupted()})
    assert torch.equal(args["out"], first)
