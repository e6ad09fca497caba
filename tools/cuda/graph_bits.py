"""Whether captured and eager decode steps give the same bits on a GPU: nano generates in both modes, tokens and log-probabilities
are compared exactly, and with the CPU backend's tokens if asked.

    python tools/cuda/graph_bits.py [--backend cuda] [--with-cpu] [--json FILE]

The exit status is 1 if the modes differ, if no step was captured, or if a request failed. One engine a process holds the device's
memory; both modes here fit beside each other.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer import LLM, SamplingParams

LENGTHS = (40, 9, 23, 40, 3, 17, 31)
"""Tokens of each sequence: batches shrink through several padded sizes."""

_SEED = 5


def generate(backend: str, **settings: Any) -> tuple[list[Any], LLM]:
    """(tokens with every log-probability asked for, as plain values; the LLM)."""
    llm = LLM("nano", backend=backend, max_model_len=1024, max_num_seqs=len(LENGTHS), **settings)
    draw = np.random.default_rng(_SEED)
    prompts = [draw.integers(3, 2000, 5 + 61 * number).tolist() for number in range(len(LENGTHS))]
    params = [
        SamplingParams(max_tokens=length, temperature=0.0 if number % 2 else 0.8, seed=number, ignore_eos=True, logprobs=5)
        for number, length in enumerate(LENGTHS)
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    failed = [output.error for output in outputs if output.error]
    if failed:
        raise SystemExit(f"a request failed: {failed[0]}")
    choices = [output.outputs[0] for output in outputs]
    told = [
        [list(one.token_ids), [sorted((token, found.logprob) for token, found in entry.items()) for entry in one.logprobs]]
        for one in choices
    ]
    return told, llm


def compare(backend: str, with_cpu: bool) -> dict[str, Any]:
    """Both modes and what they say of each other."""
    captured, llm = generate(backend)
    runner = llm.engine.runner
    graphs = runner.graphs
    result = {
        "backend": backend, "build": dict(runner.loaded.backend.describe_build()),
        "kernels": [str(choice) for choice in runner.loaded.dispatcher.table()],
        "graphs": 0 if graphs is None else graphs.count,
        "why_eager": "the backend captures no graphs" if graphs is None else graphs.reason,
        "pool_bytes": 0 if graphs is None else graphs.pool_bytes,
    }  # fmt: skip
    eager, _ = generate(backend, enforce_eager=True)
    differ = [number for number, pair in enumerate(zip(captured, eager, strict=True)) if pair[0] != pair[1]]
    result |= {
        "sequences": len(captured), "tokens": sum(len(tokens) for tokens, _ in captured), "same_bits": not differ,
        "sequences_that_differ": differ,
    }  # fmt: skip
    if with_cpu:
        cpu, _ = generate("cpu")
        result["sequences_with_the_cpus_tokens"] = sum(a[0] == b[0] for a, b in zip(captured, cpu, strict=True))
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--with-cpu", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    result = compare(arguments.backend, arguments.with_cpu)
    print(json.dumps({key: value for key, value in result.items() if key != "kernels"}, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps({"command": " ".join(sys.argv), **result}, indent=1) + "\n", encoding="utf-8")
    return 0 if result["same_bits"] and result["graphs"] else 1


if __name__ == "__main__":
    sys.exit(main())
