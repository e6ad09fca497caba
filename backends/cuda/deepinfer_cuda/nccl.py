"""Ranks on GPUs: NCCL moves bytes, windows into every rank's memory serve the expert exchange, the reference communicator's
store lets ranks meet.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from deepinfer_hal.communicator import Communicator, World
from deepinfer_hal.device_communicator import DeviceCommunicator
from deepinfer_hal.errors import BackendUnavailable
from deepinfer_triton.ranks.windows import SharedMemory, Windows, open_windows

from deepinfer_cuda import runtime
from deepinfer_cuda.peer_memory import PeerMemory

WATCHDOG_SLACK_S = 60.0
"""NCCL's own watchdog ends the whole process, so it gets longer than the deadline that names the missing rank."""

WINDOW_BYTES = 256 << 20
"""Of each rank's window: two halves, each with room for 13 000 rows of 5120 in BF16."""

DEVICE_SLACK_S = 60.0
"""What may be queued before a meeting, whose kernel keeps the deadline by itself."""

END_SECONDS = 0.2
"""What is left on the GPU when a world ends is over within this, or is not waited for."""


class NcclCommunicator(DeviceCommunicator):
    """NCCL wants a GPU for every rank. windows: what ep_dispatch and ep_combine go through, or why there are none."""

    runtime = runtime
    window_bytes = WINDOW_BYTES
    windows: Windows | str = "the communicator is not open"
    _memory: SharedMemory | None = None

    @classmethod
    def open(cls, world: World, device: torch.device) -> Communicator:
        joined = super().open(world, device)
        if isinstance(joined, NcclCommunicator):
            try:
                joined._connect(device)
            except BaseException:
                joined.close()
                raise
        return joined

    @classmethod
    def _process_group(cls, store: dist.Store, world: World) -> Any:
        group = getattr(dist, "ProcessGroupNCCL", None)
        if group is None:
            raise BackendUnavailable(f"ranks on GPUs need a torch with NCCL; {torch.__version__} has none")
        options = group.Options()
        options._timeout = timedelta(seconds=world.deadline_s + WATCHDOG_SLACK_S)
        return group(dist.PrefixStore("nccl", store), world.rank, world.size, options)

    def _connect(self, device: torch.device) -> None:
        """NCCL joins its ranks at the first transfer, and waits for them without a deadline: so here, where all have come."""
        self.exchange("connect", ())
        mine = torch.zeros(1, dtype=torch.uint8, device=device)
        self.all_gather(mine, torch.zeros(self.world_size, 1, dtype=torch.uint8, device=device))
        self._memory = self._shared_memory(device)
        self._status = runtime.pinned_empty((8,), torch.int32)
        self.windows = open_windows(self, self._memory, self.window_bytes, device, self._read)

    def _shared_memory(self, device: torch.device) -> SharedMemory:
        return PeerMemory(device.index or 0)

    def _read(self, state: torch.Tensor) -> Callable[[], list[int]]:
        index = self._carrier.index or 0
        self._status.copy_(state, non_blocking=True)
        here = runtime.place(index)

        def wait() -> list[int]:
            runtime.wait_bounded(index, self.deadline_s + DEVICE_SLACK_S, here)
            return self._status.tolist()

        return wait

    def _break(self, message: str, lost: tuple[int, ...] = ()) -> None:
        """A transfer that others have left spins on the GPU until the group is aborted. Windows stay mapped while kernels run."""
        super()._break(message, lost)
        group, self._group = self._group, None
        if group is not None:
            group.abort()
        if isinstance(self.windows, Windows):
            self.windows = f"the communicator is broken since {message}"
            with contextlib.suppress(RuntimeError, OSError):  # of a GPU that is lost, neither can be had
                runtime.wait_bounded(self._carrier.index or 0, END_SECONDS)
                self._memory.close()

    def close(self) -> None:
        whole = not self._broken
        super().close()
        if whole and self._memory is not None:
            self._memory.keep()
