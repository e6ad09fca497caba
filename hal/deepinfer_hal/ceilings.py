"""What this machine can do at best, measured in the same run: bytes per second by a copy, FLOP/s by matrix products."""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_SMALLEST_COPY_BYTES = 4 << 20
_LARGEST_COPY_BYTES = 256 << 20
_DEVICE_COPY_BYTES, _DEVICE_COPIES = 1 << 30, 4
"""On an accelerator: neither a launch nor a cache shows."""

_GEMM_SIZES = (1024, 2048, 4096, 8192)
_GEMM_SECONDS = 5e-4
_REPEATS = 7


@dataclass(frozen=True)
class Ceilings:
    """bandwidth: bytes read and written per second by a copy of `copy_bytes`; flops: the best of `gemm_flops`, by dtype:
    float32, bfloat16, and float8_e4m3fn on a device that multiplies such numbers."""

    bandwidth: float
    copy_bytes: int
    flops: float
    gemm_flops: dict[str, float]

    def seconds(self, nbytes: int, flops: int, dtype: str = "") -> float:
        """The least time of work that moves so many bytes and does so many FLOPs; dtype: at the rate of that type's products
        where it was measured, else at the best one."""
        return max(nbytes / self.bandwidth, flops / self.gemm_flops.get(dtype, self.flops))

    def best(self, other: Ceilings) -> Ceilings:
        """The higher of each: what else runs on a machine can only lower a measured ceiling."""
        gemm = {name: max(value, other.gemm_flops.get(name, 0.0)) for name, value in self.gemm_flops.items()}
        flops = max(self.flops, other.flops)
        return Ceilings(max(self.bandwidth, other.bandwidth), self.copy_bytes, flops, gemm)


def measure_ceilings(backend: Any, index: int, working_set_bytes: int) -> Ceilings:
    """Copies as many bytes as a step reads (clamped), so that a model which fits a cache is held to the cache's speed; on an
    accelerator a gigabyte."""
    device, clock = backend.device(index), backend.timer(index)
    host = device.type == "cpu"

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

    copy_bytes = max(_SMALLEST_COPY_BYTES, min(working_set_bytes, _LARGEST_COPY_BYTES)) if host else _DEVICE_COPY_BYTES
    loops = max(1, (64 << 20) // copy_bytes) if host else _DEVICE_COPIES
    source = torch.randint(0, 256, (copy_bytes,), dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    bandwidth = 2 * copy_bytes / seconds(lambda: target.copy_(source), loops)
    gemm = {}
    for dtype in (torch.float32, torch.bfloat16):
        gemm[_name(dtype)] = _best_gemm(seconds, functools.partial(_dense_product, dtype, device))
    if backend.capabilities(index).float8:
        with contextlib.suppress(RuntimeError, NotImplementedError):  # the device may have the type and torch no product
            gemm[_name(torch.float8_e4m3fn)] = _best_gemm(seconds, functools.partial(_float8_product, device))
    return Ceilings(bandwidth, copy_bytes, max(gemm.values()), gemm)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _best_gemm(seconds: Callable[[Callable[[], Any], int], float], product: Callable[[int], Callable[[], Any]]) -> float:
    """FLOP/s of square products, larger ones as long as one is too short to fill the device."""
    best = 0.0
    for size in _GEMM_SIZES:
        least = seconds(product(size), 1)
        best = max(best, 2 * size**3 / least)
        if least > _GEMM_SECONDS:
            break
    return best


def _dense_product(dtype: torch.dtype, device: torch.device, size: int) -> Callable[[], Any]:
    factor = torch.randn(size, size, device=device).to(dtype)
    return functools.partial(torch.mm, factor, factor, out=torch.empty_like(factor))


def _float8_product(device: torch.device, size: int) -> Callable[[], Any]:
    factor = torch.randn(size, size, device=device).to(torch.float8_e4m3fn)
    one = torch.ones((), device=device)
    return lambda: torch._scaled_mm(factor, factor.t(), one, one, out_dtype=torch.bfloat16)


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and largest of some measurements."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}
