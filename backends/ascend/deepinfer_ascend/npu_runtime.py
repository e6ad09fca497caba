"""The NPU's streams, events, clock, memory and copies, through torch_npu. State: `written`, never run on an NPU.

Every call of torch_npu is made by its full name, `torch_npu.npu.<call>`, so that a reader of this file and
`tools/ascend/check_torch_npu.py` find it: that tool runs all of these paths and holds each call against torch_npu's own
signatures.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from deepinfer_hal import event_time
from deepinfer_hal.backend import MemoryInfo


def open_device(index: int) -> None:
    """Makes the device this thread's, and launches of torch's own ops synchronous with their call.

    torch_npu hands ops to a second thread by default (TASK_QUEUE_ENABLE=1). A kernel that goes to the same aclrtStream
    directly could overtake them, so the queue is switched off.
    """
    import torch_npu

    torch_npu.npu.set_device(index)
    torch_npu.npu.set_task_queue_enable(0)


def stream(index: int) -> Any:
    """A new stream of the device."""
    import torch_npu

    return torch_npu.npu.Stream(device=index)


def current_stream_pointer(index: int) -> int:
    """The aclrtStream that launches go to now: inside `with stream:` that stream's, under capture the captured one's."""
    import torch_npu

    return torch_npu.npu.current_stream(index).npu_stream


def event() -> Any:
    """A new event, for order between streams. It cannot tell times."""
    import torch_npu

    return torch_npu.npu.Event(enable_timing=False)


def synchronize(index: int) -> None:
    """Waits for all streams of the device."""
    import torch_npu

    torch_npu.npu.synchronize(index)


def mark(index: int) -> Any:
    """An event that can tell times, recorded now on the current stream."""
    import torch_npu

    made = torch_npu.npu.Event(enable_timing=True)
    made.record(torch_npu.npu.current_stream(index))
    return made


def timer(index: int) -> Callable[[], float]:
    """Clock in seconds by the device's own events, from when the clock was made; reading it waits for the device."""
    return event_time.event_clock(functools.partial(mark, index))


def wait_bounded(index: int, seconds: float) -> None:
    """Waits until the current stream is done, polling, so that a dead device or rank is noticed. RuntimeError after
    `seconds`."""
    import torch_npu

    done = torch_npu.npu.Event(enable_timing=False)
    done.record(torch_npu.npu.current_stream(index))
    event_time.wait_bounded(done, seconds, f"NPU {index}")


def memory_info(index: int) -> MemoryInfo:
    """Free and total bytes, by the driver. They differ between cards of one chip, so nothing is assumed."""
    import torch_npu

    free, total = torch_npu.npu.mem_get_info(index)
    return MemoryInfo(int(free), int(total))


def pinned_empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Host memory that the device's copy engines reach. torch pins it with the accelerator at hand, which is torch_npu's."""
    return torch.empty(shape, dtype=dtype).pin_memory()


@contextlib.contextmanager
def sync_guard() -> Iterator[None]:
    """Turns a hidden wait inside the block into a RuntimeError. torch_npu calls the check experimental: it may miss some."""
    import torch_npu

    before = torch_npu.npu.get_sync_debug_mode()
    torch_npu.npu.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch_npu.npu.set_sync_debug_mode(before)


def toolkit_version() -> str:
    """CANN's version as torch_npu asks its libraries."""
    import torch_npu

    return str(torch_npu.npu.utils.get_cann_version("CANN"))
