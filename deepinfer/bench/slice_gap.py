"""What the host leaves of the device idle: decode steps by the engine's own loop, timed by marks on the device's stream.

A mark is recorded before a step's first copy and one behind its last. Where the host is ahead, the mark that opens a step is in
the stream before the step in front has ended, so no time lies between them; where it is late, the device idled for that long.
Inside a step the device may wait too, for kernels of sampling that are started one by one: what a step takes beyond the same
work replayed from graphs is counted as idle as well, though the copies of a step's inputs and results are part of it.
"""

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
    """Decode steps of `requests` sequences by the engine's loop, with scheduling, sampling, settling; detokenising is off.

    Seconds of a step: `host_seconds` by the host's clock; `step_seconds` from opening mark to opening mark (where the device has
    no marks, the host's); `between_seconds` from a step's closing mark to the next one's opening, `between_largest` the longest;
    `device_seconds` the step's work replayed from graphs, None where steps are eager. between_share, idle_share: of a step,
    between steps alone, and all that is not device_seconds. Sequences are short, so that the device's share is as small as it
    gets.
    """
    length = PROMPT_TOKENS + steps + 3 * _SETTLE_STEPS
    config = EngineConfig.create(
        model="slice", backend=f"{backend.name}:{index}", max_num_seqs=requests, max_model_len=length,
        max_num_batched_tokens=max(LOOP_ROWS, requests), max_prompt_graph_tokens=0,
    )  # fmt: skip
    with phases("networks"):
        runner = _runner(backend, index, model, config, requests, length)
    with phases("warm-up"):
        runner.warm_up()
    with phases("loop"):
        found = _run(backend, index, runner, config, requests, steps)
    with phases("samples"):
        device = _device_seconds(backend, index, runner, requests)
    seconds = found["step_seconds"]
    return {
        "requests": requests, "steps": steps, **found, "device_seconds": device,
        "gap_seconds": None if device is None else seconds - device,
        "idle_share": None if device is None else max(0.0, 1 - device / seconds),
        "graphs": 0 if runner.graphs is None else runner.graphs.count,
        "graph_pool_bytes": 0 if runner.graphs is None else runner.graphs.pool_bytes,
    }  # fmt: skip


def _run(backend: Any, index: int, runner: Runner, config: EngineConfig, requests: int, steps: int) -> dict[str, Any]:
    """The loop's own times: see `measure_gap`."""
    engine = assemble(config, runner, None, frozenset(), overlap=not runner.synchronous)
    marks: list[tuple[Any, Any]] = []
    launch = runner.launch

    def marked(plan: Any) -> SampledStep:
        opening = backend.mark(index)
        step = launch(plan)
        marks.append((opening, backend.mark(index)))
        return step

    runner.launch = marked
    draw = np.random.default_rng(requests)
    tokens = steps + 3 * _SETTLE_STEPS
    for number in range(requests):
        ids = draw.integers(0, engine.runner.vocab_size, PROMPT_TOKENS).tolist()
        engine.add_request(str(number), ids, SamplingParams(temperature=1.0, seed=number, max_tokens=tokens, ignore_eos=True))
    while any(len(one.output_ids) < _SETTLE_STEPS for request in engine.requests.values() for one in request.sequences):
        _check(engine.step())
    marks.clear()
    start = time.perf_counter()
    for _ in range(steps):
        _check(engine.step())
    host = (time.perf_counter() - start) / steps
    backend.synchronize(index)
    return {"overlap": engine.overlap, "host_seconds": host, **step_times(marks, host)}


def step_times(marks: list[tuple[Any, Any]], host_seconds: float) -> dict[str, Any]:
    """Times of steps from their (opening, closing) marks; without marks the host's time of a step, and nothing between."""
    if len(marks) < 2 or marks[0][0] is None:
        return {"step_seconds": host_seconds, "between_seconds": None, "between_largest": None, "between_share": None}
    step = marks[0][0].elapsed_time(marks[-1][0]) / 1e3 / (len(marks) - 1)
    between = [before[1].elapsed_time(after[0]) / 1e3 for before, after in zip(marks, marks[1:], strict=False)]
    mean = sum(between) / len(between)
    return {"step_seconds": step, "between_seconds": mean, "between_largest": max(between), "between_share": mean / step}


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
