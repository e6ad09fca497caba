"""The least time of a step by its op cards: the sum over its op calls of max(bytes / bandwidth, FLOPs / peak).

A tracer stands in the dispatcher's `observer` slot and notes every call's cost from its card. A composite counts as the one
call that it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from deepinfer_hal.ceilings import Ceilings


@dataclass
class OpTotal:
    """Sums over the calls of one op: bytes and FLOPs by its card, seconds as traced."""

    calls: int = 0
    nbytes: int = 0
    flops: int = 0
    seconds: float = 0.0


@dataclass
class FloorTracer:
    """Collects (bytes, FLOPs) of every call, by step; and sums by op; `end_step` closes a step."""

    steps: list[list[tuple[int, int]]] = field(default_factory=list)
    ops: dict[str, OpTotal] = field(default_factory=dict)
    _calls: list[tuple[int, int]] = field(default_factory=list)

    def __call__(self, card: Any, args: Mapping[str, Any], call: Callable[[], None]) -> None:
        """The dispatcher's observer."""
        cost = card.cost(args)
        start = time.perf_counter()
        call()
        seconds = time.perf_counter() - start
        self._calls.append((cost.bytes, cost.flops))
        total = self.ops.setdefault(card.name, OpTotal())
        total.calls += 1
        total.nbytes += cost.bytes
        total.flops += cost.flops
        total.seconds += seconds

    def end_step(self) -> None:
        self.steps.append(self._calls)
        self._calls = []


def step_floor_seconds(calls: list[tuple[int, int]], ceilings: Ceilings) -> float:
    """Sum over the calls of a step of the least time of each."""
    return sum(ceilings.seconds(nbytes, flops) for nbytes, flops in calls)
