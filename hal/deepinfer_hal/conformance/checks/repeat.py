"""Run-to-run identity: the same call on the same memory gives the same bits, every time."""

import time
from collections.abc import Callable
from typing import Any

import torch

from deepinfer_hal.conformance.checks._base import Check, Profile
from deepinfer_hal.conformance.problem import Problem
from deepinfer_hal.conformance.verdict import CheckFailed

LOOK_EVERY = 16
"""Runs between two looks at what was found: each look brings a value to the host."""

EAGER = 32
"""Runs by ordinary calls where graphs are at hand; the others are replays, which cost a tenth of that."""

REPLAYS = 100
"""Replays between two looks at the clock."""


def run(problem: Problem, profile: Profile) -> None:
    placed = problem.place()
    problem.call(placed.args)
    wanted = [arena.buffer.clone() for arena in placed.arenas]
    before, deadline, found = placed.snapshot(), time.monotonic() + profile.repeat_seconds, []
    flags = [torch.zeros((), dtype=torch.bool, device=first.device) for first in wanted]
    written = [place for place, arena in enumerate(placed.arenas) if set(arena.layouts) & set(problem.outputs)]

    def once() -> None:  # what a call only reads keeps whatever was done to it, so it is compared once, in the end
        for place in written:
            placed.arenas[place].buffer.copy_(before[place])
        problem.kernel.fn(*placed.args.values())
        for place in written:
            flags[place].bitwise_or_((placed.arenas[place].buffer != wanted[place]).any())

    graph = _captured(problem, once) if profile.repetitions > EAGER else None
    for repetition in range(1, profile.repetitions if graph is None else EAGER):
        if repetition >= profile.repeat_least and time.monotonic() > deadline:
            break
        placed.reset(before)
        problem.call(placed.args)
        for arena, first in zip(placed.arenas, wanted, strict=True):
            found.append((repetition, arena, (arena.buffer != first).any()))  # in ops that every device must have
        if repetition % LOOK_EVERY == 0:
            _look(found)
            found = []
    _look(found)
    if graph is not None:
        placed.reset(before)
        for flag in flags:
            flag.zero_()
        _replay(problem, graph, profile.repetitions - EAGER, deadline)
        for arena, first, flag in zip(placed.arenas, wanted, flags, strict=True):
            flag.bitwise_or_((arena.buffer != first).any())
        different = [arena for arena, flag in zip(placed.arenas, flags, strict=True) if bool(flag)]
        if different:
            raise CheckFailed(f"a replayed run gave other bits in {' / '.join(different[0].layouts)} than run 1")


def _captured(problem: Problem, once: Callable[[], None]) -> Any:
    """The graph of one run with what is around it; None where there are no graphs. A call that cannot be captured is for the
    check `graphs` to report."""
    if not problem.kernel.capturable or problem.subject.graphs is None:
        return None
    try:
        return problem.subject.graphs.capture(once)
    except Exception:
        problem.subject.synchronize()
        return None


def _replay(problem: Problem, graph: Any, runs: int, deadline: float) -> None:
    """Replays until `runs` or the deadline, once at least: what was reset before is not what a run leaves."""
    try:
        for start in range(0, runs, REPLAYS):
            if start and time.monotonic() > deadline:
                return
            for _ in range(min(REPLAYS, runs - start)):
                graph.replay()
            problem.subject.synchronize()
    finally:
        graph.reset()


def _look(found: list) -> None:
    if not found or not bool(torch.stack([different for _, _, different in found]).any()):
        return
    repetition, arena = next((repetition, arena) for repetition, arena, different in found if bool(different))
    raise CheckFailed(f"run {repetition + 1} gave other bits in {' / '.join(arena.layouts)} than run 1")


CHECK = Check("repeat", "A race or an unordered sum shows as a bit that changes between equal runs.", run)
