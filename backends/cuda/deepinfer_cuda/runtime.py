"""The GPU's streams, events, clock, memory and copies, through torch.cuda."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from deepinfer_hal import event_time
from deepinfer_hal.backend import MemoryInfo


def open_device(index: int) -> None:
    """Makes the device this thread's: a new thread has device 0, and a process group uses the thread's."""
    torch.cuda.set_device(index)


def stream(index: int) -> Any:
    """A new stream of the device."""
    return torch.cuda.Stream(device=index)


def event(index: int) -> Any:
    """A new event of the device, for order between streams. It cannot tell times."""
    with torch.cuda.device(index):
        return torch.cuda.Event(enable_timing=False)


def synchronize(index: int) -> None:
    """Waits for all streams of the device."""
    torch.cuda.synchronize(index)


def mark(index: int) -> Any:
    """An event that can tell times, recorded now on the current stream."""
    with torch.cuda.device(index):
        made = torch.cuda.Event(enable_timing=True)
        made.record(torch.cuda.current_stream(index))
    return made


def timer(index: int) -> Callable[[], float]:
    """Clock in seconds by the device's own events on its current stream; reading it waits for that stream."""
    return event_time.event_clock(functools.partial(mark, index))


def place(index: int) -> Any:
    """An event recorded now on the current stream, for `wait_bounded`."""
    with torch.cuda.device(index):
        made = torch.cuda.Event(enable_timing=False)
        made.record(torch.cuda.current_stream(index))
    return made


def wait_bounded(index: int, seconds: float, done: Any = None) -> None:
    """Waits until the current stream is done, or has come to the place `done`, polling. RuntimeError after `seconds`."""
    event_time.wait_bounded(place(index) if done is None else done, seconds, f"GPU {index}")


def memory_info(index: int) -> MemoryInfo:
    """Free and total bytes, by the driver: other processes' memory is not free."""
    free, total = torch.cuda.mem_get_info(index)
    return MemoryInfo(int(free), int(total))


def pinned_empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Page-locked host memory, which a copy engine reads while the host goes on."""
    return torch.empty(shape, dtype=dtype).pin_memory()


@contextlib.contextmanager
def sync_guard() -> Iterator[None]:
    """Turns a hidden wait of torch's own ops inside the block into a RuntimeError. torch calls the check experimental: it
    may miss some, and waits of other libraries it does not see."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextlib.contextmanager
def profiler_range(name: str) -> Iterator[None]:
    """Names a region for Nsight, as an NVTX range of this thread."""
    torch.cuda.nvtx.range_push(name)
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()
