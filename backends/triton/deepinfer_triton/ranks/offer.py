"""How a kernel of the communication group is offered."""

from __future__ import annotations

import functools
from collections.abc import Callable

from deepinfer_hal.kernel import Kernel

from deepinfer_triton.support import NVIDIA, PRIORITY
from deepinfer_triton.targets import Target


def offer(op: str, fn: Callable[..., None]) -> Callable[[Target], Kernel | None]:
    """A maker of the op's kernel for a target: None for an NPU. `fn` takes the target, then the card's arguments."""

    def make(target: Target) -> Kernel | None:
        if target.name not in NVIDIA:
            return None
        symbol = f"triton::{op}[{target.name}]"
        return Kernel(op, "triton", functools.partial(fn, target), symbol, invariant="yes", priority=PRIORITY)

    return make
