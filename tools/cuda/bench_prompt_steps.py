"""Steps with prompts in them, captured and eager, on a slice of the released model: the time from a request to its first token,
a step of a prompt beside decoding sequences, what a padded replay takes of the device beside a graph of just the step's rows,
and what capturing takes at warm-up.

    python tools/cuda/bench_prompt_steps.py [--backend cuda] [--layers 6] [--tokens 32,128,512,1024] [--json FILE]

First tokens of both ways must be equal bit by bit, with their log-probabilities; the exit status is 1 if they are not.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from deepinfer_hal.conformance.host import describe_host, describe_suite
from deepinfer_hal.errors import BackendUnavailable
from deepinfer_hal.registry import open_backend

from deepinfer.bench.op_times import time_run
from deepinfer.bench.slice_config import make_slice
from deepinfer.bench.slice_model import SliceModel
from deepinfer.bench.v41 import released_config
from deepinfer.config import EngineConfig, ModelConfig
from deepinfer.engine.build import assemble
from deepinfer.model.state import BLOCK_TOKENS
from deepinfer.runner.load import Loaded, Sizes
from deepinfer.runner.runner import Runner
from deepinfer.sampling_params import SamplingParams

SEQUENCES, CONTEXT, ROWS, RANKS, MOST_ROWS = 64, 8192, 2048, 64, 1024
DECODING = 32
"""Sequences that decode beside a prompt."""

ROUNDS = 7


def make_runner(backend: Any, index: int, model: SliceModel, network: Any, most: int) -> tuple[Runner, dict[str, Any]]:
    """An engine's runner over the slice with its graphs, and what warming it up took."""
    config = EngineConfig.create(
        model="slice", backend=f"{backend.name}:{index}", max_num_seqs=SEQUENCES, max_model_len=CONTEXT,
        max_num_batched_tokens=ROWS, max_prompt_graph_tokens=most,
    )  # fmt: skip
    loaded = Loaded(
        config, SimpleNamespace(config=model.config), backend, index, model.numerics,
        Sizes(CONTEXT, SEQUENCES, model.state.num_blocks, ROWS), network.dispatcher, model.weights, model.state, network,
    )  # fmt: skip
    runner = Runner(loaded)
    pool, free, start = backend.graphs(index).pool_bytes, free_bytes(backend, index), time.perf_counter()
    runner.warm_up()
    backend.synchronize(index)
    found = {"max_prompt_graph_tokens": most, "graphs": runner.graphs.count, "seconds": time.perf_counter() - start}
    found |= {"pool_bytes": runner.graphs.pool_bytes - pool, "device_bytes": free - free_bytes(backend, index)}
    return runner, found | {"why_eager": runner.graphs.reason}


def free_bytes(backend: Any, index: int) -> int:
    """Of the device, without what was given back to torch alone."""
    gc.collect()
    torch.cuda.empty_cache()
    return backend.memory_info(index).free_bytes


class Engines:
    """Both ways over one runner, so that only the graphs differ."""

    def __init__(self, runner: Runner) -> None:
        self.runner, self.graphs, self.number = runner, runner.graphs, 0
        self.replays: list[Any] = []
        launch = self.graphs.launch

        def counted(shape: Any, *rest: Any) -> Any:
            self.replays.append(shape)
            return launch(shape, *rest)

        self.graphs.launch = counted

    def first_token(self, captured: bool, tokens: int, decoding: int, seed: int) -> tuple[float, Any, Any]:
        """Seconds of the step that has a new prompt, with its planning and settling; the prompt's first token with
        log-probabilities; the shape replayed, or None. Beside it `decoding` sequences of some 300 tokens decode."""
        self.runner.graphs = self.graphs if captured else None
        engine = assemble(self.runner.loaded.config, self.runner, None, frozenset(), overlap=False)
        draw = np.random.default_rng(seed)
        settings = dict(temperature=0.0, ignore_eos=True, logprobs=5)
        for number in range(decoding):
            context = draw.integers(0, 1000, 200 + 7 * number).tolist()
            engine.add_request(str(number), context, SamplingParams(max_tokens=64, **settings))
        while any(not one.output_ids for request in engine.requests.values() for one in request.sequences):
            engine.step()
        ids = draw.integers(0, 1000, tokens).tolist()
        self.replays.clear()
        start = time.perf_counter()
        engine.add_request("prompt", ids, SamplingParams(max_tokens=1, **settings))
        outputs = engine.step()
        seconds = time.perf_counter() - start
        one = next(output for output in outputs if output.request_id == "prompt").outputs[0]
        told = [list(one.token_ids), [sorted((token, found.logprob) for token, found in entry.items()) for entry in one.logprobs]]
        for number in range(decoding):
            engine.abort(str(number))
        return seconds, told, self.replays[-1] if self.replays else None


