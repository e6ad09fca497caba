"""Forced layers of the conformance suite: a wrong kernel fails the layers that use it, and no other."""

import functools
import re

import pytest
import torch
from deepinfer_cpu.backend import CpuBackend
from deepinfer_hal.card import get_card
from deepinfer_hal.conformance.verdict import CheckFailed, Declined

from deepinfer.hal_cases import LAYERS, MODEL, cases
from deepinfer.hal_layers import NUMERICS, _by_row, _compare_selections, forced_draft, forced_layer
from deepinfer.model_config import ModelConfig
from deepinfer.runner import load
from tests.conformance.suite_backends import Example, wrapped

pytestmark = pytest.mark.skipif(not (MODEL / "agreement.json").is_file(), reason="the package carries no nano")
LAYER, EXACT = "draft", "none"


def shifted(op: str, argument: str):
    """A kernel that takes one more of what `argument` counts."""
    card = get_card(op)
    place = card.arg_names.index(argument)

    def kernel(*args):
        card.reference(*args[:place], args[place] + 1, *args[place + 1 :])

    return wrapped(op, f"{argument}_plus_1", kernel)


def louder(op: str, argument: str):
    """A kernel whose result in `argument` is 1 % too large."""
    card = get_card(op)
    place = card.arg_names.index(argument)

    def kernel(*args):
        card.reference(*args)
        args[place].mul_(1.01)

    return wrapped(op, "louder", kernel)


@functools.cache
def backend(name: str) -> Example:
    kernels = {
        "nothing": lambda: (),
        "window": lambda: (shifted("sparse_attention", "window_tokens"),),
        "draft_window": lambda: (shifted("draft_attention", "window_tokens"),),
        "scores": lambda: (backwards(),),
        "engram": lambda: (louder("engram_gate", "streams"),),
    }
    return Example(*kernels[name]())


def backwards():
    """A kernel that prefers the rows that score least."""
    card = get_card("select_topk")

    def kernel(scores, *rest):
        card.reference(torch.where(scores.isfinite(), -scores, scores), *rest)

    return wrapped("select_topk", "least", kernel)


def failure(monkeypatch, name: str, layer: int | str, numerics: str = EXACT) -> str:
    """Why the case of a layer fails with the backend of that name; "" when it passes."""
    found = load.open_backend
    chip = backend(name)
    monkeypatch.setattr(load, "open_backend", lambda spec: (chip, 0) if spec.startswith("example") else found(spec))
    try:
        if layer == LAYER:
            forced_draft(chip, 0, MODEL, numerics)
        else:
            forced_layer(chip, 0, MODEL, layer, numerics)
    except CheckFailed as error:
        return str(error)
    return ""


@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("layer", [1, 3, 6, LAYER])
def test_right_kernels_pass(monkeypatch, layer, numerics):
    assert failure(monkeypatch, "nothing", layer, numerics) == ""


@pytest.mark.parametrize("layer", [0, 1, 5, 6])
def test_a_window_one_too_long_fails_layers_from_the_first_token_with_such_a_window(monkeypatch, layer):
    assert "streams of token 128 is off by" in failure(monkeypatch, "window", layer)


@pytest.mark.parametrize("layer", [0, 6])
def test_rounded_activations_hide_such_a_window_in_no_more_than_some_tokens(monkeypatch, layer):
    """Which of them is the first to be outside depends on the order of sums, so on the machine."""
    reason = failure(monkeypatch, "window", layer, "default")
    assert int(re.match(r"streams of token (\d+) is off by", reason)[1]) >= 128, reason


def test_a_window_that_is_one_too_long_passes_the_draft_which_attends_by_another_op(monkeypatch):
    assert failure(monkeypatch, "window", LAYER) == ""


def test_a_draft_window_that_is_one_too_long_fails_the_draft_and_no_backbone_layer(monkeypatch):
    assert "hidden of token 0 is off by" in failure(monkeypatch, "draft_window", LAYER)
    assert failure(monkeypatch, "draft_window", 6) == ""


@pytest.mark.parametrize("numerics", NUMERICS)
def test_a_wrong_selection_fails_index_sources_and_passes_layers_that_are_given_one(monkeypatch, numerics):
    assert "select compressed row" in failure(monkeypatch, "scores", 3, numerics)
    assert failure(monkeypatch, "scores", 6, numerics) == ""


def test_a_wrong_engram_gate_fails_the_layer_with_a_table_alone(monkeypatch):
    assert "streams of token" in failure(monkeypatch, "engram", 1)
    assert failure(monkeypatch, "engram", 3) == ""


# ---------------------------------------------------------------------------------------------------- the rules


def compared(scores: list[float], got: list[int], limit: float):
    wanted = {"select": torch.tensor([[0, 1]]), "scores": torch.tensor([scores])}
    return _compare_selections(wanted, torch.tensor([got]), torch.tensor([limit]), [{"select": torch.tensor([[0, 2]])}])


def test_a_selection_may_differ_only_within_the_limit_of_its_edge():
    excused, facts = compared([3.0, 2.0, 1.999], [0, 2], 0.01)
    assert excused.tolist() == [True]
    assert facts == {"selections": 2, "selections_at_the_edge": 2}
    with pytest.raises(CheckFailed, match="token 0 must not select compressed row 2"):
        compared([3.0, 2.0, 1.9], [0, 2], 0.01)
    with pytest.raises(CheckFailed, match="token 0 must select compressed row 1"):
        compared([3.0, 2.0, 1.999], [0, -1], 0.01)


def test_scores_of_candidate_blocks_are_read_by_row():
    placed = _by_row(torch.tensor([[1.0, 2, 3, 4, 5, 6]]), torch.tensor([[2, 0, -1]]), 2)
    assert placed.tolist() == [[3.0, 4.0, float("-inf"), float("-inf"), 1.0, 2.0]]


def test_numerics_that_a_backend_has_not_are_declined():
    class Half(CpuBackend):
        def capabilities(self, index):
            return type("Only", (), {"stream_dtypes": (torch.bfloat16,)})()

    with pytest.raises(Declined, match="no torch.float32 streams"):
        forced_layer(Half(), 0, MODEL, 1, EXACT)


def test_core_has_two_layers_and_full_has_all_and_the_draft():
    def ids(profile):
        return [case.id for case in cases(profile) if "layer=" in case.id]

    assert len(LAYERS) == ModelConfig.from_folder(MODEL).text.num_hidden_layers
    assert ids("core") == [f"model(name=nano,layer={layer},numerics={n})" for n in NUMERICS for layer in (1, 6)]
    assert ids("full") == [f"model(name=nano,layer={layer},numerics={n})" for n in NUMERICS for layer in [*LAYERS, LAYER]]
