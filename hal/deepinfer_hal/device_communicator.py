"""Ranks on devices of their own, over a vendor's collectives; a backend adds the process group and its runtime.

Ranks meet on the host before every transfer, and a transfer is waited for with a deadline, so a rank that is late, dead
or in another call is named instead of waited for. That costs a round over the store each time; what it buys is that
nothing hangs. Kernels over peer memory replace the transfers of the MoE where a backend has them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from deepinfer_hal.reference_communicator import ReferenceCommunicator


class DeviceCommunicator(ReferenceCommunicator):
    """runtime: a module with `open_device(index)` and `wait_bounded(index, seconds)`. Every rank needs a device."""

    shares_devices = False
    runtime: ClassVar[Any]

    @classmethod
    def _carrier_of(cls, device: torch.device) -> torch.device:
        cls.runtime.open_device(device.index or 0)
        return device

    def _move(self, start: Callable[[], Any]) -> None:
        """The vendor's own wait orders streams and returns; the deadline is kept by polling the stream."""
        with self._transfer():
            start().wait()
            self.runtime.wait_bounded(self._carrier.index or 0, self.deadline_s)
