"""A stand-in for a device's graphs on the host: a kernel enqueues by `launch`, and a capture keeps what was enqueued."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

Work = Callable[[], None]


class Graphs:
    """The graphs slot of one device. `launch(work)` does the work, or keeps it while a step is captured."""

    def __init__(self) -> None:
        self._kept: list[Work] | None = None

    def launch(self, work: Work) -> None:
        work() if self._kept is None else self._kept.append(work)

    def capture(self, step: Work) -> Graph:
        step()
        self._kept = []
        try:
            step()
            return Graph(self._kept)
        finally:
            self._kept = None


class Graph:
    def __init__(self, kept: list[Work]) -> None:
        self._kept = kept

    def replay(self) -> None:
        for work in self._kept:
            work()

    def reset(self) -> None:
        self._kept = []


def sums_of_one_rank(graphs: Graphs, keep: bool) -> Callable[..., None]:
    """all_reduce of one rank as a kernel that enqueues a copy; `keep`: of what x held when it was called, which is wrong."""
    from deepinfer_hal.errors import BadCall
    from deepinfer_hal.ops import all_reduce

    def fn(comm: Any, x: torch.Tensor, operation: str, out: torch.Tensor) -> None:
        if operation not in all_reduce.OPERATIONS:
            raise BadCall(f"operation {operation!r}")
        source = torch.from_numpy(np.array(x.numpy())) if keep else x
        graphs.launch(lambda: out.copy_(source))

    return fn
