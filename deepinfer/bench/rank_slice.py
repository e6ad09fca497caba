"""One rank's slice of a model, measured: decode, verify, draft and prefill steps, their parts and ops, and the host's gap.

What is measured: the engine's own network, sampler and step loop over the kernels that a backend binds, on random weights and
caches of the model's shapes. What is not: other ranks. A rank's experts see as many rows as balanced routing over all ranks would
bring them; the exchange itself takes no time here.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from deepinfer_hal.ceilings import Ceilings, measure_ceilings
from deepinfer_hal.conformance.host import describe_suite
from deepinfer_hal.dispatch import Choice

from deepinfer.bench.extrapolate import DRAFTS, extrapolate, missing_kinds, whole_model_ops
from deepinfer.bench.op_times import DRAFT, Timing, time_run
from deepinfer.bench.phases import Phases, describe
from deepinfer.bench.slice_config import Slice, kind_counts, replayed_kind_counts
from deepinfer.bench.slice_gap import measure_gap
from deepinfer.bench.slice_memory import check_memory, decode_rows
from deepinfer.bench.slice_model import SliceModel
from deepinfer.bench.slice_steps import BoundNetwork, StepBench
from deepinfer.bench.slice_workload import Workload
from deepinfer.config import DEFAULT_PROMPT_GRAPH_TOKENS
from deepinfer.runner.graphs import DRAFT_ONLY, eager_reason

_CEILING_BYTES = 256 << 20


Say = Callable[[str], None]


def measure(backend: Any, index: int, cut: Slice, load: Workload, say: Say = lambda line: None) -> dict[str, Any]:
    """All steps of the workload as plain values for a report; `say` hears each as it comes. A step that fails is an entry with
    its error, and the others go on; after a KeyboardInterrupt there are no others."""
    started = time.monotonic()
    memory = check_memory(cut, load, backend, index)
    free = backend.memory_info(index).free_bytes
    phases = Phases(lambda: backend.synchronize(index))
    with phases("ceilings"):
        ceilings = measure_ceilings(backend, index, _CEILING_BYTES)
    say(describe_ceilings(ceilings))
    model = SliceModel(backend, index, cut, max(load.requests, default=1), load.longest, phases)
    begun = phases.take()
    say(f"made: {describe(begun)}")
    bench = _Bench(backend, index, model, ceilings, say, started + load.seconds if load.seconds else math.inf, phases)
    most = decode_rows(model.text, load)
    steps = []
    for requests in load.requests:
        for tokens in (1, 1 + DRAFTS) if requests in load.verify else (1,):
            kind = "decode" if tokens == 1 else "verify"
            what = {"kind": kind, "requests": requests, "tokens": tokens}
            steps.append(bench.step(what, load.context - tokens, tokens, most, load.lists_ops(kind, requests)))
    bench.bind(0)
    gaps = [bench.gap(requests, load.gap_steps) for requests in load.loops]
    for tokens in load.prefill:
        steps.append(bench.step({"kind": "prefill", "requests": 1, "tokens": tokens}, 0, 1, tokens, tokens in load.ops_at))
    bench.bind(0)
    with phases("ceilings"):
        bench.measure_ceilings_again()
    for name, value in phases.take().items():
        begun[name] = begun.get(name, 0.0) + value
    result = {
        "device": f"{backend.name}:{index}",
        "device_name": next((one.name for one in backend.probe() if one.index == index), ""),
        "build": dict(backend.describe_build()),
        "suite": describe_suite(),
        "ranks": cut.ranks,
        "layers": list(cut.layers),
        "kinds": cut.kinds,
        "model_kinds": kind_counts(cut.model),
        "replayed_kinds": replayed_kind_counts(cut.model),
        "model_engram_layers": len(cut.model.text.engram_layer_ids),
        "experts": cut.config.text.n_routed_experts,
        "draft_experts": cut.config.text.dspark_n_routed_experts,
        "context": load.context,
        "ceilings": asdict(bench.ceilings),
        "memory": {**asdict(memory), "total": memory.total, "free": free},
        "phases": begun,
        "steps": steps,
        "gaps": gaps,
        "kernels": bench.kernels,
        "reference_fallbacks": dict(bench.fallbacks),
    }
    text = cut.model.text
    for step in steps:
        if "ops" in step:
            for op in step["ops"]:
                op["floor_seconds"] = bench.ceilings.seconds(op["bytes"], op["flops"], op["dtype"])
            step["ops"] = whole_model_ops(result, step)
    return {
        **result, "missing_kinds": missing_kinds(result),
        "whole_model": extrapolate(result, text.hidden_size, text.n_routed_experts),
    }  # fmt: skip


def describe_ceilings(ceilings: Ceilings) -> str:
    """One line for people."""
    products = ", ".join(f"{name} {value / 1e12:.3g} TFLOP/s" for name, value in ceilings.gemm_flops.items())
    return f"copy {ceilings.bandwidth / 1e12:.3g} TB/s; products: {products}"


class _Bench:
    """What the steps of one slice share."""

    def __init__(
        self, backend: Any, index: int, model: SliceModel, ceilings: Ceilings, say: Say, deadline: float, phases: Phases
    ) -> None:
        self.deadline, self.phases, self.interrupted = deadline, phases, False
        self.backend, self.index, self.model, self.ceilings, self.say = backend, index, model, ceilings, say
        self.bound: BoundNetwork | None = None
        self.choices: dict[tuple[str, str, str], Choice] = {}
        self.fallbacks: Counter[str] = Counter()
        has_graphs = backend.capabilities(index).graphs
        self.graphs = backend.graphs(index) if has_graphs else None

    def bind(self, max_rows: int) -> None:
        """Makes the network of the steps to come, in place of the last one, whose buffers are freed; of 0 rows: none."""
        if self.bound is not None and self.bound.network.buffers.max_rows == max_rows:
            return
        self.bound = None
        with self.phases("networks"):
            self.bound = BoundNetwork(self.model, max_rows) if max_rows else None

    def step(self, what: dict[str, Any], before: int, logits_each: int, rows: int, with_ops: bool) -> dict[str, Any]:
        """One step whole, in parts and, if asked, by op, on a network of `rows` rows. Never raises for what a kernel does."""
        if reason := self._not_run():
            return {**what, "error": reason}
        try:
            self.bind(rows)
            return self._told(self._step(what, before, logits_each, with_ops))
        except KeyboardInterrupt:
            self.interrupted = True
            return {**what, "error": "interrupted"}
        except Exception as error:  # a benchmark of many sizes outlives one that cannot be run
            self.say(f"{what}: {type(error).__name__}: {error}")
            return {**what, "error": f"{type(error).__name__}: {error}"}
        finally:
            self._note_kernels()

    def _note_kernels(self) -> None:
        """Adds what the network's ops are served by, after all parts of a step: only then is all of it decided. Networks of
        several sizes may be served differently."""
        if self.bound is not None:
            dispatcher = self.bound.dispatcher
            for choice in dispatcher.decided():
                self.choices.setdefault((choice.op, choice.role, choice.symbol), choice)
            self.fallbacks |= dispatcher.fallbacks

    @property
    def kernels(self) -> list[dict[str, Any]]:
        """Every distinct choice of the steps so far, by op, role and symbol."""
        return [vars(self.choices[key]) for key in sorted(self.choices)]

    def _not_run(self) -> str:
        """Why nothing more is measured; empty where the benchmark goes on."""
        if self.interrupted:
            return "not run: the benchmark was interrupted"
        return "not run: the time given to the benchmark was spent" if time.monotonic() > self.deadline else ""

    def measure_ceilings_again(self) -> None:
        """Keeps the higher of each ceiling, or the first ones where a step has left the device unusable."""
        try:
            self.ceilings = self.ceilings.best(measure_ceilings(self.backend, self.index, _CEILING_BYTES))
        except Exception as error:  # as in `step`
            self.say(f"ceilings, a second time: {type(error).__name__}: {error}")

    def gap(self, requests: int, steps: int) -> dict[str, Any]:
        """The engine's own loop at a request count; an entry with its error if it fails."""
        if reason := self._not_run():
            return {"requests": requests, "error": reason}
        try:
            found = self._told(measure_gap(self.backend, self.index, self.model, requests, steps, self.phases))
        except KeyboardInterrupt:
            self.interrupted, found = True, {"requests": requests, "error": "interrupted"}
        except Exception as error:  # as in `step`
            found = {"requests": requests, "error": f"{type(error).__name__}: {error}"}
        self.say(f"engine loop: {found}")
        return found

    def _told(self, found: dict[str, Any]) -> dict[str, Any]:
        """The result with the seconds that it took, by phase."""
        found["phases"] = self.phases.take()
        self.say(f"  {describe(found['phases'])}")
        return found

    def _step(self, what: dict[str, Any], before: int, logits_each: int, with_ops: bool) -> dict[str, Any]:
        logits_each = min(logits_each, what["tokens"])
        with self.phases("first calls"):
            step = StepBench(self.model, self.bound, what["requests"], what["tokens"], before, logits_each)
            step.whole()  # what serves a call may be known only when it is made
        reason = eager_reason(step.dispatcher, step.outside | DRAFT_ONLY)
        if what["kind"] == "prefill" and what["tokens"] > DEFAULT_PROMPT_GRAPH_TOKENS:
            reason = f"the engine captures steps with prompts up to {DEFAULT_PROMPT_GRAPH_TOKENS} rows"
        if self.graphs is None:
            reason = "the backend captures no graphs"
        graphs = self.graphs if reason is None else None
        whole = self._time(step.whole, graphs)
        found: dict[str, Any] = {**what, "eager_because": "" if graphs else reason, "whole": asdict(whole)}
        self.say(f"{what}: {1e3 * whole.median:.3f} ms" + ("" if graphs else f" (eager: {reason})"))
        parts = {name: run for name, run in step.parts().items() if name != DRAFT or what["kind"] == "verify"}
        found["parts"] = {name: asdict(self._time(run, graphs)) for name, run in parts.items() if name != DRAFT}
        if DRAFT in parts:
            with self.phases("first calls"):
                parts[DRAFT]()
            captured = graphs if eager_reason(step.dispatcher, step.outside) is None else None
            found["parts"][DRAFT] = asdict(self._time(parts[DRAFT], captured))
        found["finite"] = step.finite()
        if with_ops:
            found["ops"] = self._ops(step, parts)
        return found

    def _time(self, run: Callable[[], None], graphs: Any) -> Timing:
        return time_run(self.backend, self.index, run, graphs, self.phases)

    def _ops(self, step: StepBench, parts: dict[str, Callable[[], None]]) -> list[dict[str, Any]]:
        """Time, bytes and FLOPs of every op, most expensive first; `parts`: in which part of the step each call was made.

        Layers share their buffers, and rows that one selects may not exist in another's cache: so an op is timed right after
        the last part that calls it, while the buffers hold what it read there.
        """
        recorder = step.recorder
        recorder.found.clear()
        step.dispatcher.observer = recorder
        with self.phases("recording ops"):
            for recorder.part, run in parts.items():
                run()
        step.dispatcher.observer = None
        eager = {op for choice in step.dispatcher.table() for op in choice.eager}
        rows = []
        for part, run in parts.items():
            with self.phases("recording ops"):
                run()
            for group in recorder.found.values():
                if group.parts[-1] == part:
                    timing = self._time(group.run, None if group.op in eager else self.graphs)
                    rows.append({
                        "op": group.op, "role": group.role, "calls": len(group.calls), "parts": group.parts,
                        "seconds": timing.median, "graph": timing.graph, "bytes": group.nbytes, "flops": group.flops,
                        "dtype": group.dtype,
                    })  # fmt: skip
        recorder.found.clear()
        return sorted(rows, key=lambda row: -row["seconds"])
