"""What this machine can do at best, measured in the same run: bytes per second by a copy, FLOP/s by matrix products."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_SMALLEST_COPY_BYTES = 4 << 20
_LARGEST_COPY_BYTES = 256 << 20
_GEMM_SIZE = 1024
_REPEATS = 7


@dataclass(frozen=True)
class Ceilings:
    """bandwidth: bytes read and written per second by a copy of `copy_bytes`; flops: the best of `gemm_flops`, by dtype."""

    bandwidth: float
    copy_bytes: int
    flops: float
    gemm_flops: dict[str, float]

    def seconds(self, nbytes: int, flops: int) -> float:
        """The least time of work that moves so many bytes and does so many FLOPs."""
        return max(nbytes / self.bandwidth, flops / self.flops)

    def best(self, other: Ceilings) -> Ceilings:
        """The higher of each: what else runs on a machine can only lower a measured ceiling."""
        gemm = {name: max(value, other.gemm_flops.get(name, 0.0)) for name, value in self.gemm_flops.items()}
        flops = max(self.flops, other.flops)
        return Ceilings(max(self.bandwidth, other.bandwidth), self.copy_bytes, flops, gemm)


def measure_ceilings(backend: Any, index: int, working_set_bytes: int) -> Ceilings:
    """Copies as many bytes as a step reads (clamped), so that a model which fits a cache is held to the cache's speed."""
    device, clock = backend.device(index), backend.timer(index)

    def seconds(work: Callable[[], Any], loops: int) -> float:
        times = []
        for _ in range(_REPEATS + 1):
            backend.synchronize(index)
            start = clock()
            for _ in range(loops):
                work()
            backend.synchronize(index)
            times.append((clock() - start) / loops)
        return min(times[1:])

    copy_bytes = max(_SMALLEST_COPY_BYTES, min(working_set_bytes, _LARGEST_COPY_BYTES))
    source = torch.zeros(copy_bytes, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    bandwidth = 2 * copy_bytes / seconds(lambda: target.copy_(source), max(1, (64 << 20) // copy_bytes))
    gemm = {}
    for dtype in (torch.float32, torch.bfloat16):
        factor = torch.full((_GEMM_SIZE, _GEMM_SIZE), 0.5, dtype=dtype, device=device)
        product = torch.empty_like(factor)
        least = seconds(functools.partial(torch.mm, factor, factor, out=product), 1)
        gemm[str(dtype).removeprefix("torch.")] = 2 * _GEMM_SIZE**3 / least
    return Ceilings(bandwidth, copy_bytes, max(gemm.values()), gemm)


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and largest of some measurements."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}
