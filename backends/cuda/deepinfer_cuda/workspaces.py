"""Workspaces for the kernels of the C ABI: one for each stream, and for each captured call one of its graph's.

Calls on one stream are in order, so a workspace serves all of them. A captured call is no call of that stream: its graph may be
replayed on another, beside other graphs and beside calls of the stream that it was captured on. So it has memory of the graph's
own pool, as a temporary of torch's has: given for the capture's stream, and given back as soon as the call has the address. That
is no later than the call's kernels are captured, but nothing is given to anybody in between, and who gets it next comes after
them in the graph. Nothing of the pool is kept, so graphs and pools may go and be captured again. Graphs that share a pool are
never replayed at once.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
from deepinfer_hal.errors import BackendError


@functools.cache
def _capture_info() -> Callable[..., int]:
    return ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2


def capture_of_stream(stream: int) -> int:
    """The number of the capture that a stream (a cudaStream_t) is in, no two of a process alike; 0 outside of one."""
    if not stream:  # the default stream cannot be captured
        return 0
    status, number = ctypes.c_int(0), ctypes.c_uint64(0)
    failed = _capture_info()(ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None)
    return number.value if not failed and status.value else 0


class Workspaces:
    """A workspace of `nbytes` for each stream of a device, kept for as long as the process lives, and one for each captured call.

    capture_of: the number of the capture that a stream is in, 0 outside of one. A call asks for its workspace while its stream
    is current, and captures its kernels before it asks torch for other memory. Raises BackendError where there is none.
    """

    def __init__(self, device: torch.device, nbytes: int, capture_of: Callable[[int], int] = capture_of_stream) -> None:
        self._device, self._nbytes, self._capture_of = device, nbytes, capture_of
        self._made: dict[int | None, tuple[torch.Tensor, tuple[int, int]]] = {}

    def __call__(self, stream: int | None) -> tuple[int, int]:
        """Pointer and bytes: what `CLibrary` passes on."""
        if self._capture_of(stream or 0):
            room = self._room(stream)
            return room.data_ptr(), room.numel()
        known = self._made.get(stream)
        if known is None:
            room = self._room(stream)
            known = self._made.setdefault(stream, (room, (room.data_ptr(), room.numel())))  # of two threads the first one's
        return known[1]

    def _room(self, stream: int | None) -> torch.Tensor:
        try:
            return torch.empty(self._nbytes, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError as error:
            raise BackendError(
                f"{self._device} has no {self._nbytes >> 20} MiB left for the kernels' workspace on stream {stream or 0:#x}; "
                f"use fewer streams, or leave more memory free ({str(error).splitlines()[0]})"
            ) from error
