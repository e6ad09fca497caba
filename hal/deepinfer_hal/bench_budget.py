"""What a row of the benchmark may take: samples, seconds, memory, what its buffers must exceed; and what drawing costs here."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deepinfer_hal import formats
from deepinfer_hal.backend import Backend
from deepinfer_hal.errors import BadCall

ASSUMED_CACHE_BYTES = 128 << 20
"""Last-level cache of a device that does not tell."""


@dataclass(frozen=True)
class Budget:
    """repeats: samples of a row; row_seconds: of a row from drawing to timing; memory_bytes: host memory of a row.

    cache_bytes: what the buffers of a row must exceed together; 0: the device's last-level cache.
    """

    repeats: int = 9
    row_seconds: float = 60.0
    memory_bytes: int = 0
    cache_bytes: int = 0

    def __post_init__(self) -> None:
        if self.repeats < 1 or self.row_seconds <= 0:
            raise BadCall(f"a row needs repeats and seconds, got {self.repeats} and {self.row_seconds}")


def last_level_cache_bytes(device: torch.device, told: int = 0) -> int:
    """Of the processor, as the system tells it, or of a device what its capabilities tell; else ASSUMED_CACHE_BYTES."""
    sizes = [told]
    if device.type == "cpu":
        for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
            sizes.append(int(path.read_text(encoding="ascii").strip().removesuffix("K")) << 10)
    return max(sizes) or ASSUMED_CACHE_BYTES


@functools.cache
def drawing_seconds() -> dict[bool, float]:
    """Seconds that an element of a case takes to draw, store, lay out and expand again on this host, at its best; by whether it
    is quantised on the way."""

    def coded(drawn: torch.Tensor) -> None:
        formats.dequantise_weight_fp8(*formats.quantise_weight_fp8(drawn))

    def least(elements: int, work: Callable[[torch.Tensor], Any]) -> float:
        times = []
        for _ in range(2):
            start = time.perf_counter()
            work(torch.randn(elements // 1024, 1024))
            times.append(time.perf_counter() - start)
        return 1.5 * min(times) / elements

    return {True: least(_CODED_ELEMENTS, coded), False: least(_PLAIN_ELEMENTS, lambda drawn: drawn.bfloat16().float())}


_CODED_ELEMENTS, _PLAIN_ELEMENTS = 4 << 20, 16 << 20
"""Too many for a cache; without codes, where memory is most of the time, also for memory that a process keeps for itself."""


def resolved(budget: Budget, backend: Backend, index: int) -> Budget:
    """The budget with the machine's own numbers where none are given: half of its memory, its last-level cache."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    on_device = backend.memory_info(index).total_bytes // 2
    return Budget(
        budget.repeats,
        budget.row_seconds,
        budget.memory_bytes or min(memory, on_device or memory),
        budget.cache_bytes or last_level_cache_bytes(backend.device(index), backend.capabilities(index).cache_bytes),
    )
