"""The CPU backend: native kernels where they were built, the references for everything else."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence

import torch
from deepinfer_hal.backend import Backend, Capabilities, DeviceInfo, MemoryInfo
from deepinfer_hal.communicator import Communicator
from deepinfer_hal.kernel import Kernel
from deepinfer_hal.reference_communicator import ReferenceCommunicator
from deepinfer_hal.weights import CanonicalWeight, WeightHandle

from deepinfer_cpu import kernels as _kernels
from deepinfer_cpu import weights as _weights


class CpuBackend(Backend):
    """The host's processor as a device."""

    name = "cpu"

    def probe(self) -> list[DeviceInfo]:
        details = {"cores": str(os.cpu_count()), "torch_threads": str(torch.get_num_threads()), **self.describe_build()}
        return [DeviceInfo(0, platform.processor() or platform.machine(), _total_memory(), details)]

    def device(self, index: int) -> torch.device:
        return torch.device("cpu")

    def capabilities(self, index: int) -> Capabilities:
        return Capabilities(stream_dtypes=(torch.bfloat16, torch.float32), synchronous=True)

    def kernels(self, index: int) -> Sequence[Kernel]:
        return _kernels.native_kernels()

    def communicator(self, index: int) -> type[Communicator] | None:
        return ReferenceCommunicator

    def prepare_weight(self, index: int, role: str, canonical: CanonicalWeight) -> WeightHandle:
        return _weights.prepare_weight(role, canonical)

    def prepared_nbytes(self, role: str, shape: tuple[int, ...], format: str) -> int:
        return _weights.prepared_nbytes(role, shape, format)

    def set_threads(self, threads: int) -> None:
        torch.set_num_threads(threads)
        _kernels.set_num_threads(threads)

    def memory_info(self, index: int) -> MemoryInfo:
        return MemoryInfo(_available_memory(), _total_memory())

    def describe_build(self) -> Mapping[str, str]:
        reason = _kernels.native_unavailable_reason()
        return {"native kernels": reason or f"built, {_kernels.instruction_set()}"}


def _meminfo(field: str) -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith(field + ":"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def _total_memory() -> int:
    return _meminfo("MemTotal")


def _available_memory() -> int:
    return _meminfo("MemAvailable")
