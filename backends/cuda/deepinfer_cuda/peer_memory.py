"""Memory of a GPU that the processes of other ranks map, by the driver's IPC handles; torch's allocator knows nothing of it."""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from typing import Any

from deepinfer_hal.errors import BackendUnavailable
from deepinfer_triton.ranks.windows import SharedMemory

_HANDLE = struct.Struct("@8q")
_PEER_ACCESS = 1
"""CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS."""


class _Handle(ctypes.Structure):
    """CUipcMemHandle; the driver takes it by value."""

    _fields_ = (("reserved", ctypes.c_char * _HANDLE.size),)


class PeerMemory(SharedMemory):
    """Of the GPU whose context is current. Memory that was made is never freed, since freeing what another process still has
    mapped is undefined: `keep` leaves it to this process's next world, whose ranks have all left the one before."""

    def __init__(self, index: int) -> None:
        self._index, self._made, self._mapped = index, [], []

    def make(self, nbytes: int) -> tuple[int, tuple[int, ...]]:
        with _lock:
            kept = _kept.setdefault((self._index, nbytes), [])
            address = kept.pop() if kept else _allocate(nbytes)
        self._made.append((nbytes, address))
        _call("cuMemsetD8_v2", ctypes.c_uint64(address), ctypes.c_ubyte(0), ctypes.c_size_t(nbytes))
        _call("cuCtxSynchronize")
        handle = _Handle()
        _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return address, _HANDLE.unpack(bytes(handle))

    def map(self, handle: tuple[int, ...]) -> int:
        there, address = _Handle.from_buffer_copy(_HANDLE.pack(*handle)), ctypes.c_uint64()
        _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), there, ctypes.c_uint(_PEER_ACCESS))
        self._mapped.append(address.value)
        return address.value

    def close(self) -> None:
        mapped, self._mapped = self._mapped, []
        for address in mapped:
            _call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def keep(self) -> None:
        made, self._made = self._made, []
        with _lock:
            for nbytes, address in made:
                _kept[self._index, nbytes].append(address)


_lock = threading.Lock()
_kept: dict[tuple[int, int], list[int]] = {}
"""By GPU and size: memory that no world uses now."""


def _allocate(nbytes: int) -> int:
    address = ctypes.c_uint64()
    _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
    return address.value


@functools.cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise BackendUnavailable(f"ranks on GPUs need the driver's library libcuda.so.1: {error}") from error


def _call(name: str, *args: Any) -> None:
    """OSError with the driver's own name of the error."""
    status = getattr(_driver(), name)(*args)
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorName(ctypes.c_int(status), ctypes.byref(text))
        raise OSError(f"{name} says {(text.value or b'an unknown error').decode()} ({status})")
