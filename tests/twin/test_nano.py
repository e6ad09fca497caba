"""The nano model on the twin, no reference serving any op of the network, against the CPU backend."""

from __future__ import annotations

import dataclasses
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
from deepinfer_hal.errors import Unsupported  # noqa: E402

from deepinfer.config import EngineConfig  # noqa: E402
from deepinfer.model_path import PACKAGED_MODELS  # noqa: E402
from deepinfer.runner.load import Loaded, load  # noqa: E402
from deepinfer.runner.runner import Runner  # noqa: E402

NANO = PACKAGED_MODELS / "nano"
EXACT = {"dtype": "float32", "act_quant": "none", "kv_cache_dtype": "float32"}
SAMPLING = {"mask_logits", "sample", "top_logprobs"}
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
    """The network is bound with references forbidden; the sampler, which scoring does not call, with them allowed."""
    network = loaded("ascend:twin", fallback="forbid", **settings)
    return Runner(dataclasses.replace(network, dispatcher=dataclasses.replace(network.dispatcher, fallback="allow")))


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


def test_every_op_of_the_network_has_a_kernel_and_only_sampling_ops_take_references():
    dispatcher = twin_runner(**EXACT).loaded.dispatcher
    assert set(dispatcher.fallbacks) == SAMPLING
    assert {choice.provider for choice in dispatcher.table() if choice.op not in SAMPLING} == {"ascendc"}


def test_an_engine_with_references_forbidden_names_the_sampling_op_that_has_no_kernel():
    with pytest.raises(Unsupported, match="mask_logits"):
        Runner(loaded("ascend:twin", fallback="forbid"))


def test_without_rounding_every_log_probability_agrees_with_the_cpu():
    found = twin_runner(**EXACT).score(text())
    assert np.abs(found - Runner(loaded("cpu", **EXACT)).score(text())).max() <= 1e-4


def test_with_default_numerics_the_tokens_agree_wherever_the_choice_is_not_within_noise():
    expected, found = torch.from_numpy(Runner(loaded("cpu")).score(text())), whole()
    best = expected.topk(2).values
    sure = best[:, 0] - best[:, 1] > stored()["tau"]["fp8_32"]
    assert sure.sum() >= TOKENS // 3
    assert torch.equal(expected.argmax(-1)[sure], found.argmax(-1)[sure])
    assert (expected.exp() * (expected - found)).sum(-1).mean() <= 5e-3


def test_no_bit_depends_on_how_a_prompt_is_cut_into_steps():
    assert np.array_equal(whole().numpy(), twin_runner().score(text(), CHUNK))
