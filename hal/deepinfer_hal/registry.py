"""Finds backends by entry point. Discovery imports no vendor library; `probe` does, lazily."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from deepinfer_hal.backend import Backend, DeviceInfo
from deepinfer_hal.errors import BackendUnavailable, DeepInferError

GROUP = "deepinfer.backends"

_IN_TREE = {
    "ascend": "deepinfer_ascend.backend:AscendBackend",
    "cpu": "deepinfer_cpu.backend:CpuBackend",
    "cuda": "deepinfer_cuda.backend:CudaBackend",
}
"""Backends of this source tree, found also when the tree is used without being installed."""


@dataclass(frozen=True)
class Found:
    """What `list_backends` knows of one backend: its devices, or the error that keeps it from working."""

    name: str
    backend: Backend | None
    devices: tuple[DeviceInfo, ...]
    error: str = ""


def _entries() -> dict[str, EntryPoint]:
    found = {name: EntryPoint(name, value, GROUP) for name, value in _IN_TREE.items()}
    found.update({entry.name: entry for entry in entry_points(group=GROUP)})
    return found


def backend_names() -> list[str]:
    """Names of every backend that is installed, in order of preference of `auto`: accelerators first, cpu last."""
    return sorted(_entries(), key=lambda name: (name == "cpu", name))


def load_backend(name: str) -> Backend:
    """The backend called `name`; BackendUnavailable says what there is, or carries the import error as cause."""
    entries = _entries()
    if name not in entries:
        raise BackendUnavailable(f"no backend is named {name!r}; installed: {', '.join(backend_names())}")
    try:
        loaded = entries[name].load()
    except DeepInferError:
        raise
    except Exception as error:
        raise BackendUnavailable(f"backend {name!r} cannot be imported: {_spell(error)}") from error
    if not (isinstance(loaded, type) and issubclass(loaded, Backend)):
        raise BackendUnavailable(f"entry point {entries[name].value} of backend {name!r} is no Backend class")
    if loaded.name != name:
        raise BackendUnavailable(f"entry point {name!r} gives a backend that calls itself {loaded.name!r}; they must be one name")
    try:
        return loaded()
    except DeepInferError:
        raise
    except Exception as error:
        raise BackendUnavailable(f"backend {name!r} cannot be started: {_spell(error)}") from error


def probe_backend(backend: Backend) -> tuple[DeviceInfo, ...]:
    """The backend's devices; BackendUnavailable with the vendor's error as cause when it cannot say."""
    try:
        return tuple(backend.probe())
    except DeepInferError:
        raise
    except Exception as error:
        raise BackendUnavailable(f"backend {backend.name!r} cannot find its devices: {_spell(error)}") from error


def _spell(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def list_backends() -> list[Found]:
    """Every installed backend with its devices, or with the sentence that says why there are none."""
    result = []
    for name in backend_names():
        try:
            backend = load_backend(name)
            result.append(Found(name, backend, probe_backend(backend)))
        except DeepInferError as error:
            result.append(Found(name, None, (), str(error)))
    return result


def open_backend(spec: str) -> tuple[Backend, int]:
    """Backend and device index of "auto", "name", "name:index" or "name:device" with a device's own name.

    "auto" takes the first backend in `backend_names()` that probes a device which is not emulated. Raises
    BackendUnavailable.
    """
    if spec == "auto":
        reasons = []
        for found in list_backends():
            real = [device for device in found.devices if not device.emulated]
            if found.backend is not None and real:
                return found.backend, real[0].index
            reasons.append(f"{found.name}: {found.error or 'no device'}")
        raise BackendUnavailable("no backend has a usable device (" + "; ".join(reasons) + ")")
    name, colon, suffix = spec.partition(":")
    numbered = suffix.isascii() and suffix.isdecimal()
    backend = load_backend(name)
    devices = probe_backend(backend)
    if colon and not numbered:
        named = [device.index for device in devices if device.name == suffix]
        if not suffix or not named:
            raise BackendUnavailable(f"device index {suffix!r} in {spec!r} is no number; write for example {name}:0")
        return backend, named[0]
    index = int(suffix) if suffix else (devices[0].index if devices else 0)
    if index not in [device.index for device in devices]:
        there = ", ".join(f"{d.index} ({d.name})" for d in devices) or "none"
        raise BackendUnavailable(
            f"backend {name!r} has no device {index}; it has {there}; `deepinfer hal list` says what others lack"
        )
    return backend, index
