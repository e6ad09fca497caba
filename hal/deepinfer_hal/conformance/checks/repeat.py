"""Run-to-run identity: the same call on the same memory gives the same bits, every time."""

import time

import torch

from deepinfer_hal.conformance.checks._base import Check, Profile
from deepinfer_hal.conformance.problem import Problem
from deepinfer_hal.conformance.verdict import CheckFailed

LOOK_EVERY = 16
"""Runs between two looks at what was found: each look brings a value to the host."""


def run(problem: Problem, profile: Profile) -> None:
    placed = problem.place()
    problem.call(placed.args)
    wanted = [arena.buffer.clone() for arena in placed.arenas]
    before = placed.snapshot()
    deadline, found = time.monotonic() + profile.repeat_seconds, []
    for repetition in range(1, profile.repetitions):
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


def _look(found: list) -> None:
    if not found or not bool(torch.stack([different for _, _, different in found]).any()):
        return
    repetition, arena = next((repetition, arena) for repetition, arena, different in found if bool(different))
    raise CheckFailed(f"run {repetition + 1} gave other bits in {' / '.join(arena.layouts)} than run 1")


CHECK = Check("repeat", "A race or an unordered sum shows as a bit that changes between equal runs.", run)
