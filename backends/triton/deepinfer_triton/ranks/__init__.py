"""Kernels of the communication cards: `rank_kernels(target)`. How ranks share memory is in `windows.py`."""

from __future__ import annotations

from deepinfer_hal.kernel import Kernel

from deepinfer_triton.targets import Target


def rank_kernels(target: Target) -> list[Kernel]:
    """The kernels of the communication group for `target`; none of them is for an NPU, whose ranks have kernels of their own.

    They state capturable = False: a call waits for the device once, or meets the other ranks on the host, so that what the
    cards raise is raised by the call.
    """
    from deepinfer_triton.ranks import collectives, combine, dispatch

    makers = (*collectives.MAKERS, *dispatch.MAKERS, *combine.MAKERS)
    return [kernel for make in makers if (kernel := make(target)) is not None]
