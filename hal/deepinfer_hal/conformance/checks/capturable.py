"""Kernels that declare `capturable` neither allocate nor synchronise, so that a graph can hold them."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deepinfer_hal.conformance.checks._base import Check, Profile
from deepinfer_hal.conformance.problem import Problem
from deepinfer_hal.conformance.verdict import CheckFailed

_SYNCING = ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero")


class _Watch(TorchDispatchMode):
    """Notes ops that give new memory, or that need a value on the host."""

    def __init__(self, known: set[int]) -> None:
        super().__init__()
        self.known, self.found = known, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split("::")[-1].split(".")[0]
        if name in _SYNCING:
            self.found.append(f"aten::{name} waits for the device")
        result = func(*args, **(kwargs or {}))
        there = self.known | _storages((args, kwargs))  # a view of what was there, of a weight's bytes too, is no new memory
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.numel() and not _storages(leaf) <= there:
                self.found.append(f"aten::{name} allocates {leaf.numel() * leaf.element_size()} bytes")
        return result


def run(problem: Problem, profile: Profile) -> None:
    placed = problem.place()
    problem.call(placed.args)
    placed.reset()
    before, watch = _allocations(problem), _Watch(_storages(placed.args))
    guard = problem.subject.backend.sync_guard(problem.subject.index) if problem.subject.backend else _nothing()
    try:
        with guard, watch:
            problem.kernel.fn(*placed.args.values())
    except RuntimeError as error:
        raise CheckFailed(f"a capturable kernel must not synchronise: {error}") from error
    problem.subject.synchronize()
    if watch.found:
        raise CheckFailed(f"a capturable kernel must not do this: {watch.found[0]} ({len(watch.found)} in all)")
    after = _allocations(problem)
    if after != before:
        raise CheckFailed(f"a capturable kernel made {after - before} device allocations")


def _storages(values: Any) -> set[int]:
    """Where the storages of all tensors in a structure begin."""
    return {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)}


def _allocations(problem: Problem) -> int:
    """Allocations that the device's allocator made so far; 0 where nothing counts them."""
    device = problem.subject.device
    if device.type == "cpu" or not torch.accelerator.is_available():
        return 0
    try:
        return int(torch.accelerator.memory_stats(device).get("allocation.all.allocated", 0))
    except (RuntimeError, NotImplementedError, AttributeError):
        return 0


def _nothing() -> Any:
    import contextlib

    return contextlib.nullcontext()


def applies(problem: Problem) -> bool:
    return not problem.empty and problem.kernel.capturable


CHECK = Check("capturable", "A hot path that allocates or waits cannot be captured and stalls every step.", run, applies)
