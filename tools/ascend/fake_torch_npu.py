"""A stand-in for torch_npu on CPU tensors that records every call: for tests of the NPU device's logic, and for finding
the calls that `check_torch_npu.py` holds against the real one.

`install(calls)` puts it in the place of `torch_npu` for this process. It says nothing of what an NPU does: streams are
in order, a graph is captured by noting its operators while they run and replayed by running them again on the same
tensors, and HCCL is gloo.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SOC, CANN = "Ascend950PR_9579", "9.2.0"


@dataclass(frozen=True)
class Call:
    """A call of torch_npu: dotted path, and arguments as given; a method's own object is left out."""

    path: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    method: bool = False


class _Calls:
    """Where calls are noted; `noted(path)` wraps a function so that each of its calls is."""

    def __init__(self, calls: list[Call]) -> None:
        self.calls = calls

    def noted(self, path: str, method: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def call(*args: Any, **kwargs: Any) -> Any:
                self.calls.append(Call(path, args[1:] if method else args, kwargs, method))
                return function(*args, **kwargs)

            return call

        return wrap

    def noted_class(self, path: str, kind: type) -> type:
        """A class whose constructor and public methods are noted, under the path of the class and of each method."""
        members: dict[str, Any] = {
            name: self.noted(f"{path}.{name}", method=True)(value)
            for name, value in vars(kind).items()
            if callable(value) and not name.startswith("_")
        }
        members["__init__"] = self.noted(path, method=True)(kind.__init__)
        return type(kind.__name__, (kind,), members)


class Stream:
    """In order with everything else. Its pointer is NULL, which kernel libraries for the host take."""

    npu_stream = 0

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device = device

    def wait_stream(self, stream: Any) -> None:
        assert isinstance(stream, Stream)

    def wait_event(self, event: Any) -> None:
        assert isinstance(event, Event)

    def synchronize(self) -> None:
        pass

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class Event:
    """The host's clock when it was recorded. `late`: seconds until a recorded event counts as done."""

    late = 0.0

    def __init__(self, enable_timing: bool = False) -> None:
        self.enable_timing, self.at = enable_timing, None

    def record(self, stream: Any = None) -> None:
        self.at = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        assert self.at is not None

    def query(self) -> bool:
        return time.perf_counter() >= self.at + Event.late

    def synchronize(self) -> None:
        while not Event.query(self):
            time.sleep(1e-3)

    def elapsed_time(self, end_event: Any) -> float:
        if not (self.enable_timing and end_event.enable_timing):
            raise RuntimeError("both events must have been made with enable_timing=True")
        return 1e3 * (end_event.at - self.at)


class _Capture(TorchDispatchMode):
    """Notes the operators of a captured step; a value read on the host is refused as the runtime does."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_local_scalar_dense" in func.name() or "nonzero" in func.name():
            raise RuntimeError("NPU function error: aclrtSynchronizeStream, error code is 107027")
        result = func(*args, **(kwargs or {}))
        self.graph.noted.append((func, args, kwargs or {}, result))
        return result


class Graph:
    """What a capture noted, run again by `replay` into the tensors of the capture."""

    def __init__(self) -> None:
        self.noted: list[tuple[Any, Any, Any, Any]] = []

    def replay(self) -> None:
        for func, args, kwargs, before in self.noted:
            for old, new in zip(tree_leaves(before), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    def reset(self) -> None:
        self.noted.clear()


@contextlib.contextmanager
def _graph(npu_graph: Any, pool: Any = None, stream: Any = None, capture_error_mode: str = "global") -> Iterator[None]:
    with _Capture(npu_graph):
        yield


class Group:
    """A process group with the calls that the communicator makes of HCCL's; gloo moves the bytes."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: Any) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timeout
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        self._gloo = dist.ProcessGroupGloo(store, rank, size, options)

    def allgather(self, output_tensors: Any, input_tensors: Any) -> Any:
        return self._gloo.allgather(output_tensors, input_tensors)

    def alltoall_base(self, output_tensor: Any, input_tensor: Any, output_split_sizes: Any, input_split_sizes: Any) -> Any:
        return self._gloo.alltoall_base(output_tensor, input_tensor, output_split_sizes, input_split_sizes)

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        return self._gloo.broadcast(tensors, opts)


def make(calls: list[Call], soc: str = SOC, cann: str = CANN) -> types.ModuleType:
    """The module, with one device of that chip; `calls` receives every call."""
    noted = _Calls(calls)
    npu, mode, queue = types.SimpleNamespace(), [0], [1]
    functions: dict[str, Callable[..., Any]] = {
        "device_count": lambda: 1,
        "get_device_properties": lambda device=None: types.SimpleNamespace(
            name=soc, total_memory=112 << 30, cube_core_num=28, vector_core_num=56
        ),
        "set_device": lambda device: None,
        "set_task_queue_enable": lambda mode: queue.__setitem__(0, mode),
        "current_stream": lambda device=None: npu.Stream.__new__(npu.Stream),
        "stream": lambda stream: contextlib.nullcontext(stream),
        "synchronize": lambda device=None: None,
        "mem_get_info": lambda device=None: (100 << 30, 112 << 30),
        "memory_reserved": lambda device=None: 0,
        "get_sync_debug_mode": lambda: mode[0],
        "set_sync_debug_mode": lambda debug_mode: mode.__setitem__(0, debug_mode),
        "graph_pool_handle": lambda: (0, 1),
        "graph": _graph,
    }
    for name, function in functions.items():
        setattr(npu, name, noted.noted(f"torch_npu.npu.{name}")(function))
    npu.utils = types.SimpleNamespace(
        get_cann_version=noted.noted("torch_npu.npu.utils.get_cann_version")(lambda module="CANN": cann)
    )
    for name, kind in {"Stream": Stream, "Event": Event, "NPUGraph": Graph}.items():
        setattr(npu, name, noted.noted_class(f"torch_npu.npu.{name}", kind))
    module = types.ModuleType("torch_npu")
    module.npu, module.task_queue = npu, queue
    hccl = noted.noted_class("torch_npu._C._distributed_c10d.ProcessGroupHCCL", Group)
    module._C = types.SimpleNamespace(_distributed_c10d=types.SimpleNamespace(ProcessGroupHCCL=hccl))
    return module


def install(calls: list[Call] | None = None, soc: str = SOC, cann: str = CANN) -> types.ModuleType:
    """Makes it this process's torch_npu, and host memory count as pinned."""
    module = make([] if calls is None else calls, soc, cann)
    sys.modules["torch_npu"] = module
    torch.Tensor.pin_memory = lambda self, device=None: self
    return module
