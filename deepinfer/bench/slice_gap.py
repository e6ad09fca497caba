"""What the host leaves of the device idle: decode steps by the engine's own loop, beside the same work replayed without it."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from deepinfer_hal.dispatch import Dispatcher

from deepinfer.bench.op_times import time_run
from deepinfer.bench.phases import Phases
from deepinfer.bench.slice_memory import LOOP_ROWS
from deepinfer.bench.slice_model import SliceModel
from deepinfer.bench.slice_steps import Settings, random_settings
from deepinfer.config import EngineConfig
from deepinfer.engine.build import assemble
from deepinfer.errors import DeepInferError
from deepinfer.runner.load import Loaded, Sizes
from deepinfer.runner.runner import Runner
from deepinfer.runner.sampler import SampledStep
from deepinfer.sampling_params import SamplingParams

PROMPT_TOKENS = 16
_SETTLE_STEPS = 8


def measure_gap(backend: Any, index: int, model: SliceModel, requests: int, steps: int, phases: Phases) -> dict[str, Any]:
    """Seconds a decode step of `requests` sequences by the engine's loop, with scheduling, sampling, settling and detokenising
    off; of that on the device; and the difference, which is the device's idle time where steps are captured.

    warm_up_bytes: of the device's memory, taken by warm-up: graphs with their pool, and workspaces of kernels. Sequences are
    short, so that the device's share is as small as it gets. device_seconds is None where steps are eager.
    """
    length = PROMPT_TOKENS + steps + 3 * _SETTLE_STEPS
    config = EngineConfig.create(
        model="slice", backend=f"{backend.name}:{index}", max_num_seqs=requests, max_model_len=length,
        max_num_batched_tokens=max(LOOP_ROWS, requests),
    )  # fmt: skip
    with phases("networks"):
        runner = _runner(backend, index, model, config, requests, length)
    free = backend.memory_info(index).free_bytes
    with phases("warm-up"):
        runner.warm_up()
    taken = free - backend.memory_info(index).free_bytes
    engine = assemble(config, runner, None, frozenset(), overlap=not runner.synchronous)
    draw = np.random.default_rng(requests)
    for number in range(requests):
        ids = draw.integers(0, model.text.vocab_size, PROMPT_TOKENS).tolist()
        params = SamplingParams(temperature=1.0, seed=number, max_tokens=length - PROMPT_TOKENS, ignore_eos=True)
        engine.add_request(str(number), ids, params)
    while any(len(one.output_ids) < _SETTLE_STEPS for request in engine.requests.values() for one in request.sequences):
        _check(engine.step())
    start = time.perf_counter()
    for _ in range(steps):
        _check(engine.step())
    seconds = (time.perf_counter() - start) / steps
    device = _device_seconds(backend, index, runner, requests)
    return {
        "requests": requests, "steps": steps, "overlap": engine.overlap, "step_seconds": seconds, "device_seconds": device,
        "gap_seconds": None if device is None else seconds - device,
        "idle_share": None if device is None else max(0.0, 1 - device / seconds),
        "graphs": 0 if runner.graphs is None else runner.graphs.count,
        "warm_up_bytes": taken,
        "graph_pool_bytes": 0 if runner.graphs is None else runner.graphs.pool_bytes,
    }  # fmt: skip


def _runner(backend: Any, index: int, model: SliceModel, config: EngineConfig, requests: int, length: int) -> Runner:
    sizes = Sizes(length, requests, model.state.num_blocks, max(LOOP_ROWS, requests))
    network = model.network(sizes.max_rows)
    loaded = Loaded(
        config, SimpleNamespace(config=model.config), backend, index, model.numerics, sizes, network.dispatcher, model.weights,
        model.state, network,
    )  # fmt: skip
    return Runner(loaded)


def _check(outputs: list[Any]) -> None:
    failed = [output.error for output in outputs if output.error]
    if failed:
        raise DeepInferError(f"the benchmark's generation failed: {failed[0]}")


def _device_seconds(backend: Any, index: int, runner: Runner, requests: int) -> float | None:
    """Of a captured step and its sampling, replayed without the host's work; None without graphs."""
    if runner.graphs is None or not runner.graphs.count:
        return None
    shape = min(one for one in runner.graphs.shapes if one.requests == requests)
    replayed = time_run(backend, index, runner.graphs.graph(shape).replay)
    dispatcher: Dispatcher = runner.loaded.dispatcher
    if any(dispatcher.choices[key].eager for key in (("nan_row_flags", ""), ("sample", "target"), ("advance_step", ""))):
        graphs = None
    else:
        graphs = runner.graphs.slot
    logits = runner.network.outputs.rows(requests).logits
    batch = Settings({name: runner.upload(value) for name, value in random_settings(requests).items()})
    slots = torch.full((requests,), -1, dtype=torch.int32, device=runner.device)

    def sample() -> None:
        step = SampledStep()
        runner.sampler(step, logits, batch, slots, slots, runner.state.history, list)
        runner.advance(step.tokens, slots, slots, runner.state.history)

    return replayed.median + time_run(backend, index, sample, graphs).median
