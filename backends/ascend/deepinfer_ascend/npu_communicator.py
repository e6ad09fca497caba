"""Ranks on NPUs: HCCL moves the bytes, the reference communicator's store lets ranks meet. State: `written`."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from deepinfer_hal.communicator import World
from deepinfer_hal.device_communicator import DeviceCommunicator

from deepinfer_ascend import npu_runtime


class HcclCommunicator(DeviceCommunicator):
    """HCCL wants a device for every rank."""

    runtime = npu_runtime

    @classmethod
    def _process_group(cls, store: dist.Store, world: World) -> Any:
        import torch_npu

        group = torch_npu._C._distributed_c10d.ProcessGroupHCCL
        limit = timedelta(seconds=world.deadline_s)
        return group(dist.PrefixStore("hccl", store), world.rank, world.size, timeout=limit)
