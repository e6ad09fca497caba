"""Memory after repetition: a call keeps nothing, neither tensors nor bytes of the process or the device."""

import gc
import os

import torch

from deepinfer_hal.conformance.checks._base import Check, Profile
from deepinfer_hal.conformance.problem import Problem
from deepinfer_hal.conformance.verdict import CheckFailed

WARMUP, CALLS = 5, 100

ALLOWED_BYTES = 16 << 20
"""Growth of the process that allocators and caches may show without any leak."""


def run(problem: Problem, profile: Profile) -> None:
    placed = problem.place()
    for _ in range(WARMUP):
        problem.call(placed.args)
    gc.collect()
    tensors, resident, device = _live_tensors(), _resident_bytes(), _device_bytes(problem)
    for _ in range(CALLS):
        problem.call(placed.args)
    gc.collect()
    kept = _live_tensors() - tensors
    if kept >= CALLS:
        raise CheckFailed(f"{CALLS} calls left {kept} tensors alive")
    if _device_bytes(problem) > device:
        raise CheckFailed(f"{CALLS} calls left {_device_bytes(problem) - device} more bytes of device memory in use")
    grown = _resident_bytes() - resident
    if grown > ALLOWED_BYTES:
        raise CheckFailed(f"{CALLS} calls left the process {grown >> 20} MiB larger")


def _live_tensors() -> int:
    return sum(1 for thing in gc.get_objects() if type(thing) is torch.Tensor)


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _device_bytes(problem: Problem) -> int:
    device = problem.subject.device
    if device.type == "cpu" or not torch.accelerator.is_available():
        return 0
    try:
        return int(torch.accelerator.memory_allocated(device))
    except (RuntimeError, NotImplementedError, AttributeError):
        return 0


def applies(problem: Problem) -> bool:
    return problem.first and not problem.empty


CHECK = Check("memory", "What one call leaks, a server loses after an hour.", run, applies)