def compare(engines: Engines, tokens: int, decoding: int) -> dict[str, Any]:
    """Medians of both ways, in turn."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    told: dict[bool, list[Any]] = {False: [], True: []}
    shape = None
    for round_number in range(ROUNDS):
        for captured in (False, True):
            one, answer, shape = engines.first_token(captured, tokens, decoding, round_number)
            seconds[captured].append(one)
            told[captured].append(answer)
    return {
        "tokens": tokens, "decoding": decoding, "eager_ms": 1e3 * statistics.median(seconds[False][1:]),
        "captured_ms": 1e3 * statistics.median(seconds[True][1:]), "shape": str(shape), "same_bits": told[False] == told[True],
    }  # fmt: skip


def device_times(backend: Any, index: int, runner: Runner, tokens: int) -> dict[str, Any]:
    """Milliseconds of the device for one prompt of so many tokens: a graph of just these rows, and every captured shape of the
    fewest rows that hold them."""
    layout = runner.state.layout
    arrays = (np.array([0, tokens], np.int32), np.zeros(1, np.int32), np.zeros(1, np.int32))
    table = np.arange(-(-tokens // BLOCK_TOKENS), dtype=np.int32)[None]
    runner.write_tokens(0, 0, np.arange(tokens, dtype=np.int32) % 1000)
    host = runner.plan_host(*arrays, table, flat=tokens > layout.longest_ring_step)
    meta = runner.to_device(host)
    exact = time_run(backend, index, lambda: runner.network.forward(meta), runner.graphs.slot)
    rows = min(shape.rows for shape in runner.graphs.shapes if shape.prompts and shape.rows >= tokens)
    found = {"tokens": tokens, "exact_ms": 1e3 * exact.median}
    flat = runner.plan_host(*arrays, table, flat=True)
    for shape in runner.graphs.shapes:
        if shape.prompts and shape.rows == rows:
            runner.graphs.launch(shape, flat, np.zeros(0, np.int32))
            replayed = time_run(backend, index, runner.graphs.graph(shape).replay)
            found[f"{shape.rows} rows, {shape.requests} requests, {shape.tokens} tokens"] = 1e3 * replayed.median
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--tokens", default="32,128,512,1024")
    parser.add_argument("--model", help="folder or name of another model's config.json")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    try:
        backend, index = open_backend(arguments.backend)
    except BackendUnavailable as error:
        parser.exit(1, f"error: {error}\n")
    config = ModelConfig.from_dict(released_config())
    if arguments.model:
        from deepinfer.model_path import resolve_model

        config = ModelConfig.from_folder(resolve_model(arguments.model))
    cut = make_slice(config, arguments.layers, min(RANKS, config.text.n_routed_experts))
    start = time.perf_counter()
    model = SliceModel(backend, index, cut, SEQUENCES, CONTEXT)
    network = model.network(ROWS)
    result: dict[str, Any] = {
        "build": dict(backend.describe_build()), "suite": describe_suite(), "host": describe_host(), "ranks": cut.ranks,
        "layers": list(cut.layers), "kinds": list(cut.kinds),
        "made_seconds": time.perf_counter() - start, "warm_up": [],
    }  # fmt: skip
    runner = None
    for most in (0, 0, MOST_ROWS, 0, MOST_ROWS):  # the first compiles
        del runner
        runner, found = make_runner(backend, index, model, network, most)
        result["warm_up"].append(found)
        print(found, flush=True)
    engines = Engines(runner)
    sizes = [int(one) for one in arguments.tokens.split(",")]
    result["steps"] = []
    for decoding in (0, DECODING):
        for tokens in sizes:
            found = compare(engines, min(tokens, MOST_ROWS - decoding), decoding)
            result["steps"].append(found)
            print(found, flush=True)
    result["device"] = []
    for tokens in (*sizes, 300):
        result["device"].append(device_times(backend, index, runner, tokens))
        print(result["device"][-1], flush=True)
    result["kernels"] = [vars(choice) for choice in network.dispatcher.table()]
    if arguments.json:
        arguments.json.write_text(json.dumps({"command": " ".join(sys.argv), **result}, indent=1) + "\n", encoding="utf-8")
    return 0 if all(one["same_bits"] for one in result["steps"]) else 1


if __name__ == "__main__":
    sys.exit(main())
