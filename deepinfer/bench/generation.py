"""Real generation, timed step by step through the engine, beside the floor of the same steps."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

from deepinfer_hal.ceilings import Ceilings, measure_ceilings, spread

from deepinfer.bench.floor import FloorTracer, OpTotal, step_floor_seconds
from deepinfer.bench.memory import describe_memory, peak_rss_bytes
from deepinfer.bench.workload import prompt_ids, sampling_params
from deepinfer.config import EngineConfig
from deepinfer.engine.build import assemble
from deepinfer.engine.loop import EngineCore
from deepinfer.errors import DeepInferError
from deepinfer.runner.load import load
from deepinfer.runner.runner import Runner
from deepinfer.tokenizer import Tokenizer


@dataclass(frozen=True)
class Workload:
    """num_prompts prompts of input_len tokens, output_len tokens generated for each."""

    num_prompts: int
    input_len: int
    output_len: int


@dataclass(frozen=True)
class Step:
    """One step: wall seconds of plan, launch and settle together, token rows, and whether every row is a decode."""

    seconds: float
    rows: int
    decode: bool


class _WatchedRunner:
    """Passes everything on and remembers the shape of the last launched step."""

    def __init__(self, runner: Runner) -> None:
        self.runner, self.rows, self.decode = runner, 0, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def launch(self, plan: Any) -> Any:
        self.rows, self.decode = plan.num_tokens, plan.num_tokens == len(plan.sampled)
        return self.runner.launch(plan)


def open_engine(config: EngineConfig, tracer: FloorTracer | None = None) -> EngineCore:
    """An engine whose runner is watched, with every op call traced if a tracer is given."""
    runner = Runner(load(config, observer=tracer))
    folder = runner.loaded.checkpoint.folder
    tokenizer = Tokenizer.from_folder(folder) if (folder / "tokenizer.json").is_file() else None
    return assemble(config, _WatchedRunner(runner), tokenizer, frozenset(), overlap=bool(config.overlap))


def run_once(engine: EngineCore, workload: Workload, tracer: FloorTracer | None = None) -> list[Step]:
    """Generates the whole workload and returns its steps. DeepInferError if a request fails."""
    prompts = prompt_ids(engine.tokenizer, engine.runner.vocab_size, workload.num_prompts, workload.input_len)
    for number, ids in enumerate(prompts):
        engine.add_request(str(number), ids, sampling_params(workload.output_len, number))
    steps = []
    while engine.has_unfinished:
        start = time.perf_counter()
        outputs = engine.step()
        steps.append(Step(time.perf_counter() - start, engine.runner.rows, engine.runner.decode))
        if tracer is not None:
            tracer.end_step()
        failed = [output.error for output in outputs if output.error]
        if failed:
            raise DeepInferError(f"the benchmark's generation failed: {failed[0]}")
    return steps


def measure(config: EngineConfig, workload: Workload, repeats: int, warmup: int) -> dict[str, Any]:
    """Results of `repeats` timed runs after `warmup` others, then a traced one for the floors, as values for a report."""
    rss_before = peak_rss_bytes()
    engine = open_engine(config)
    for _ in range(warmup):
        run_once(engine, workload)
    runs = [run_once(engine, workload) for _ in range(repeats)]
    loaded = engine.runner.loaded
    memory = describe_memory(loaded, rss_before)
    ceilings = measure_ceilings(loaded.backend, loaded.device_index, memory["tracked"]["weights"])
    tracer = FloorTracer()
    run_once(open_engine(config, tracer), workload, tracer)
    floors = [step_floor_seconds(calls, ceilings) for calls in tracer.steps]
    return {
        "workload": vars(workload),
        "repeats": repeats,
        "device": f"{loaded.backend.name}:{loaded.device_index}",
        "ceilings": vars(ceilings),
        "memory": memory,
        "output_tokens_per_second": spread([_tokens_per_second(run, workload) for run in runs]),
        "first_token_ms": spread([1e3 * _prefill_seconds(run) for run in runs]),
        "decode_step": _describe_steps(runs, floors, decode=True),
        "prefill_step": _describe_steps(runs, floors, decode=False),
        "ops": _describe_ops(tracer.ops, ceilings),
        "kernels": [vars(choice) for choice in loaded.dispatcher.table()],
        "reference_fallbacks": dict(loaded.dispatcher.fallbacks),
    }


def _tokens_per_second(run: list[Step], workload: Workload) -> float:
    return workload.num_prompts * workload.output_len / sum(step.seconds for step in run)


def _prefill_seconds(run: list[Step]) -> float:
    """Until the first step that only decodes: the first token of the last prompt is there."""
    seconds = 0.0
    for step in run:
        if step.decode and step.rows:
            break
        seconds += step.seconds
    return seconds


def _describe_steps(runs: list[list[Step]], floors: list[float], decode: bool) -> dict[str, Any] | None:
    """Median step of each run, spread over the runs, beside the median floor of the same steps; None without such steps."""
    chosen = [index for index, step in enumerate(runs[0]) if step.decode == decode]
    if not chosen or any(len(run) != len(floors) for run in runs):
        return None
    medians = [1e3 * statistics.median(run[index].seconds for index in chosen) for run in runs]
    floor = 1e3 * statistics.median(floors[index] for index in chosen)
    return {
        "steps": len(chosen),
        "rows": statistics.median(runs[0][index].rows for index in chosen),
        "ms": spread(medians),
        "floor_ms": floor,
        "times_floor": statistics.median(medians) / floor if floor else None,
    }


def _describe_ops(ops: dict[str, OpTotal], ceilings: Ceilings) -> list[dict[str, Any]]:
    """Every op, most expensive first: its traced time beside its floor, over the whole workload."""
    rows = [
        {
            "op": name,
            "calls": total.calls,
            "traced_ms": 1e3 * total.seconds,
            "floor_ms": 1e3 * ceilings.seconds(total.nbytes, total.flops),
            "bytes": total.nbytes,
            "flops": total.flops,
        }
        for name, total in ops.items()
    ]
    return sorted(rows, key=lambda row: -row["traced_ms"])
