"""The clock of the benchmarks of this folder: replays of a CUDA graph between two events, so that no host time is in it."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch


def require_gpu() -> None:
    """SystemExit where torch sees no GPU."""
    if not torch.cuda.is_available():
        raise SystemExit(f"error: this times kernels on a GPU, and torch {torch.__version__} sees none")


def captured(run: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """`run` as a graph, after two runs that compile."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def microseconds(run: Callable[[], Any], samples: int, discarded: int = 3, replays: int = 2) -> float:
    """Median over `samples` of the time of a replay of `run`'s graph.

    discarded: samples before those, in which clocks rise and caches fill. replays: of a sample, so that a short graph is not
    lost beside the events.
    """
    graph = captured(run)
    times = [microseconds_of_a_replay(graph, replays) for _ in range(samples + discarded)]
    return statistics.median(times[discarded:])


def microseconds_of_a_replay(graph: torch.cuda.CUDAGraph, replays: int = 1) -> float:
    """Time of one replay of `replays` in a row."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / replays * 1e3


def microseconds_in_turn(runs: list[Callable[[], Any]], samples: int, discarded: int) -> list[float]:
    """Median time of a replay of each run's graph, in turn: a clock that falls as the board warms falls for all of them."""
    graphs = [captured(run) for run in runs]
    times = [[microseconds_of_a_replay(graph) for graph in graphs] for _ in range(samples + discarded)]
    return [statistics.median(of_one) for of_one in zip(*times[discarded:], strict=True)]


def microseconds_of_a_call(calls: list[Callable[[], Any]], samples: int, discarded: int) -> float:
    """Median time of one of `calls`, all of them in one graph; a sample is one replay. Results are dropped at once, so that
    calls that make their own share memory as they would in use."""

    def run() -> None:
        for call in calls:
            call()

    return microseconds(run, samples, discarded, replays=1) / len(calls)
