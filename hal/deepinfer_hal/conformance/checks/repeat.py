"""Run-to-run identity: the same call on the same memory gives the same bits, every time."""

import time

from deepinfer_hal.conformance.checks._base import Check, Profile
from deepinfer_hal.conformance.problem import Problem
from deepinfer_hal.conformance.verdict import CheckFailed

AT_LEAST = 3


def run(problem: Problem, profile: Profile) -> None:
    placed = problem.place()
    problem.call(placed.args)
    wanted = [arena.buffer.clone() for arena in placed.arenas]
    deadline = time.monotonic() + profile.repeat_seconds
    for repetition in range(1, profile.repetitions):
        if repetition >= AT_LEAST and time.monotonic() > deadline:
            return
        placed.reset()
        problem.call(placed.args)
        for arena, first in zip(placed.arenas, wanted, strict=True):
            if bool((arena.buffer != first).any()):  # in ops that every device must have
                raise CheckFailed(f"run {repetition + 1} gave other bits in {' / '.join(arena.layouts)} than run 1")


CHECK = Check("repeat", "A race or an unordered sum shows as a bit that changes between equal runs.", run)
