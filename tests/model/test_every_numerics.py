"""Every combination of settings runs through the engine's path with every call checked against its card."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from deepinfer.config import EngineConfig
from deepinfer.runner.debug import DebugSession
from deepinfer.runner.load import load
from deepinfer.runner.runner import Runner
from tests.oracle.fixtures import open_case

COMBINATIONS = list(itertools.product(("bfloat16", "float32"), ("fp8_32", "none"), ("auto", "float32")))


@pytest.mark.parametrize("only_reference", [False, True], ids=["kernels", "references"])
@pytest.mark.parametrize("dtype, act_quant, kv_cache_dtype", COMBINATIONS)
def test_calls_of_prompt_decode_and_draft_are_all_legal_and_results_are_numbers(dtype, act_quant, kv_cache_dtype, only_reference):
    case = open_case("tiny")
    ids = case.expected["input_ids"].numpy()[:50]
    config = EngineConfig.create(
        model=case.folder, backend="cpu", dtype=dtype, act_quant=act_quant, kv_cache_dtype=kv_cache_dtype, debug_checks=True,
        max_model_len=128, max_num_seqs=2, max_num_batched_tokens=64,
    )  # fmt: skip
    runner = Runner(load(config, with_draft=True, only_reference=only_reference))
    assert np.isfinite(runner.score(ids, 23)).all()
    session = DebugSession(runner)
    session.run(ids, 49)
    assert session.draft(len(ids) - 2, int(ids[-1])).base_logits.isfinite().all()
