"""A stand-in for a device's graphs on the host: a kernel enqueues by `launch`, and a capture keeps what was enqueued, torch's
own operators too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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
            with _Operators(self._kept):
                step()
            return Graph(self._kept)
        finally:
            self._kept = None


class _Operators(TorchDispatchMode):
    """Keeps operators with their arguments; a replay leaves results in the memory that they had."""

    def __init__(self, kept: list[Work]) -> None:
        super().__init__()
        self._kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))

        def again() -> None:
            for old, new in zip(tree_leaves(result), tree_leaves(func(*args, **(kwargs or {}))), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

        self._kept.append(again)
        return result


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
