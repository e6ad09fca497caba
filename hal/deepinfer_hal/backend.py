"""The backend contract: three functions to write, everything else optional with a device-neutral default.

A class that overrides an unknown public name, or a known one with another signature, fails when it is defined, with one
error that lists every mistake.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from deepinfer_hal import HAL_VERSION
from deepinfer_hal.communicator import Communicator
from deepinfer_hal.errors import BackendContractError
from deepinfer_hal.kernel import Kernel
from deepinfer_hal.weights import CanonicalWeight, WeightHandle, canonical_nbytes, prepare_canonical


@dataclass(frozen=True)
class DeviceInfo:
    """One device that a backend found. memory_bytes 0 = unknown; details: driver, toolkit, instruction sets, ...

    emulated: a model of a device, for tests: "auto" never takes it. It may be opened by name as by index.
    """

    index: int
    name: str
    memory_bytes: int = 0
    details: Mapping[str, str] = field(default_factory=dict)
    emulated: bool = False


@dataclass(frozen=True)
class Capabilities:
    """What a device can do, with conservative defaults.

    stream_dtypes: dtypes in which a model's activations can run; synchronous: a launch returns when the work is done;
    graphs: the graphs slot may be used; graph_workspace_bytes: what a captured call takes of the graphs' memory for its kernels
    alone; float64: it computes in float64 faster than a host, so that the suite may compute the
    references of large cases there, in plain torch; cache_bytes: of the last-level cache; memory_bandwidth / flops: measured or
    listed peaks in bytes/s and FLOP/s. 0 = unknown.
    """

    stream_dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    synchronous: bool = True
    graphs: bool = False
    graph_workspace_bytes: int = 0
    float8: bool = False
    float64: bool = False
    cache_bytes: int = 0
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

    def candidates(self, index: int) -> Sequence[Kernel]:
        """(optional) Kernels that stay off until `deepinfer hal prove` shows them right on this device; default: none."""
        return ()

    def proof_key(self, index: int) -> Mapping[str, str]:
        """(optional) What a proof of a candidate holds for, exactly (chip, toolkit, ...); default: nothing can be proven."""
        return {}

    def prepare_weight(self, index: int, role: str, canonical: CanonicalWeight) -> WeightHandle:
        """(optional) The one layout of a role on this backend; default: the checkpoint's bytes."""
        return prepare_canonical(role, _to(canonical, self.device(index)))

    def prepared_nbytes(self, role: str, shape: tuple[int, ...], format: str) -> int:
        """(optional) Bytes of the prepared layout, without making it; default: the checkpoint's bytes."""
        return canonical_nbytes(format, shape)

    def communicator(self, index: int) -> type[Communicator] | None:
        """(optional) The Communicator class whose `open` joins ranks; default: None, one rank."""
        return None

    def graphs(self, index: int) -> Any:
        """(optional) Captures and replays a step; default: None, eager launches."""
        return None

    def set_threads(self, threads: int) -> None:
        """(optional) Host threads that kernels may use; default: torch's intra-op threads."""
        torch.set_num_threads(threads)

    # -- optional: memory, streams, time

    def memory_info(self, index: int) -> MemoryInfo:
        """(optional) Free and total bytes; default: torch.accelerator's where it can tell, else zeros (unknown)."""
        device = self.device(index)
        with contextlib.suppress(RuntimeError):  # not every torch device has an allocator that knows
            if _is_accelerator(device):
                return MemoryInfo(*torch.accelerator.get_memory_info(device))
        return MemoryInfo(0, 0)

    def pinned_empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """(optional) Host memory fit for asynchronous copies; default: ordinary host memory."""
        return torch.empty(shape, dtype=dtype)

    def copy_async(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """(optional) Copy that may return before it is done; default: Tensor.copy_ with non_blocking."""
        dst.copy_(src, non_blocking=True)

    def stream(self, index: int) -> Any:
        """(optional) A new stream; default: torch.Stream on an accelerator, else None, everything is in order."""
        device = self.device(index)
        return torch.Stream(device) if _is_accelerator(device) else None

    def event(self, index: int) -> Any:
        """(optional) A new event; default: torch.Event on an accelerator, else None, there is nothing to wait for."""
        device = self.device(index)
        return torch.Event(device) if _is_accelerator(device) else None

    def mark(self, index: int) -> Any:
        """(optional) A point of the current stream, recorded now; `a.elapsed_time(b)` is the milliseconds from one to another
        once both have passed. Default: torch.Event on an accelerator, else None, the host's clock tells."""
        device = self.device(index)
        if not _is_accelerator(device):
            return None
        made = torch.Event(device, enable_timing=True)
        made.record()
        return made

    def timer(self, index: int) -> Callable[[], float]:
        """(optional) Clock in seconds that includes the device's work; default: the host's, read after `synchronize`."""

        def clock() -> float:
            self.synchronize(index)
            return time.perf_counter()

        return clock

    def synchronize(self, index: int) -> None:
        """(optional) Waits for the device; default: torch.accelerator's on its devices, else nothing."""
        device = self.device(index)
        if _is_accelerator(device):
            torch.accelerator.synchronize(device)

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

    def explain_error(self, text: str) -> Sequence[str]:
        """(optional) Lines on what a code or message of the vendor's runtime means; default: nothing to say."""
        return ()

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
            raise BackendContractError(f"backend class {cls.__name__} breaks the contract:", tuple(mistakes))


def _contract_mistakes(cls: type[Backend]) -> list[str]:
    """Every way in which the class, with what it mixes in, is no backend."""
    mistakes = _attribute_mistakes(cls)
    for required in ("probe", "device", "capabilities"):
        if getattr(cls, required) is getattr(Backend, required):
            mistakes.append(f"{required}() is required and missing")
    checked: set[str] = set()
    for owner in (one for one in cls.__mro__ if one not in Backend.__mro__):
        for name, value in vars(owner).items():
            if not name.startswith("_") and name not in checked:
                checked.add(name)
                mistakes += _override_mistakes(name, value)
    return mistakes


def _attribute_mistakes(cls: type[Backend]) -> list[str]:
    if not isinstance(cls.name, str) or not cls.name:
        return [f"class attribute `name` must be the backend's name, it is {cls.name!r}"]
    bounds = {"hal_min": cls.hal_min, "hal_max": cls.hal_max}
    wrong = [
        f"class attribute `{key}` must be (major, minor), it is {value!r}"
        for key, value in bounds.items()
        if not (isinstance(value, tuple) and len(value) == 2 and all(isinstance(part, int) for part in value))
    ]
    if not wrong and not cls.hal_min <= HAL_VERSION <= cls.hal_max:
        low, high, this = (".".join(map(str, version)) for version in (cls.hal_min, cls.hal_max, HAL_VERSION))
        wrong.append(f"written for HAL {low} to {high}, this is {this}")
    return wrong


def _override_mistakes(name: str, value: Any) -> list[str]:
    base = inspect.getattr_static(Backend, name, None)
    if base is None and name not in Backend.__annotations__:
        near = difflib.get_close_matches(name, [one for one in vars(Backend) if not one.startswith("_")], n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        return [f"unknown public name {name!r} ({hint}prefix helpers with an underscore)"]
    if not inspect.isfunction(base):
        return []
    wanted = inspect.signature(base)
    if not inspect.isfunction(value):
        return [f"{name} must be a method {name}{_spell(wanted)}, it is a {type(value).__name__}"]
    found = inspect.signature(value)
    if _shape(found) != _shape(wanted):
        return [f"{name}{_spell(found)} must be {name}{_spell(wanted)}"]
    return []


def _shape(signature: inspect.Signature) -> list[tuple[str, Any]]:
    return [(parameter.name, parameter.kind) for parameter in signature.parameters.values()]


def _spell(signature: inspect.Signature) -> str:
    """Parameters without their annotations: what has to agree."""
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def _is_accelerator(device: torch.device) -> bool:
    """Whether torch.accelerator speaks for this device."""
    current = torch.accelerator.current_accelerator()
    return current is not None and current.type == device.type


def _to(canonical: CanonicalWeight, device: torch.device) -> CanonicalWeight:
    scales = None if canonical.scales is None else canonical.scales.to(device)
    return CanonicalWeight(canonical.format, canonical.values.to(device), scales)
