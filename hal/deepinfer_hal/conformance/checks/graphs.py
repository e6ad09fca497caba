"""Captured and replayed: the bits of the eager call, and those of the next step when memory has changed in between.

What a step changes (counts, slots, tables, values) is other content in the same memory, so a replay must follow it. The
other content is the same case drawn with another seed, where that gives the same shapes and host numbers.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from deepinfer_hal.conformance.arena import Placed, bits, sharing
from deepinfer_hal.conformance.checks._base import Check, Profile
from deepinfer_hal.conformance.problem import Problem
from deepinfer_hal.conformance.verdict import CheckFailed
from deepinfer_hal.weights import prepare_canonical

OTHER_SEED = 0x5EED


def run(problem: Problem, profile: Profile) -> None:
    placed = problem.place()
    graphs = problem.subject.graphs
    try:
        graph = graphs.capture(functools.partial(problem.kernel.fn, *placed.args.values()))
    except Exception as error:
        problem.subject.synchronize()
        raise CheckFailed(f"the call cannot be captured: {type(error).__name__}: {error}") from error
    try:
        for _ in range(2):
            placed.reset()
            _assert_replay(problem, graph, placed, problem.base, "replayed")
        other = _other_content(problem)
        if other is not None:
            wanted = problem.run(other).args
            for arena, image in zip(placed.arenas, _images(problem, other), strict=True):
                arena.buffer.copy_(image)
            _assert_replay(problem, graph, placed, wanted, "replayed after its memory changed")
    finally:
        graph.reset()


def _assert_replay(problem: Problem, graph: Any, placed: Placed, wanted: dict[str, Any], how: str) -> None:
    problem.subject.synchronize()
    graph.replay()
    problem.subject.synchronize()
    got, images = placed.read()
    for name in problem.outputs:
        if bool((bits(got[name]) != bits(wanted[name])).any()):
            where = (bits(got[name]) != bits(wanted[name])).nonzero()[0].tolist()
            raise CheckFailed(f"{name}{where}, {how}, is not what the call gives without a graph")
    if how == "replayed" and (damage := placed.damaged(images)):
        raise CheckFailed(f"{how}: {damage}")


def _other_content(problem: Problem) -> dict[str, Any] | None:
    """The case with another seed's tensors and this one's weights; None unless all that a graph keeps is the same."""
    if not problem.drawn:
        return None
    made = problem.card.generate(problem.case, problem.seed ^ OTHER_SEED, "cpu", prepare_canonical)
    other = dict(problem.pristine)
    for arg in problem.card.signature:
        value = made[arg.name]
        if isinstance(value, torch.Tensor):
            if not _alike(value, other[arg.name]):
                return None
            other[arg.name] = value
        elif arg.kind not in ("weight", "comm") and value != other[arg.name]:
            return None
    return other if sharing(other) == sharing(problem.pristine) else None


def _alike(one: torch.Tensor, other: Any) -> bool:
    return isinstance(other, torch.Tensor) and (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


def _images(problem: Problem, args: dict[str, Any]) -> list[torch.Tensor]:
    return [arena.image for arena in problem.place(args).arenas]


def applies(problem: Problem) -> bool:
    return not problem.empty and problem.kernel.capturable and problem.subject.graphs is not None


CHECK = Check("graphs", "A decode step is a graph: what it keeps from the day of its capture is wrong the next.", run, applies)
