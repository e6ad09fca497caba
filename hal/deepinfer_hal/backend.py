"""The backend contract: three functions to write, everything else optional with a device-neutral default.

A class that overrides an unknown public name, or a known one with another signature, fails when it is defined, with one
error that lists every mistake.
"""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from deepinfer_hal import HAL_VERSION
from deepinfer_hal.errors import BackendContractError
from deepinfer_hal.kernel import Kernel
from deepinfer_hal.weights import CanonicalWeight, WeightHandle, canonical_nbytes, prepare_canonical


@dataclass(frozen=True)
class DeviceInfo:
    """One device that a backend found. memory_bytes 0 = unknown; details: driver, toolkit, instruction sets, ..."""

    index: int
    name: str
    memory_bytes: int = 0
    details: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Capabilities:
    """What a device can do, with conservative defaults.

    stream_dtypes: dtypes in which a model's activations can run; synchronous: a launch returns when the work is done;
    graphs: the graphs slot may be used; memory_bandwidth / flops: measured or listed peaks in bytes/s and FLOP/s (0 = unknown).
    """

    stream_dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    synchronous: bool = True
    graphs: bool = False
    float8: bool = False
    memory_bandwidth: float = 0.0
    flops: float = 0.0


@dataclass(frozen=True)
class MemoryInfo:
    """Free and total bytes of a device."""

    free_bytes: int
    total_bytes: int


class Backend:
    """Base class of every backend.

    Required: `probe`, `device`, `capabilities`. Every other public method is optional and states its default in one line.
    `hal_min` and `hal_max` bound the HAL versions that the backend was written for.
    """

    name: ClassVar[str] = ""
    hal_min: ClassVar[tuple[int, int]] = (1, 0)
    hal_max: ClassVar[tuple[int, int]] = (1, 0)

    # -- required

    def probe(self) -> list[DeviceInfo]:
        """The devices usable now; may import the vendor library and raise BackendUnavailable with its error as cause."""
        raise BackendContractError(f"backend {type(self).__name__} does not define probe()")

    def device(self, index: int) -> torch.device:
        """The torch device of a probed index."""
        raise BackendContractError(f"backend {type(self).__name__} does not define device()")

    def capabilities(self, index: int) -> Capabilities:
        """What the device can do."""
        raise BackendContractError(f"backend {type(self).__name__} does not define capabilities()")

    # -- optional: compute

    def kernels(self, index: int) -> Sequence[Kernel]:
        """(optional) Native kernels in the backend's priority; default: none, so the references run."""
        return ()

    def prepare_weight(self, index: int, role: str, canonical: CanonicalWeight) -> WeightHandle:
        """(optional) The one layout of a role on this backend; default: the checkpoint's bytes."""
        return prepare_canonical(role, _to(canonical, self.device(index)))

    def prepared_nbytes(self, role: str, shape: tuple[int, ...], format: str) -> int:
        """(optional) Bytes of the prepared layout, without making it; default: the checkpoint's bytes."""
        return canonical_nbytes(format, shape)

    def communicator(self, index: int) -> Any:
        """(optional) Collectives between ranks; default: None, one rank."""
        return None

    def graphs(self, index: int) -> Any:
        """(optional) Captures and replays a step; default: None, eager launches."""
        return None

    def set_threads(self, threads: int) -> None:
        """(optional) Host threads that kernels may use; default: torch's intra-op threads."""
        torch.set_num_threads(threads)

    # -- optional: memory, streams, time

    def memory_info(self, index: int) -> MemoryInfo:
        """(optional) Free and total bytes; default: torch.accelerator's when there is one, else zeros (unknown)."""
        return MemoryInfo(0, 0)

    def pinned_empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """(optional) Host memory fit for asynchronous copies; default: ordinary host memory."""
        return torch.empty(shape, dtype=dtype)

    def copy_async(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """(optional) Copy that may return before it is done; default: Tensor.copy_ with non_blocking."""
        dst.copy_(src, non_blocking=True)

    def stream(self, index: int) -> Any:
        """(optional) A new stream; default: None, everything is in order."""
        return None

    def event(self, index: int) -> Any:
        """(optional) A new event; default: None, nothing to wait for on a synchronous device."""
        return None

    def timer(self, index: int) -> Callable[[], float]:
        """(optional) Clock in seconds that includes the device's work; default: the host's clock."""
        return time.perf_counter

    def synchronize(self, index: int) -> None:
        """(optional) Waits for the device; default: nothing, launches are synchronous."""

    @contextlib.contextmanager
    def sync_guard(self, index: int) -> Iterator[None]:
        """(optional) Makes a hidden device sync an error inside the block; default: no guard."""
        yield

    def ipc(self, index: int) -> Any:
        """(optional) Shares device memory between processes; default: None."""
        return None

    @contextlib.contextmanager
    def range(self, name: str) -> Iterator[None]:
        """(optional) Names a region for the vendor's profiler; default: nothing."""
        yield

    def classify_error(self, error: BaseException) -> str:
        """(optional) "out_of_memory" | "device_lost" | "unknown"; default: by the exception's type."""
        return "out_of_memory" if isinstance(error, (MemoryError, torch.OutOfMemoryError)) else "unknown"

    def profiles(self) -> Mapping[str, Capabilities]:
        """(optional) Static sheets of known parts, so that planning needs no device; default: none."""
        return {}

    def describe_build(self) -> Mapping[str, str]:
        """(optional) What is built and, for what is not, why; default: nothing to say."""
        return {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        mistakes = _contract_mistakes(cls)
        if mistakes:
            raise BackendContractError(f"backend class {cls.__name__} breaks the contract: " + "; ".join(mistakes))


def _contract_mistakes(cls: type[Backend]) -> list[str]:
    mistakes = []
    if not cls.name:
        mistakes.append("class attribute `name` is empty")
    if not cls.hal_min <= HAL_VERSION <= cls.hal_max:
        mistakes.append(f"written for HAL {cls.hal_min}..{cls.hal_max}, this is {HAL_VERSION}")
    for required in ("probe", "device", "capabilities"):
        if getattr(cls, required) is getattr(Backend, required):
            mistakes.append(f"{required}() is required and missing")
    for name, value in vars(cls).items():
        if name.startswith("_"):
            continue
        base = inspect.getattr_static(Backend, name, None)
        if base is None:
            mistakes.append(f"unknown public name {name!r} (prefix helpers with an underscore)")
        elif callable(value) and not isinstance(value, type) and inspect.isfunction(base):
            wanted = [p.name for p in inspect.signature(base).parameters.values()]
            found = [p.name for p in inspect.signature(value).parameters.values()]
            if wanted != found:
                mistakes.append(f"{name}({', '.join(found)}) must be {name}({', '.join(wanted)})")
    return mistakes


def _to(canonical: CanonicalWeight, device: torch.device) -> CanonicalWeight:
    scales = None if canonical.scales is None else canonical.scales.to(device)
    return CanonicalWeight(canonical.format, canonical.values.to(device), scales)
