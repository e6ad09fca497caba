"""Ranks on NPUs: HCCL moves the bytes, the reference communicator's store lets ranks meet. State: `written`.

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
from deepinfer_hal.reference_communicator import ReferenceCommunicator

from deepinfer_ascend import npu_runtime


class HcclCommunicator(ReferenceCommunicator):
    """See the module docstring. HCCL wants a device for every rank."""

    shares_devices = False

    @classmethod
    def _carrier_of(cls, device: torch.device) -> torch.device:
        npu_runtime.open_device(device.index or 0)
        return device

    @classmethod
    def _process_group(cls, store: dist.Store, world: World) -> Any:
        import torch_npu

        group = torch_npu._C._distributed_c10d.ProcessGroupHCCL
        limit = timedelta(seconds=world.deadline_s)
        return group(dist.PrefixStore("hccl", store), world.rank, world.size, timeout=limit)

    def _move(self, start: Callable[[], Any]) -> None:
        """HCCL's own wait orders streams and returns; the deadline is kept by polling the stream."""
        with self._transfer():
            start().wait()
            npu_runtime.wait_bounded(self._carrier.index or 0, self.deadline_s)
