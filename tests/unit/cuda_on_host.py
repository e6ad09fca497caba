"""A GPU without a GPU: torch.cuda's calls over a stand-in with host memory, each held against torch's own signature.

Nothing here runs on a GPU; it is the logic of the slots that is tested. Streams are in order, a graph is captured by noting
its operators and replayed by running them again, NCCL is gloo.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepinfer_cuda.backend import CudaBackend
from deepinfer_cuda.nccl import NcclCommunicator
from deepinfer_hal.communicator import Communicator
from deepinfer_triton.ranks.windows import SharedMemory

sys.path.insert(0, str(Path(__file__).parents[2] / "tools/ascend"))
import fake_torch_npu  # noqa: E402

Patch = Callable[[Any, str, Any], None]


@dataclass(frozen=True)
class Call:
    """A call of torch.cuda: its name and its arguments by the names of torch's own signature."""

    name: str
    arguments: dict[str, Any]


class Stream(fake_torch_npu.Stream):
    """In order with everything else."""


class Event(fake_torch_npu.Event):
    """The host's clock when it was recorded."""


class Graph(fake_torch_npu.Graph):
    """Operators noted at capture."""


class NcclOptions:
    """Options of a process group: a timeout."""

    _timeout = timedelta(0)


class Nccl(fake_torch_npu.Group):
    """gloo in NCCL's place, made as NCCL's group is."""

    Options = NcclOptions

    def __init__(self, store: dist.Store, rank: int, size: int, options: NcclOptions) -> None:
        super().__init__(store, rank, size, options._timeout)

    def abort(self) -> None:
        """Nothing of gloo outlives a call."""


@contextlib.contextmanager
def _graph(cuda_graph: Any, pool: Any = None, stream: Any = None, capture_error_mode: str = "global") -> Iterator[None]:
    try:
        with fake_torch_npu._graph(cuda_graph, pool, stream, capture_error_mode):
            yield
    except RuntimeError as error:
        if "107027" in str(error):
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing") from error
        raise


def stand_in(
    patch: Patch = setattr, *, name: str = "NVIDIA H200", capability: tuple[int, int] = (9, 0), count: int = 1
) -> list[Call]:
    """Puts the stand-in in the place of torch.cuda; `patch` sets an attribute of an object. The list receives its calls."""
    calls: list[Call] = []
    mode = [0]
    told = types.SimpleNamespace(
        name=name, total_memory=141 << 30, major=capability[0], minor=capability[1], multi_processor_count=132
    )
    functions: dict[str, Callable[..., Any]] = {
        "init": lambda: None,
        "device_count": lambda: count,
        "get_device_properties": lambda device=None: told,
        "set_device": lambda device: None,
        "device": lambda device: contextlib.nullcontext(),
        "current_stream": lambda device=None: Stream(device),
        "stream": lambda stream: contextlib.nullcontext(stream),
        "synchronize": lambda device=None: None,
        "mem_get_info": lambda device=None: (100 << 30, 141 << 30),
        "memory_reserved": lambda device=None: 0,
        "get_sync_debug_mode": lambda: mode[0],
        "set_sync_debug_mode": lambda debug_mode: mode.__setitem__(0, debug_mode),
        "graph_pool_handle": lambda: (0, 1),
        "graph": _graph,
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": Graph,
    }
    for attribute, function in functions.items():
        patch(torch.cuda, attribute, _noted(calls, attribute, function, getattr(torch.cuda, attribute)))
    for attribute in ("range_push", "range_pop"):
        real = getattr(torch.cuda.nvtx, attribute)
        patch(torch.cuda.nvtx, attribute, _noted(calls, attribute, lambda *args, **kwargs: 0, real))
    patch(torch.version, "cuda", "13.0")
    patch(torch.Tensor, "pin_memory", lambda self, device=None: self)
    dist.ProcessGroupNCCL = Nccl  # a torch without CUDA has none to restore
    return calls


def _noted(calls: list[Call], name: str, function: Callable[..., Any], real: Any) -> Callable[..., Any]:
    signature = inspect.signature(getattr(real, "real_signature_of", real))

    @functools.wraps(function, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(Call(name, dict(signature.bind(*args, **kwargs).arguments)))
        return function(*args, **kwargs)

    call.real_signature_of = getattr(real, "real_signature_of", real)
    return call


class FileMemory(SharedMemory):
    """Files without a name that processes map, in place of a GPU's memory."""

    def __init__(self) -> None:
        self._views: list[torch.Tensor] = []
        self._files: list[int] = []

    def make(self, nbytes: int) -> tuple[int, tuple[int, ...]]:
        file = os.memfd_create("window")
        os.ftruncate(file, nbytes)
        self._files.append(file)
        handle = os.getpid(), file, nbytes
        return self.map(handle), handle

    def map(self, handle: tuple[int, ...]) -> int:
        process, file, nbytes = handle
        self._views.append(torch.from_file(f"/proc/{process}/fd/{file}", shared=True, size=nbytes, dtype=torch.uint8))
        return self._views[-1].data_ptr()

    def close(self) -> None:
        self._views.clear()
        while self._files:
            os.close(self._files.pop())

    def keep(self) -> None:
        """A file is made anew for each world."""


class NcclOnHost(NcclCommunicator):
    """Two ranks may use the one device of the stand-in; their windows are files."""

    shares_devices = True
    window_bytes = 4 << 20

    def _shared_memory(self, device: torch.device) -> SharedMemory:
        return FileMemory()


class CudaOnHost(CudaBackend):
    """Device 0 is the stand-in's; its tensors are the host's."""

    name = "cuda"

    def __init__(self) -> None:
        if torch.version.cuda is None:  # in a worker or a rank
            stand_in()

    def device(self, index: int) -> torch.device:
        return torch.device("cpu")

    def communicator(self, index: int) -> type[Communicator]:
        return NcclOnHost
