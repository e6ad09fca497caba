"""Captured steps on an NPU: torch_npu's NPUGraph. State: `written`.

What a captured step must keep to, or its replay is wrong:
- every tensor it touches stays where it is: inputs are copied into the buffers of the captured call, never replaced;
- a graph is made for a number of rows, and a smaller step is padded to it. Padded rows carry index -1, or lie past the
  device count, so that kernels leave their outputs untouched;
- only kernels that say `capturable` may be launched: they neither allocate nor wait;
- tilings, lengths and block tables are read from device memory, so they may change between replays;
- a collective inside a graph must be captured by every rank. The communicator here meets its ranks on the host, so a
  step with collectives is not captured whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepinfer_ascend import npu_runtime

WARM_UP_RUNS = 2
"""Runs before a capture, so that whatever is made on first use is there: workspaces, libraries, vendor kernels."""


class NpuGraphs:
    """Captures and replays steps of one device. All graphs share one memory pool, which `pool_bytes` counts for the
    memory plan."""

    def __init__(self, index: int) -> None:
        import torch_npu

        self.index = index
        self._pool = torch_npu.npu.graph_pool_handle()
        self._stream = torch_npu.npu.Stream(device=index)
        self.pool_bytes = 0

    def capture(self, step: Callable[[], None]) -> Any:
        """The graph of `step`, which is run a few times first. `replay()` enqueues it again, `reset()` frees it.

        A step that waits for the device or reads a value on the host makes this raise torch_npu's own error.
        """
        import torch_npu

        self._stream.wait_stream(torch_npu.npu.current_stream(self.index))
        with torch_npu.npu.stream(self._stream):
            for _ in range(WARM_UP_RUNS):
                step()
        npu_runtime.synchronize(self.index)
        before = torch_npu.npu.memory_reserved(self.index)
        graph = torch_npu.npu.NPUGraph()
        with torch_npu.npu.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            step()
        self.pool_bytes += max(0, torch_npu.npu.memory_reserved(self.index) - before)
        return graph
