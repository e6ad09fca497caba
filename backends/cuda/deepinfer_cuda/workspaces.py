"""Workspaces for the kernels of the C ABI: one for each stream, and one for each capture of a stream.

Calls on one stream are in order, so a workspace serves all of them. A captured call is no call of that stream: its graph may be
replayed on another, beside other graphs and beside calls of the stream that it was captured on, so a capture has a workspace of
its own. It comes from the memory pool of the graph, which keeps it for as long as the graph lives; graphs that share a pool are
never replayed at once, so they may have the same one.
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
    """A workspace of `nbytes` for each stream of a device, kept for as long as the process lives, and one for each capture.

    capture_of: the number of the capture that a stream is in, 0 outside of one. A call asks for its workspace while its stream
    is current. Raises BackendError where there is no memory for it.
    """

    def __init__(self, device: torch.device, nbytes: int, capture_of: Callable[[int], int] = capture_of_stream) -> None:
        self._device, self._nbytes, self._capture_of = device, nbytes, capture_of
        self._made: dict[int | None, torch.Tensor] = {}
        self._captured: dict[int | None, tuple[int, torch.Tensor]] = {}

    def __call__(self, stream: int | None) -> tuple[int, int]:
        """Pointer and bytes: what `CLibrary` passes on."""
        capture = self._capture_of(stream or 0)
        before = self._captured.get(stream)
        if before is not None and before[0] != capture:  # that capture is over, and its graph has the memory
            del self._captured[stream], before
        if capture:
            if stream not in self._captured:
                self._captured[stream] = (capture, self._room(stream))
            room = self._captured[stream][1]
        else:
            if stream not in self._made:
                self._made[stream] = self._room(stream)
            room = self._made[stream]
        return room.data_ptr(), room.numel()

    def _room(self, stream: int | None) -> torch.Tensor:
        try:
            return torch.empty(self._nbytes, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError as error:
            raise BackendError(
                f"{self._device} has no {self._nbytes >> 20} MiB left for the kernels' workspace on stream {stream or 0:#x}; "
                f"use fewer streams, or leave more memory free ({str(error).splitlines()[0]})"
            ) from error
