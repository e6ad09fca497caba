"""Whether captured and eager steps give the same bits on a GPU: nano generates in both modes, tokens and log-probabilities are
compared exactly, and with the CPU backend's tokens if asked; once more for prompts of many lengths, in chunks of some sizes and
beside decoding sequences, whose steps are captured too. And whether a row of NaN in a captured step stays alone: nano
with one token that embeds as NaN, which one request is made to take.

    python tools/cuda/graph_bits.py [--backend cuda] [--with-cpu] [--json FILE]

The exit status is 1 if the modes differ, if no step was captured, or none with a prompt, if a request failed, or if the row of
NaN was not told or changed another request. One engine a process holds the device's memory; those here fit beside each other.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from deepinfer_hal.conformance.host import describe_host, describe_suite

from deepinfer import LLM, SamplingParams
from deepinfer.model_path import resolve_model

LENGTHS = (40, 9, 23, 40, 3, 17, 31)
"""Tokens of each sequence: batches shrink through several padded sizes."""

PROMPT_LENGTHS = (1, 6, 7, 8, 16, 31, 64, 65, 127, 128, 129, 140, 256, 300, 511, 700, 900)
"""Tokens of prompts: about the sizes that steps are padded to, the window's and a block's."""

CHUNKS = (40, 129, 1024)
"""Token rows of a step at most, of which prompts of PROMPT_LENGTHS are run."""

LONG_LENGTHS, LONG_CHUNK = (30, 5100, 4095, 900, 6000), 700
"""The same for prompts beyond the first limit of visible tokens, whose graphs have wider scores."""

_SEED = 5

POISONED = 1999
"""The token that embeds as NaN; no prompt here has it, and only the bad request is made to sample it."""

_NAN = b"\xc0\x7f"
"""A BF16 NaN."""


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts and settings, the same for all modes."""
    draw = np.random.default_rng(_SEED)
    prompts = [draw.integers(3, POISONED, 5 + 61 * number).tolist() for number in range(len(LENGTHS))]
    params = [
        SamplingParams(
            max_tokens=length, temperature=0.0 if number % 2 else 0.8, seed=number, ignore_eos=True, logprobs=5,
            logit_bias={POISONED: -100.0},
        )
        for number, length in enumerate(LENGTHS)
    ]  # fmt: skip
    return prompts, params


def told(outputs: list[Any]) -> list[Any]:
    """Tokens with every log-probability, as plain values. SystemExit if a request failed."""
    failed = [output.error for output in outputs if output.error]
    if failed:
        raise SystemExit(f"a request failed: {failed[0]}")
    choices = [output.outputs[0] for output in outputs]
    return [
        [list(one.token_ids), [sorted((token, found.logprob) for token, found in entry.items()) for entry in one.logprobs]]
        for one in choices
    ]


def generate(backend: str, **settings: Any) -> tuple[list[Any], LLM]:
    """(tokens with every log-probability asked for, as plain values; the LLM)."""
    llm = LLM("nano", backend=backend, max_model_len=1024, max_num_seqs=len(LENGTHS), **settings)
    return told(llm.generate(*requests(), use_tqdm=False)), llm


