"""What benchmarks generate from: prompts of an exact length, cut from text that every Python installation has."""

from __future__ import annotations

import argparse
import inspect
import json.decoder
import textwrap
from typing import Any

import numpy as np

from deepinfer.sampling_params import SamplingParams

_SEED = 17


def prompt_ids(tokenizer: Any, vocab_size: int, count: int, length: int) -> list[list[int]]:
    """`count` prompts of `length` ids: consecutive pieces of standard library sources, or random ids without a tokenizer."""
    if tokenizer is None:
        return np.random.default_rng(_SEED).integers(0, vocab_size, (count, length)).tolist()
    text = "\n".join(inspect.getsource(module) for module in (argparse, textwrap, json.decoder))
    ids = tokenizer.encode(text, add_bos=False)
    repeated = np.resize(np.asarray(ids), count * length)
    return repeated.reshape(count, length).tolist()


def sampling_params(output_len: int, seed: int) -> SamplingParams:
    """Exactly `output_len` sampled tokens at temperature 1."""
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=output_len, ignore_eos=True, detokenize=False)
