"""What each op of a step takes: its calls recorded once, then timed alone, those of one op and weight role in turn.

The calls of one op in all layers of a slice have weights of their own, so going round through them reads memory and not a
cache; what else an op reads may lie in a cache as far as it fits. Composites that run from their parts are taken apart. The
draft block has other rows and experts than the layers, so its calls are timed apart from theirs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from deepinfer_hal.weights import WeightHandle

from deepinfer.bench.phases import Phases

SAMPLES = 5
SAMPLE_SECONDS = 4e-3
FEWEST_RUNS, _SHORT_RUN = 4, 1e-2
"""A sample's runs at least where one is shorter than that: the first one's way to the device would count."""

_FEWEST_SAMPLES, _CLOSE = 3, 0.005
"""So few samples do where they lie within this share of their median."""

_RUN_SECONDS = 0.5
DRAFT = "draft"
"""The part of a step that is the draft block."""

_FLOAT8_OPS = frozenset({"linear", "grouped_linear", "grouped_gemm", "score_index"})
"""Ops whose operands are codes, so that a device may multiply them as such."""


@dataclass
class OpCalls:
    """The calls of one op with one weight role, or in layers of one kind, all in the draft block or none: the part that each was
    made in, bytes and FLOPs of their cards. role: as tables name it, `wo_b`, `reuse-2`, `draft wo_b` or `draft`."""

    op: str
    role: str
    calls: list[Callable[[], None]] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)
    nbytes: int = 0
    flops: int = 0

    @property
    def dtype(self) -> str:
        """Type of the products that set the op's floor."""
        dense = self.role.removeprefix(f"{DRAFT} ") in ("head", "gate")
        return "float8_e4m3fn" if self.op in _FLOAT8_OPS and not dense else "bfloat16"

    def run(self) -> None:
        """Makes the calls once more, in order."""
        for call in self.calls:
            call()


class OpRecorder:
    """The dispatcher's observer: keeps every call, and the part of the step (`.part`) in which it was made."""

    def __init__(self) -> None:
        self.part = ""
        self.found: dict[tuple[str, str], OpCalls] = {}

    def __call__(self, card: Any, args: Mapping[str, Any], call: Callable[[], None]) -> None:
        role = next((value.role for value in args.values() if isinstance(value, WeightHandle)), "")
        if "block_table" in args:  # layers of another kind select rows that this one's cache may not have
            role = ""
        if role and self.part == DRAFT:
            role = f"{DRAFT} {role}"
        key = card.name, role or self.part.rpartition(" ")[2]
        group = self.found.setdefault(key, OpCalls(*key))
        call()
        group.calls.append(call)
        group.parts.append(self.part)
        cost = card.cost(args)
        group.nbytes += cost.bytes
        group.flops += cost.flops


@dataclass(frozen=True)
class Timing:
    """Seconds of one run: the median, least and largest sample; graph: whether a captured graph was replayed."""

    median: float
    least: float
    largest: float
    graph: bool


def time_run(
    backend: Any, index: int, run: Callable[[], None], graphs: Any = None, phases: Phases | None = None
) -> Timing:
    """Times `run`, replayed from a graph if `graphs` is given. Samples last long enough for the clock to tell; long runs and
    runs that hardly differ get fewer samples. phases: counts captures and samples."""
    phases = phases or Phases()
    replay, graph = run, None
    with phases("captures" if graphs is not None else "first calls"):
        if graphs is not None:
            graph = graphs.capture(run)
            replay = graph.replay
        else:
            run()
    with phases("samples"):
        return _timing(backend, index, replay, graph)


def _timing(backend: Any, index: int, replay: Callable[[], None], graph: Any) -> Timing:
    clock = backend.timer(index)

    def sample(times: int) -> float:
        start = clock()
        for _ in range(times):
            replay()
        return (clock() - start) / times

    one = sample(1)
    fewest = FEWEST_RUNS if one < _SHORT_RUN else 1
    times = max(fewest, min(int(SAMPLE_SECONDS / max(one, 1e-7)), 1000))
    values = []
    for _ in range(max(1, min(SAMPLES, int(_RUN_SECONDS / max(one, 1e-7))))):
        values.append(sample(times))
        if len(values) >= _FEWEST_SAMPLES and max(values) - min(values) <= _CLOSE * statistics.median(values):
            break
    if hasattr(graph, "reset"):
        graph.reset()
    return Timing(statistics.median(values), min(values), max(values), graph is not None)
