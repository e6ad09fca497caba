"""Rotary tables: the released model's YaRN ramp, and plain frequencies where there is none."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from deepinfer.bench.v41 import released_config
from deepinfer.model.rope import inverse_frequencies, rope_table

RELEASED = released_config()["text_config"]


def settings(yarn: dict | None = None, **changes) -> SimpleNamespace:
    """The released model's rotary settings, with changes."""
    names = ("qk_rope_head_dim", "rope_theta", "compress_rope_theta")
    scaling = SimpleNamespace(**{**RELEASED["rope_scaling"], **(yarn or {})})
    return SimpleNamespace(**{**{name: RELEASED[name] for name in names}, "rope_scaling": scaling, **changes})


def test_the_numbers_below_are_those_of_the_released_model():
    scaling = RELEASED["rope_scaling"]
    assert (RELEASED["qk_rope_head_dim"], RELEASED["rope_theta"], RELEASED["compress_rope_theta"]) == (64, 10000, 160000)
    assert (scaling["factor"], scaling["original_max_position_embeddings"]) == (16, 65536)


def test_plain_frequencies_are_powers_of_theta():
    found = inverse_frequencies(settings(), "plain")
    assert found.shape == (32,) and found.dtype == torch.float32
    for i in (0, 1, 15, 31):
        assert found[i].item() == pytest.approx(10000.0 ** (-2 * i / 64), rel=1e-6)


def test_the_released_ramp_runs_from_pair_15_to_pair_25():
    text = settings()
    found = inverse_frequencies(text, "yarn").double()
    base = 1 / text.compress_rope_theta ** (torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    share = (found / base - 1 / 16) / (1 - 1 / 16)
    ramp = 1 - share
    assert torch.allclose(ramp, ((torch.arange(32, dtype=torch.float64) - 15) / 10).clamp(0, 1), atol=1e-5)


def test_a_pair_turns_at_the_frequency_that_the_formula_gives():
    text = settings()
    turns = {i: 65536 / (2 * math.pi * 160000.0 ** (2 * i / 64)) for i in (15, 16, 24, 25)}
    assert turns[15] > 32 > turns[16] and turns[24] > 1 > turns[25]
    assert inverse_frequencies(text, "yarn")[15] == pytest.approx(160000.0 ** (-30 / 64), rel=1e-6)
    assert inverse_frequencies(text, "yarn")[25] == pytest.approx(160000.0 ** (-50 / 64) / 16, rel=1e-6)


def test_without_scaling_up_the_ramp_changes_nothing():
    text = settings(yarn={"factor": 1.0}, rope_theta=160000.0)
    assert torch.allclose(inverse_frequencies(text, "yarn"), inverse_frequencies(text, "plain"), rtol=1e-6)


@pytest.mark.parametrize("kind", ["plain", "yarn"])
def test_a_table_row_holds_cosines_then_sines_of_its_position_without_a_magnitude(kind):
    table = rope_table(settings(), kind, 5000, torch.device("cpu"))
    assert table.shape == (5000, 64) and table.dtype == torch.float32
    angles = torch.arange(5000)[:, None] * inverse_frequencies(settings(), kind)[None]
    assert torch.equal(table, torch.cat([angles.cos(), angles.sin()], dim=1))
    assert table[0].tolist() == [1.0] * 32 + [0.0] * 32
    assert torch.allclose(table[:, :32] ** 2 + table[:, 32:] ** 2, torch.ones(()), atol=1e-6)


def test_degenerate_bounds_give_a_step_and_no_division_by_zero():
    text = settings(yarn={"beta_fast": 1e-9, "beta_slow": 1e-9})
    assert inverse_frequencies(text, "yarn").isfinite().all()
