"""Ranks on devices of their own, over a vendor's collectives; a backend adds the process group and its runtime.

Ranks meet on the host before every transfer, and a transfer is waited for with a deadline, so a rank that is late, dead
or in another call is named instead of waited for. That costs a round over the store each time; what it buys is that
nothing hangs. Kernels over peer memory replace the transfers of the MoE where a backend has them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from deepinfer_hal.event_time import NotDone
from deepinfer_hal.reference_communicator import ReferenceCommunicator

LOOK_SECONDS = 0.05
"""So often a rank that waits for a transfer asks whether the others still live."""


class DeviceCommunicator(ReferenceCommunicator):
    """runtime: a module with `open_device(index)` and `wait_bounded(index, seconds)`. Every rank needs a device."""

    shares_devices = False
    runtime: ClassVar[Any]

    @classmethod
    def _carrier_of(cls, device: torch.device) -> torch.device:
        cls.runtime.open_device(device.index or 0)
        return device

    def _move(self, start: Callable[[], Any]) -> None:
        """The vendor's own wait orders streams and returns; the deadline is kept by polling the stream, and ends early when a
        rank that dies can no longer take its part."""
        with self._transfer():
            start().wait()
            deadline = time.monotonic() + self.deadline_s
            while (left := deadline - time.monotonic()) > 0:
                try:
                    return self.runtime.wait_bounded(self._carrier.index or 0, min(left, LOOK_SECONDS))
                except NotDone as late:
                    if any(self._hearts.gone(rank) for rank in range(self.world_size) if rank != self.rank):
                        raise late from None
            raise NotDone(f"the transfer was not over after {self.deadline_s:g} s")
