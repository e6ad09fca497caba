"""A backend on host memory for the tests of `hal bench`, and ceilings that do not depend on what else this machine does."""

from __future__ import annotations

import pytest
import torch
from deepinfer_hal import bench
from deepinfer_hal.backend import Backend, Capabilities, DeviceInfo
from deepinfer_hal.bench import Budget
from deepinfer_hal.card import get_card
from deepinfer_hal.ceilings import Ceilings
from deepinfer_hal.kernel import Kernel

BUDGET = Budget(repeats=3, row_seconds=20.0, memory_bytes=1 << 30, cache_bytes=1 << 19)
CEILINGS = Ceilings(bandwidth=1e12, copy_bytes=1, flops=1e15, gemm_flops={})
"""Of no machine here: floors that every kernel stays above."""


class Bench(Backend):
    """Host memory, with wrapped references as kernels."""

    name = "bench"

    def __init__(self, *kernels: Kernel) -> None:
        self._kernels = kernels

    def probe(self) -> list[DeviceInfo]:
        return [DeviceInfo(0, "a test's device", 1 << 30, {})]

    def device(self, index: int) -> torch.device:
        return torch.device("cpu")

    def capabilities(self, index: int) -> Capabilities:
        return Capabilities()

    def kernels(self, index: int) -> tuple[Kernel, ...]:
        return self._kernels


def kernel(op: str, fn=None, symbol: str = "") -> Kernel:
    return Kernel(op, "test", fn or get_card(op).reference, symbol or f"reference::{op}+wrapped", "yes")


@pytest.fixture(autouse=True)
def known_ceilings(monkeypatch):
    """Shares do not depend on what else this machine does."""
    monkeypatch.setattr(bench, "measure_ceilings", lambda *_: CEILINGS)
