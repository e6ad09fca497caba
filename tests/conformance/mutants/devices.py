"""Backends that are wrong beside their kernels: copies, facts, clocks, streams, the plan of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from deepinfer_hal.backend import Backend, Capabilities, MemoryInfo
from deepinfer_hal.conformance import device_cases
from deepinfer_hal.conformance.verdict import CheckFailed, Declined
from torch.utils._python_dispatch import TorchDispatchMode

from tests.conformance.mutants._base import Host


@dataclass(frozen=True)
class DeviceMutant:
    """A backend that is wrong in one way, or part of the HAL replaced (`patches`: names in the device cases' module)."""

    name: str
    make: Callable[[], Backend]
    killed_by: tuple[str, ...]
    why: str
    patches: tuple[tuple[str, Any], ...] = ()

    def run(self) -> tuple[str, ...]:
        """Ids of the device cases that fail on it."""
        with mock.patch.dict(vars(device_cases), dict(self.patches)):
            return failures(self.make())


def failures(backend: Backend) -> tuple[str, ...]:
    """Ids of the device cases that fail on a backend."""
    failed = []
    for case in device_cases.device_cases():
        try:
            case.run(backend, 0)
        except CheckFailed:
            failed.append(case.id)
        except Declined:
            continue
    return tuple(failed)


class Streaming(Host):
    """A host with streams, on which everything is done at once."""

    def stream(self, index: int) -> Any:
        return _Stream()

    def event(self, index: int) -> Any:
        return _Event()


class _Stream(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _LosesCopies(_Stream):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if "copy_" in func.name() else func(*args, **(kwargs or {}))


class _Event:
    def record(self, stream: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


class LosesWork(Streaming):
    """Nobody waits for what was enqueued on its second stream."""

    def stream(self, index: int) -> Any:
        return _LosesCopies()


class WholeWords(Streaming):
    def copy_async(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        whole = dst.numel() // 4 * 4
        dst[:whole].copy_(src[:whole])


class MoreThanAll(Streaming):
    def memory_info(self, index: int) -> MemoryInfo:
        return MemoryInfo(2 << 30, 1 << 30)


class ClaimsGraphs(Streaming):
    def capabilities(self, index: int) -> Capabilities:
        return replace(super().capabilities(index), graphs=True)


class Backwards(Streaming):
    def timer(self, index: int) -> Callable[[], float]:
        ticks = iter(range(1000, 0, -1))
        return lambda: float(next(ticks))


class StandsStill(Streaming):
    """The clock is read before the device has done anything."""

    def timer(self, index: int) -> Callable[[], float]:
        return lambda: 0.0


def other_ring(*args: Any, made: Any = device_cases.plan_step, **named: Any) -> Any:
    """A ring of one row less for what is stored than for what is read."""
    plan = made(*args, **named)
    return replace(plan, window_slots=plan.window_slots - (plan.window_slots > 0))


MUTANTS = [
    DeviceMutant("copies_whole_words", WholeWords, ("device(copies)",), "Bytes after the last whole word are not copied."),
    DeviceMutant("plan_stores_elsewhere", Streaming, ("device(step_plan)",),
                 "The plan of a step stores window rows where its readers do not look.", (("plan_step", other_ring),)),
    DeviceMutant("more_free_than_there_is", MoreThanAll, ("device(capabilities)",), "More memory is free than there is."),
    DeviceMutant("claims_graphs", ClaimsGraphs, ("device(capabilities)",), "Graphs are offered, but the slot is empty."),
    DeviceMutant("clock_runs_backwards", Backwards, ("device(timer)",), "The clock runs backwards."),
    DeviceMutant("clock_stands_still", StandsStill, ("device(timer)",), "The clock does not see the device's work."),
    DeviceMutant("stream_loses_work", LosesWork, ("device(streams)",), "A copy on a second stream is not done after its event."),
]  # fmt: skip
