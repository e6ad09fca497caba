"""The CUDA backend: NVIDIA GPUs through torch.cuda, with CUDA C++ kernels for Hopper and the portable Triton kernels."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import deepinfer_triton
import torch
from deepinfer_hal.backend import Backend, Capabilities, DeviceInfo, MemoryInfo
from deepinfer_hal.communicator import Communicator
from deepinfer_hal.errors import BackendUnavailable
from deepinfer_hal.kernel import Kernel
from deepinfer_hal.weights import CanonicalWeight, WeightHandle

from deepinfer_cuda import error_words, gpu, native_library, runtime, weights
from deepinfer_cuda.kernel_sources import package_digest


class CudaBackend(Backend):
    """Devices 0, 1, ... as torch.cuda counts them. Weights keep the checkpoint's layout, but for FP4 experts where the CUDA C++
    kernels run (weights.py); those have as many bytes."""

    name = "cuda"

    def probe(self) -> list[DeviceInfo]:
        machine = gpu.look()
        if machine.reason:
            lacking = [str(one) for one in (gpu.triton_part(), native_library.part()) if not one.ok]
            kernels = f"; its kernels would need more ({'; '.join(lacking)})" if lacking else ""
            raise BackendUnavailable(f"no GPU ({machine.reason}){kernels}") from machine.error
        return [DeviceInfo(one.index, one.name, one.memory_bytes, _details(one)) for one in machine.gpus]

    def device(self, index: int) -> torch.device:
        return torch.device("cuda", index)

    def capabilities(self, index: int) -> Capabilities:
        from deepinfer_cuda.native import WORKSPACE_BYTES

        found = gpu.gpu_of(index)
        return Capabilities(
            stream_dtypes=(torch.bfloat16, torch.float32), synchronous=False, graphs=True, float64=True,
            float8=found.capability >= (8, 9), cache_bytes=found.cache_bytes,
            graph_workspace_bytes=WORKSPACE_BYTES if _has_native_kernels(found) else 0,
        )  # fmt: skip

    # -- compute

    def kernels(self, index: int) -> Sequence[Kernel]:
        from deepinfer_cuda.kernels import kernels_of

        return kernels_of(gpu.gpu_of(index))

    def prepare_weight(self, index: int, role: str, canonical: CanonicalWeight) -> WeightHandle:
        kept = super().prepare_weight(index, role, canonical)
        packed = weights.is_packed(role, canonical.format, canonical.shape)
        broken = weights.nan_codes(canonical)
        if not (packed or broken) or not _has_native_kernels(gpu.gpu_of(index)):
            return kept
        if broken:
            shape = list(canonical.shape)
            warnings.warn(f"weight {role} {shape} has {broken}; products of those rows of it are NaN", stacklevel=2)
            return weights.NanWeight(role, kept.canonical())
        return weights.prepare(role, kept.canonical())

    def communicator(self, index: int) -> type[Communicator] | None:
        from deepinfer_cuda.nccl import NcclCommunicator

        return NcclCommunicator

    def graphs(self, index: int) -> Any:
        from deepinfer_cuda.graphs import CudaGraphs

        return CudaGraphs(index)

    # -- memory, streams, time

    def memory_info(self, index: int) -> MemoryInfo:
        return runtime.memory_info(index)

    def pinned_empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return runtime.pinned_empty(shape, dtype)

    def stream(self, index: int) -> Any:
        return runtime.stream(index)

    def event(self, index: int) -> Any:
        return runtime.event(index)

    def mark(self, index: int) -> Any:
        return runtime.mark(index)

    def timer(self, index: int) -> Callable[[], float]:
        return runtime.timer(index)

    def synchronize(self, index: int) -> None:
        runtime.synchronize(index)

    @contextlib.contextmanager
    def sync_guard(self, index: int) -> Iterator[None]:
        with runtime.sync_guard():
            yield

    @contextlib.contextmanager
    def range(self, name: str) -> Iterator[None]:
        with runtime.profiler_range(name):
            yield

    # -- words

    def classify_error(self, error: BaseException) -> str:
        known = super().classify_error(error)
        return error_words.classify(str(error)) if known == "unknown" else known

    def explain_error(self, text: str) -> Sequence[str]:
        return [line for meaning in error_words.explain(text) for line in meaning.lines()]

    def describe_build(self) -> Mapping[str, str]:
        machine = gpu.look()
        missing = [reason for one in machine.gpus if (reason := gpu.missing_for_kernels(one))]
        triton = gpu.triton_part()
        state = missing[0] if missing else "all parts are here" if triton.ok else str(triton)
        return {
            "gpu": machine.reason or gpu.names(machine.gpus),
            "cuda c++ kernels": native_library.part().found,
            "triton kernels": f"sources {_triton_sources()}; {state}",
        }


@functools.cache
def _triton_sources() -> str:
    return package_digest(Path(deepinfer_triton.__file__).parent)


def _has_native_kernels(one: gpu.Gpu) -> bool:
    return one.capability == native_library.CAPABILITY and native_library.part().ok


def _details(one: gpu.Gpu) -> dict[str, str]:
    lacking = gpu.missing_for_kernels(one)
    offered = [*(["CUDA C++"] if _has_native_kernels(one) else []), *([] if lacking else ["Triton"])]
    state = "runs" if one.capability == native_library.CAPABILITY else "assembles"
    return {
        "state": state, "capability": "{}.{}".format(*one.capability), "multiprocessors": str(one.multiprocessors),
        "cuda": str(torch.version.cuda), "triton": gpu.triton_version() or "none",
        "kernels": " and ".join(offered) or f"none, the references serve ({lacking})",
    }  # fmt: skip