def poison(source: Path, target: Path) -> None:
    """Copies a checkpoint's folder with the embedding of one token made NaN. ValueError where no file has an embedding."""
    target.mkdir(parents=True)
    for file in source.iterdir():
        if file.is_file() and file.name != "SHA256SUMS":
            shutil.copy(file, target)
    for file in target.glob("*.safetensors"):
        with file.open("r+b") as shard:
            length = int.from_bytes(shard.read(8), "little")
            spec = json.loads(shard.read(length)).get("embed.weight")
            if spec is not None:
                row = 2 * spec["shape"][1]
                shard.seek(8 + length + spec["data_offsets"][0] + POISONED * row)
                shard.write(_NAN * (row // 2))
                return
    raise ValueError(f"{source} has no embed.weight")


def prompt_requests(lengths: tuple[int, ...]) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of many lengths, mixed, so that steps hold several of them beside decoding sequences."""
    draw = np.random.default_rng(_SEED)
    prompts = [draw.integers(3, POISONED, length).tolist() for length in draw.permutation(lengths).tolist()]
    params = [
        SamplingParams(max_tokens=3 + number % 7, temperature=0.9, seed=number, ignore_eos=True, logprobs=3)
        for number in range(len(prompts))
    ]
    return prompts, params


def compare_prompts(backend: str, chunk: int, lengths: tuple[int, ...] = PROMPT_LENGTHS, **settings: Any) -> dict[str, Any]:
    """Both modes for prompts of many lengths in steps of at most `chunk` rows, and how many steps were replayed."""
    sizes = {"max_model_len": max(lengths) + 124, "max_num_seqs": len(LENGTHS), "max_num_batched_tokens": chunk}
    told_by, replayed, steps = [], [], 0
    for eager in (False, True):
        llm = LLM("nano", backend=backend, enforce_eager=eager, **sizes, **settings)
        if not eager:
            replayed, steps = count_replays(llm), count_steps(llm)
        told_by.append(told(llm.generate(*prompt_requests(lengths), use_tqdm=False)))
    differ = [number for number, pair in enumerate(zip(*told_by, strict=True)) if pair[0] != pair[1]]
    return {
        "rows_of_a_step": chunk, "sequences": len(lengths), "steps": len(steps), "replays": len(replayed),
        "replays_with_prompts": sum(shape.prompts for shape, _ in replayed),
        "shapes_with_prompts": len({shape for shape, _ in replayed if shape.prompts}),
        "same_bits": not differ, "sequences_that_differ": differ,
    }  # fmt: skip


def count_replays(llm: LLM) -> list[tuple[Any, int]]:
    """A list that gets (shape, requests) of every step replayed from now on."""
    replayed: list[tuple[Any, int]] = []
    graphs = llm.engine.runner.graphs
    if graphs is not None:
        launch = graphs.launch

        def counted(shape: Any, meta: Any, rows: Any) -> Any:
            replayed.append((shape, meta.num_requests))
            return launch(shape, meta, rows)

        graphs.launch = counted
    return replayed


def count_steps(llm: LLM) -> list[int]:
    """A list that gets the token rows of every step from now on."""
    rows: list[int] = []
    runner = llm.engine.runner
    launch = runner.launch

    def counted(plan: Any) -> Any:
        rows.append(plan.num_tokens)
        return launch(plan)

    runner.launch = counted
    return rows


def bad_row(folder: Path, backend: str, **settings: Any) -> dict[str, Any]:
    """One request whose second step computes on NaN, among others: what became of it, and whether the others' tokens and
    log-probabilities, with it and after it in its slot and blocks, are those without it. folder: a poisoned checkpoint."""
    llm = LLM(str(folder), backend=backend, max_model_len=1024, max_num_seqs=len(LENGTHS) + 1, **settings)
    prompts, params = requests()
    without = told(llm.generate(prompts, params, use_tqdm=False))
    replayed = count_replays(llm)
    bad = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True, logit_bias={POISONED: 100.0})
    *others, failed = llm.generate([*prompts, [5, 6, 7]], [*params, bad], use_tqdm=False)
    after = told(llm.generate(prompts, params, use_tqdm=False))
    ended = failed.outputs[0]
    return {
        "error": failed.error or "", "tokens": list(ended.token_ids), "finish_reason": ended.finish_reason,
        "others_unchanged": told(others) == without, "unchanged_after_it": after == without,
        "replays_with_it": sum(count == len(LENGTHS) + 1 for _, count in replayed),
    }  # fmt: skip


def stayed_alone(found: dict[str, Any]) -> bool:
    """Whether the bad request ended with its error, after its first token, and no other changed."""
    ended = "NaN" in found["error"] and found["finish_reason"] == "error" and found["tokens"] == [POISONED]
    return ended and found["others_unchanged"] and found["unchanged_after_it"]


def compare(backend: str, with_cpu: bool) -> dict[str, Any]:
    """Both modes and what they say of each other."""
    captured, llm = generate(backend)
    runner = llm.engine.runner
    graphs = runner.graphs
    result = {
        "backend": backend, "build": dict(runner.loaded.backend.describe_build()), "suite": describe_suite(),
        "host": describe_host(),
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
    result["prompts"] = [compare_prompts(arguments.backend, chunk) for chunk in CHUNKS]
    result["prompts"].append(compare_prompts(arguments.backend, LONG_CHUNK, LONG_LENGTHS))
    with tempfile.TemporaryDirectory() as folder:
        poison(resolve_model("nano"), Path(folder) / "nano")
        result["bad_row"] = bad_row(Path(folder) / "nano", arguments.backend)
    print(json.dumps({key: value for key, value in result.items() if key != "kernels"}, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps({"command": " ".join(sys.argv), **result}, indent=1) + "\n", encoding="utf-8")
    alone = stayed_alone(result["bad_row"]) and result["bad_row"]["replays_with_it"] > 0
    same = all(one["same_bits"] and one["replays_with_prompts"] for one in result["prompts"])
    return 0 if result["same_bits"] and result["graphs"] and same and alone else 1


if __name__ == "__main__":
    sys.exit(main())
