"""What each op of a step takes: its calls recorded once, then timed alone, those of one op and weight role in turn.

The calls of one op in all layers of a slice have weights of their own, so going round through them reads memory and not a
cache. Composites that run from their parts are taken apart.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from deepinfer_hal.weights import WeightHandle

SAMPLES = 5
_SAMPLE_SECONDS = 4e-3


@dataclass
class OpCalls:
    """The calls of one op with one weight role in a step, by layer kind; bytes and FLOPs are those of their cards."""

    op: str
    role: str
    calls: list[Callable[[], None]] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)
    nbytes: int = 0
    flops: int = 0


class OpRecorder:
    """The dispatcher's observer: keeps every call, and the part of the step (`.part`) in which it was made."""

    def __init__(self) -> None:
        self.part = ""
        self.found: dict[tuple[str, str], OpCalls] = {}
        self.with_costs = True

    def __call__(self, card: Any, args: Mapping[str, Any], call: Callable[[], None]) -> None:
        role = next((value.role for value in args.values() if isinstance(value, WeightHandle)), "")
        form = args.get("format")
        key = card.name, role or (form if isinstance(form, str) else "")
        group = self.found.setdefault(key, OpCalls(*key))
        call()
        group.calls.append(call)
        group.parts.append(self.part)
        if self.with_costs:
            cost = card.cost(args)
            group.nbytes += cost.bytes
            group.flops += cost.flops


@dataclass(frozen=True)
class Timing:
    """Seconds of one run: the median, least and largest sample; graph: whether a captured graph was replayed, else why not."""

    median: float
    least: float
    largest: float
    graph: bool
    why_eager: str = ""


def time_run(backend: Any, index: int, run: Callable[[], None], graphs: Any = None, why_eager: str = "") -> Timing:
    """Times `run`, replayed from a graph if `graphs` is given. Samples last long enough for the clock to tell."""
    replay = run
    if graphs is not None:
        graph = graphs.capture(run)
        replay = graph.replay
    else:
        run()
    clock = backend.timer(index)

    def sample(times: int) -> float:
        start = clock()
        for _ in range(times):
            replay()
        return (clock() - start) / times

    one = sample(1)
    times = max(1, min(int(_SAMPLE_SECONDS / max(one, 1e-7)), 1000))
    values = [sample(times) for _ in range(SAMPLES)]
    if graphs is not None and hasattr(graph, "reset"):
        graph.reset()
    return Timing(statistics.median(values), min(values), max(values), graphs is not None, why_eager)
