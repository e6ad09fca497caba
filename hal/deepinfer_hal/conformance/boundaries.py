"""Which rows of a discrete output sit at a decision boundary: their float64 scores are closer than FP32 can tell.

The pre-image of a decision is never needed: a row is at a boundary if the float64 reference decides otherwise when its
float inputs move by a few FP32 steps. The movement is a function of an input's value alone, so equal scores stay equal
and a tie is never excused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from deepinfer_hal.conformance.arena import bits
from deepinfer_hal.conformance.problem import Problem

STEP = 2.0**-21
"""Relative movement of an input: four roundings of float32."""

_TRIALS = 12

_COPIES = frozenset({"permute", "ep_dispatch"})
"""Ops whose discrete outputs follow from integer ids alone: nothing is near a boundary."""


def near_rows(problem: Problem, args: Mapping[str, Any], expected: Mapping[str, Any], name: str) -> torch.Tensor | None:
    """bool over the leading rows of output `name`: at a boundary. None if none is.

    An output without rows of its own (counts per expert) is near where it changes.
    """
    if problem.card.name in _COPIES:
        return None
    near = None
    for trial in range(_TRIALS):
        moved = problem.reference(_moved(problem, args, trial))
        changed = (bits(moved[name]) != bits(expected[name])).reshape(expected[name].shape[0], -1).any(1)
        near = changed if near is None else near | changed
    return near if near is not None and bool(near.any()) else None


def _moved(problem: Problem, args: Mapping[str, Any], trial: int) -> dict[str, Any]:
    """The call with float64 inputs that moved by at most STEP, the same way for equal values."""
    result = dict(args)
    for arg in problem.card.signature:
        value = args[arg.name]
        if arg.kind == "in" and value is not None and value.is_floating_point():
            wide = value.double()
            wave = torch.sin(wide * (1000.0 + 77.0 * trial) + trial)
            result[arg.name] = torch.where(wide.isfinite(), wide * (1 + STEP * wave), wide)
    return result
