"""Ranks on GPUs: NCCL moves the bytes, the reference communicator's store lets ranks meet. State: `written`.

Ranks meet on the host before every transfer, and a transfer is waited for with a deadline, so a rank that is late, dead
or in another call is named instead of waited for. That costs a round over the store each time; what it buys is that
nothing hangs. Kernels over peer memory would replace the transfers of the MoE.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from deepinfer_hal.communicator import World
from deepinfer_hal.errors import BackendUnavailable
from deepinfer_hal.reference_communicator import ReferenceCommunicator

from deepinfer_cuda import runtime

WATCHDOG_SLACK_S = 60.0
"""NCCL's own watchdog ends the whole process, so it gets longer than the deadline that names the missing rank."""


class NcclCommunicator(ReferenceCommunicator):
    """See the module docstring. NCCL wants a GPU for every rank."""

    shares_devices = False

    @classmethod
    def _carrier_of(cls, device: torch.device) -> torch.device:
        runtime.open_device(device.index or 0)
        return device

    @classmethod
    def _process_group(cls, store: dist.Store, world: World) -> Any:
        group = getattr(dist, "ProcessGroupNCCL", None)
        if group is None:
            raise BackendUnavailable(f"ranks on GPUs need a torch with NCCL; {torch.__version__} has none")
        options = group.Options()
        options._timeout = timedelta(seconds=world.deadline_s + WATCHDOG_SLACK_S)
        return group(dist.PrefixStore("nccl", store), world.rank, world.size, options)

    def _move(self, start: Callable[[], Any]) -> None:
        """NCCL's own wait orders streams and returns; the deadline is kept by polling the stream."""
        with self._transfer():
            start().wait()
            runtime.wait_bounded(self._carrier.index or 0, self.deadline_s)
