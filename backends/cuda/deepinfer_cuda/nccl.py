"""Ranks on GPUs: NCCL moves the bytes, the reference communicator's store lets ranks meet. State: `written`."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from deepinfer_hal.communicator import World
from deepinfer_hal.device_communicator import DeviceCommunicator
from deepinfer_hal.errors import BackendUnavailable

from deepinfer_cuda import runtime

WATCHDOG_SLACK_S = 60.0
"""NCCL's own watchdog ends the whole process, so it gets longer than the deadline that names the missing rank."""


class NcclCommunicator(DeviceCommunicator):
    """NCCL wants a GPU for every rank."""

    runtime = runtime

    @classmethod
    def _process_group(cls, store: dist.Store, world: World) -> Any:
        group = getattr(dist, "ProcessGroupNCCL", None)
        if group is None:
            raise BackendUnavailable(f"ranks on GPUs need a torch with NCCL; {torch.__version__} has none")
        options = group.Options()
        options._timeout = timedelta(seconds=world.deadline_s + WATCHDOG_SLACK_S)
        return group(dist.PrefixStore("nccl", store), world.rank, world.size, options)
