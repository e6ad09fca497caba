"""Records the op calls of real model steps as a trace for the conformance suite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from deepinfer_hal.conformance.traces import Recorder

from deepinfer.config import EngineConfig
from deepinfer.engine.build import assemble
from deepinfer.runner.load import load
from deepinfer.runner.runner import Runner
from deepinfer.sampling_params import SamplingParams

PROMPT_TOKENS = (3, 40, 150)
"""Prompts below and above the window and the chunk size, so that chunks, rings and paged rows are all in the trace."""

NEW_TOKENS = 3
_SEED = 11
_MAX_LEN = 256


def record_steps(
    path: Path, model: str, backend: str, dtype: str = "auto", most_calls: int = 1, most_bytes: int = 8 << 20
) -> dict[str, Any]:
    """Runs three sequences together, prefill in chunks and then decode, and writes the trace.

    Returns its numbers of calls and ops, and the ops of calls that were too large. Raises the errors of loading.
    """
    config = EngineConfig.create(
        model=model, backend=backend, dtype=dtype, max_model_len=_MAX_LEN, max_num_seqs=len(PROMPT_TOKENS),
        max_num_batched_tokens=64, num_blocks=2 * len(PROMPT_TOKENS), overlap=False,
    )  # fmt: skip
    recorder = Recorder(most_calls, most_bytes)
    runner = Runner(load(config, observer=recorder))
    engine = assemble(config, runner, None, frozenset(), overlap=False)
    draw = np.random.default_rng(_SEED)
    for number, length in enumerate(PROMPT_TOKENS):
        ids = draw.integers(0, runner.vocab_size, length).tolist()
        penalties = {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.1} if number else {"temperature": 0.0}
        params = SamplingParams(max_tokens=NEW_TOKENS, seed=number, ignore_eos=True, detokenize=False, logprobs=2, **penalties)
        engine.add_request(str(number), ids, params)
    while engine.has_unfinished:
        engine.step()
    where = f"{runner.loaded.backend.name}:{runner.loaded.device_index}"
    recorder.save(path, {"model": str(model), "backend": where, "dtype": config.stream_dtype, "seed": _SEED})
    ops = {call["op"] for call in recorder.calls}
    return {"calls": len(recorder.calls), "ops": len(ops), "passed_over": dict(recorder.passed_over)}
