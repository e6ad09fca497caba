"""A backend with a graphs slot on the CPU: a capture notes every kernel call and every torch operator outside kernels with the
tensors they had; a replay makes the same calls again and runs no Python of the step.

What a step decides on the host is thereby frozen, as in a real graph: a value that should have come from device memory at a
fixed address shows as a wrong result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from deepinfer_cpu.backend import CpuBackend
from deepinfer_hal.backend import Capabilities
from deepinfer_hal.card import all_cards
from deepinfer_hal.kernel import Kernel, reference_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

FROM_PARTS = frozenset({"moe_layer", "attention_decode_layer", "residual_site"})
"""Composites that run from their parts, so that their temporaries are in the graph too."""


class Tape:
    """Calls in order, while one is being captured."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] | None = None
        self.inside = False

    def kernel(self, fn: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            if self.calls is not None and not self.inside:
                self.calls.append(lambda: fn(*args))
            outer, self.inside = self.inside, True
            try:
                fn(*args)
            finally:
                self.inside = outer

        return call

    def operator(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if self.calls is not None and not self.inside:
            self.calls.append(lambda: _again(func, args, kwargs, result))


class _Operators(TorchDispatchMode):
    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.tape.operator(func, args, kwargs or {}, result)
        return result


def _again(func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Runs an operator again and puts what it makes where the captured result lies."""
    made = func(*args, **kwargs)
    for new, old in zip(tree_leaves(made), tree_leaves(result), strict=True):
        if isinstance(new, torch.Tensor) and new.data_ptr() != old.data_ptr():
            old.copy_(new)


class RecordedGraph:
    """A captured step."""

    def __init__(self, calls: list[Callable[[], None]], slot: RecordingGraphs) -> None:
        self.calls, self.slot = calls, slot

    def replay(self) -> None:
        self.slot.replays += 1
        for call in self.calls:
            call()


class RecordingGraphs:
    """The graphs slot."""

    pool_bytes = 0

    def __init__(self, tape: Tape) -> None:
        self.tape, self.captures, self.replays = tape, 0, 0

    def capture(self, step: Callable[[], None]) -> RecordedGraph:
        step()
        self.tape.calls = []
        with _Operators(self.tape):
            step()
        calls, self.tape.calls = self.tape.calls, None
        self.captures += 1
        return RecordedGraph(calls, self)


class RecordingBackend(CpuBackend):
    """The CPU's kernels, each said to be capturable; references where it has none, but for the ops in `waiting`."""

    name = "recording"

    def __init__(self, waiting: frozenset[str] = frozenset(), synchronous: bool = True) -> None:
        self._tape, self._waiting, self._synchronous = Tape(), waiting, synchronous
        self._slot = RecordingGraphs(self._tape)

    def capabilities(self, index: int) -> Capabilities:
        return dataclasses.replace(super().capabilities(index), graphs=True, synchronous=self._synchronous)

    def graphs(self, index: int) -> RecordingGraphs:
        return self._slot

    def kernels(self, index: int) -> list[Kernel]:
        offered = {kernel.op: kernel for kernel in super().kernels(index)}
        for op, card in all_cards().items():
            offered.setdefault(op, dataclasses.replace(reference_kernel(card), provider="recording", priority=0))
        return [
            dataclasses.replace(kernel, fn=self._tape.kernel(kernel.fn), capturable=op not in self._waiting)
            for op, kernel in offered.items() if op not in FROM_PARTS
        ]  # fmt: skip
