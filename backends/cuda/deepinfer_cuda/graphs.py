"""Captured steps on a GPU: torch.cuda.CUDAGraph. State: `runs` on an H200 (reports/h200/rank-slice.json).

What a captured step must keep to, or its replay is wrong:
- every tensor it touches stays where it is: inputs are copied into the buffers of the captured call, never replaced;
- a graph is made for a number of rows, and a smaller step is padded to it. Padded rows carry index -1, or lie past the
  device count, so that kernels leave their outputs untouched;
- only kernels that say `capturable` may be launched: they neither allocate nor wait;
- lengths and block tables are read from device memory, so they may change between replays;
- a collective inside a graph must be captured by every rank. The communicator here meets its ranks on the host, so a
  step with collectives is not captured whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

WARM_UP_RUNS = 2
"""Runs before a capture, so that whatever is made on first use is there: compiled kernels, workspaces, libraries."""


class CudaGraphs:
    """Captures and replays steps of one device. All graphs share one memory pool, which `pool_bytes` counts for the memory plan,
    so one must have ended before another is replayed: they are replayed on one stream."""

    def __init__(self, index: int) -> None:
        self.index = index
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device=index)
        self.pool_bytes = 0

    def capture(self, step: Callable[[], None]) -> Any:
        """The graph of `step`, which is run a few times first: those runs compile its kernels. `replay()` enqueues it
        again, `reset()` frees it.

        A step that waits for the device or reads a value on the host makes this raise CUDA's own error.
        """
        with torch.cuda.device(self.index):
            self._stream.wait_stream(torch.cuda.current_stream(self.index))
            with torch.cuda.stream(self._stream):
                for _ in range(WARM_UP_RUNS):
                    step()
            torch.cuda.synchronize(self.index)
            torch.cuda.empty_cache()  # what the runs left would be counted against the graph
            before = torch.cuda.memory_reserved(self.index)
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                    step()
            except BaseException:
                self._leave_pool()
                raise
            self.pool_bytes += max(0, torch.cuda.memory_reserved(self.index) - before)
        return graph

    def _leave_pool(self) -> None:
        """After a capture that failed, torch may still give this pool's memory to what asks on the capture's stream, and takes no
        other capture into it: that is ended, and the next capture begins a pool."""
        end = getattr(torch._C, "_cuda_endAllocateToPool", None)
        if end is not None:
            with contextlib.suppress(RuntimeError):  # where torch has ended it
                end(self.index, self._pool)
        self._pool = torch.cuda.graph_pool_handle()
