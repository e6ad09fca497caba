"""What an NVIDIA GPU needs on this machine, and what of it is missing: by name, version wanted and version found.

Importing this module asks nothing of CUDA and imports no Triton: `probe` does.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from deepinfer_hal.parts import Part
from deepinfer_triton.targets import CUDA_CAPABILITIES

TRITON_WANTED = (3, 6)
"""The oldest release whose machine code for these targets was made and checked (reports/triton/assemble.json)."""


@dataclass(frozen=True)
class Gpu:
    """One GPU as torch tells it: its index there, name, bytes of memory, compute capability, multiprocessors, bytes of L2."""

    index: int
    name: str
    memory_bytes: int
    capability: tuple[int, int]
    multiprocessors: int
    cache_bytes: int = 0


@dataclass(frozen=True)
class Machine:
    """What `look` found: the parts a GPU cannot do without, torch's own error where it gave one, and the GPUs."""

    parts: tuple[Part, ...]
    error: Exception | None = None
    gpus: tuple[Gpu, ...] = ()

    @property
    def reason(self) -> str | None:
        """Why no GPU can be used, naming what is missing; None if one can."""
        return "; ".join(str(part) for part in self.parts if not part.ok) or None


def look() -> Machine:
    """Asks torch for its GPUs. Starts CUDA where there is one; stops at the first part that is missing, since only the
    part before it could tell of the next."""
    build = _torch_build()
    if not build.ok:
        return Machine((build,))
    wanted = f"one that serves CUDA {torch.version.cuda}"
    try:
        torch.cuda.init()
        count = torch.cuda.device_count()
    except Exception as error:  # RuntimeError or AssertionError, by what is wrong
        if "No CUDA GPUs" in str(error):
            return Machine((build, _device_part(0)), error)
        return Machine((build, Part("driver", wanted, _first_sentence(error), False)), error)
    found = tuple(_describe(index) for index in range(count))
    return Machine((build, Part("driver", wanted, "one that does", True), _device_part(count)), gpus=found)


def _torch_build() -> Part:
    cuda = torch.version.cuda
    told = f"{torch.__version__}, " + (f"built for CUDA {cuda}" if cuda else "built without CUDA")
    return Part("torch", "a build with CUDA", told, cuda is not None)


def _device_part(count: int) -> Part:
    return Part("device", "a GPU that CUDA_VISIBLE_DEVICES lets through", str(count) if count else "none", count > 0)


def _first_sentence(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return re.split(r"(?<=[a-z\)])\. ", text)[0].rstrip(".")


def _describe(index: int) -> Gpu:
    told = torch.cuda.get_device_properties(index)
    cache = getattr(told, "L2_cache_size", 0)
    return Gpu(index, told.name, told.total_memory, (told.major, told.minor), told.multi_processor_count, cache)


def triton_version() -> str | None:
    """Triton's version as it was installed, or None. Imports nothing."""
    for name in ("triton", "pytorch-triton"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def triton_part() -> Part:
    """Whether Triton is here, and new enough for the kernels."""
    found = triton_version()
    numbers = tuple(int(part) for part in re.findall(r"\d+", found or "")[:2])
    wanted = ".".join(map(str, TRITON_WANTED))
    return Part("Triton", f"{wanted} or later", found or "none (it is not installed)", numbers >= TRITON_WANTED)


def capability_part(gpu: Gpu) -> Part:
    """Whether the GPU is of an architecture that the kernels are made for."""
    known = [f"{major}.{minor}" for major, minor in CUDA_CAPABILITIES]
    wanted = f"{', '.join(known[:-1])} or {known[-1]}"
    found = "{}.{}".format(*gpu.capability)
    return Part("compute capability", wanted, f"{found} ({gpu.name})", gpu.capability in CUDA_CAPABILITIES)


def missing_for_kernels(gpu: Gpu) -> str | None:
    """Why this GPU gets the references instead of kernels; None if it gets kernels."""
    return "; ".join(str(part) for part in (capability_part(gpu), triton_part()) if not part.ok) or None


def gpu_of(index: int) -> Gpu:
    """The GPU of that index. For a device that `look` found."""
    return _describe(index)


def names(gpus: Sequence[Gpu]) -> str:
    """The GPUs with their compute capabilities, for people."""
    return ", ".join(dict.fromkeys("{} ({}.{})".format(gpu.name, *gpu.capability) for gpu in gpus))
