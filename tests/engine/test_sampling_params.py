"""Sampling parameters: vLLM's defaults, and one clear error for each way to get them wrong."""

import math

import msgspec
import pytest

from deepinfer.errors import RequestError
from deepinfer.sampling_params import SamplingParams

VOCAB = 100

WRONG = [
    ("n", 0),
    ("n", 1.0),
    ("n", True),
    ("n", 2000),
    ("temperature", -0.1),
    ("temperature", 1e-9),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", "hot"),
    ("top_p", 0.0),
    ("top_p", 1.5),
    ("top_p", math.nan),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", math.inf),
    ("logit_bias", [1]),
    ("logit_bias", {"1": 1.0}),
    ("logit_bias", {1: math.nan}),
    ("logit_bias", {1: math.inf}),
    ("logit_bias", {-1: 1.0}),
    ("stop", 5),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", ["a", 5]),
    ("stop", ["a"] * 100),
    ("stop", "a" * 2000),
    ("stop_token_ids", 5),
    ("stop_token_ids", [1.5]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", list(range(2000))),
    ("min_tokens", -1),
    ("min_tokens", 17),
    ("max_tokens", 0),
    ("max_tokens", 1.5),
    ("seed", 1 << 64),
    ("seed", 0.5),
    ("logprobs", -1),
    ("logprobs", 5000),
    ("prompt_logprobs", True),
    ("ignore_eos", 1),
    ("detokenize", None),
    ("skip_special_tokens", "yes"),
    ("include_stop_str_in_output", 0),
]


@pytest.mark.parametrize("name, value", WRONG, ids=[f"{n}={str(v)[:20]}" for n, v in WRONG])
def test_a_wrong_value_is_refused_by_name(name, value):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert name in str(caught.value)


def test_defaults_are_vllms():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.max_tokens) == (1, 1.0, 1.0, 16)
    assert (params.skip_special_tokens, params.detokenize, params.ignore_eos) == (True, True, False)
    assert params.logprobs is None and params.seed is None and params.stop_strings == ()


def test_edges_are_allowed():
    SamplingParams(temperature=0, top_k=-1, top_p=1, min_p=1, max_tokens=None, min_tokens=10_000, seed=(1 << 64) - 1)
    SamplingParams(seed=-1, logit_bias={3: -math.inf}, stop=("a", "b"), logprobs=0)


def test_a_stop_string_needs_text():
    with pytest.raises(RequestError, match="stop_token_ids"):
        SamplingParams(stop="a", detokenize=False)


@pytest.mark.parametrize(
    "settings", [{"stop_token_ids": [VOCAB]}, {"logit_bias": {VOCAB: 1.0}}, {"logprobs": VOCAB + 1}]
)
def test_ids_are_checked_against_the_vocabulary(settings):
    params = SamplingParams(**settings)
    with pytest.raises(RequestError, match=next(iter(settings))):
        params.validate(VOCAB)


def test_a_later_change_is_checked_again():
    params = SamplingParams()
    params.temperature = -1
    with pytest.raises(RequestError, match="temperature"):
        params.validate(VOCAB)


def test_unknown_names_and_json_are_handled():
    with pytest.raises(TypeError):
        SamplingParams(temprature=1)
    assert msgspec.json.decode(b'{"n": 2, "stop": "x"}', type=SamplingParams).stop_strings == ("x",)
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"n": "two"}', type=SamplingParams)
