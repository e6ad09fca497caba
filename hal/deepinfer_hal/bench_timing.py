"""Seconds of a call: replays of a graph that goes round all buffers, where the kernel and the device have graphs, else calls."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from deepinfer_hal.conformance.problem import Subject

SAMPLE_SECONDS = 2e-3
"""A sample is as many calls as take so long, so that the clock can tell them."""

_LEAST_REPEATS, _MOST_CALLS = 3, 1000

Sample = Callable[[int], float]
"""Of so many rounds: seconds of a round."""


class NotRun(Exception):
    """A row does not fit the budget, and why."""


@dataclass(frozen=True)
class TimedCalls:
    """Calls that are ready to be timed: how ("graph" or "calls"), one sample, and the calls of a round."""

    how: str
    sample: Sample
    calls: int

    def seconds(self, repeats: int, left: float) -> list[float]:
        """Seconds of a call, for each of `repeats` samples. NotRun if `left` seconds are too few."""
        return _samples(self.sample, self.calls, repeats, left)


@contextlib.contextmanager
def timed_calls(subject: Subject, call: Callable[..., None], buffers: Sequence[tuple[Any, ...]]) -> Iterator[TimedCalls]:
    """Captures a graph of one call on each of the buffers where the kernel and the device allow it, and frees it in the end."""
    clock = subject.backend.timer(subject.index)
    if not (subject.kernel.capturable and subject.graphs is not None):
        yield TimedCalls("calls", _calls(call, buffers, clock), 1)
        return
    graph = subject.graphs.capture(lambda: [call(*args) for args in buffers])
    try:
        yield TimedCalls("graph", _replays(graph, clock), len(buffers))
    finally:
        graph.reset()


def _replays(graph: Any, clock: Callable[[], float]) -> Sample:
    def sample(rounds: int) -> float:
        start = clock()
        for _ in range(rounds):
            graph.replay()
        return (clock() - start) / rounds

    return sample


def _calls(call: Callable[..., None], buffers: Sequence[tuple[Any, ...]], clock: Callable[[], float]) -> Sample:
    turn = itertools.cycle(buffers)

    def sample(rounds: int) -> float:
        start = clock()
        for _ in range(rounds):
            call(*next(turn))
        return (clock() - start) / rounds

    return sample


def _samples(sample: Sample, calls: int, repeats: int, left: float) -> list[float]:
    """Seconds of one of the `calls` of a round, one value a sample."""
    sample(1)
    one = sample(1)
    rounds = max(1, min(int(SAMPLE_SECONDS / max(one, 1e-7)), _MOST_CALLS))
    possible = min(repeats, int(left / max(one * rounds, 1e-9)))
    if possible < min(_LEAST_REPEATS, repeats):
        raise NotRun(f"a call takes {one / calls:.2g} s and {max(left, 0.0):.2g} s of the row's time are left after checking it")
    return [sample(rounds) / calls for _ in range(possible)]
