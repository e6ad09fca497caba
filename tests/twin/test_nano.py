"""The nano model and its sampler on the twin, no reference serving any op, against the CPU backend."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "backends/ascend"))

from deepinfer_ascend import twin  # noqa: E402

from deepinfer.config import EngineConfig  # noqa: E402
from deepinfer.engine.step_plan import SamplingBatch  # noqa: E402
from deepinfer.model_path import PACKAGED_MODELS  # noqa: E402
from deepinfer.runner.load import Loaded, load  # noqa: E402
from deepinfer.runner.runner import Runner  # noqa: E402
from deepinfer.runner.sampler import SampledStep  # noqa: E402

NANO = PACKAGED_MODELS / "nano"
EXACT = {"dtype": "float32", "act_quant": "none", "kv_cache_dtype": "float32"}
TOKENS, CHUNK = 12, 7

pytestmark = [
    pytest.mark.skipif(twin.module() is None, reason=str(twin.unavailable_reason())),
    pytest.mark.skipif(not (NANO / "agreement.json").is_file(), reason="no nano with agreement.json in the package"),
]


def loaded(backend: str, **settings) -> Loaded:
    sizes = {"max_model_len": 128, "max_num_seqs": 2, "max_num_batched_tokens": 64, "num_blocks": 4}
    return load(EngineConfig.create(model=str(NANO), backend=backend, **(sizes | settings)))


@functools.cache
def twin_runner(**settings) -> Runner:
    return Runner(loaded("ascend:twin", fallback="forbid", **settings))


@functools.cache
def stored() -> dict:
    return json.loads((NANO / "agreement.json").read_text("utf-8"))


def text() -> np.ndarray:
    """The end of a stored prompt and its first greedy tokens."""
    return np.array(stored()["prompts"][0][-TOKENS // 2 :] + stored()["greedy"][0][: TOKENS // 2], np.int32)


@functools.cache
def whole() -> torch.Tensor:
    """float32 [TOKENS, V]: log-probabilities from the twin with default numerics, in one step."""
    return torch.from_numpy(twin_runner().score(text()))


@functools.cache
def cpu_runner(**settings) -> Runner:
    return Runner(loaded("cpu", fallback="forbid", **settings))


@functools.cache
def exact() -> tuple[np.ndarray, np.ndarray]:
    """float32 [TOKENS, V] each: log-probabilities without rounding, from the twin and from the CPU."""
    return twin_runner(**EXACT).score(text()), cpu_runner(**EXACT).score(text())


def test_every_op_of_the_network_and_its_sampler_has_a_kernel():
    dispatcher = twin_runner(**EXACT).loaded.dispatcher
    assert not dispatcher.fallbacks
    assert {choice.provider for choice in dispatcher.table()} == {"ascendc"}


def test_without_rounding_every_log_probability_agrees_with_the_cpu():
    found, expected = exact()
    assert np.abs(found - expected).max() <= 1e-4


def drawn(runner: Runner, logits: np.ndarray, temperature: float) -> list[int]:
    """A token of each row, by the runner's own sampler, with penalties, a bias and filters for some rows."""
    rows, row = len(logits), np.arange(len(logits))
    ones, zeros = np.ones(rows, np.float32), np.zeros(rows, np.int32)
    batch = SamplingBatch(
        temperature=ones * np.float32(temperature), top_k=np.where(row % 3 == 0, 40, 0).astype(np.int32),
        top_p=np.where(row % 2 == 0, 0.9, 1).astype(np.float32), min_p=np.where(row % 4 == 1, 0.05, 0).astype(np.float32),
        seeds=np.arange(rows, dtype=np.int64) + 11, repetition=ones, presence=0.5 * ones, frequency=0.1 * ones,
        prompt_len=zeros, length=zeros + 5, bias_offsets=np.minimum(np.arange(rows + 1), 1).astype(np.int32),
        bias_ids=np.array([7], np.int32), bias_values=np.array([3], np.float32), num_logprobs=2, needs_mask=True,
    )  # fmt: skip
    history = torch.from_numpy(np.stack([text()[:5], text()[5:10]]))
    slots, positions = torch.from_numpy((row % 2).astype(np.int32)), torch.from_numpy(row.astype(np.int32))
    step = SampledStep()
    runner.sampler(step, torch.from_numpy(logits.copy()), batch, slots, positions, history, runner.staging.upload)
    assert not step.nan_flags.any()
    return step.tokens.tolist()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_are_those_of_the_cpu_greedy_and_drawn(temperature):
    found, expected = exact()
    tokens = drawn(twin_runner(**EXACT), found, temperature)
    assert tokens == drawn(cpu_runner(**EXACT), expected, temperature)
    assert len(set(tokens)) > 3


def test_with_default_numerics_the_tokens_agree_wherever_the_choice_is_not_within_noise():
    expected, found = torch.from_numpy(cpu_runner().score(text())), whole()
    best = expected.topk(2).values
    sure = best[:, 0] - best[:, 1] > stored()["tau"]["fp8_32"]
    assert sure.sum() >= TOKENS // 3
    assert torch.equal(expected.argmax(-1)[sure], found.argmax(-1)[sure])
    assert (expected.exp() * (expected - found)).sum(-1).mean() <= 5e-3


def test_no_bit_depends_on_how_a_prompt_is_cut_into_steps():
    assert np.array_equal(whole().numpy(), twin_runner().score(text(), CHUNK))
