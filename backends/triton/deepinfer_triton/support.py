"""How an op file offers its kernel, and the refusals that several of them share.

A kernel answers Yes only when it serves every call that the statics leave open, so each check looks at what is named
and refuses what it cannot do; sizes that a call may still have are served by masking.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from deepinfer_hal.errors import BadCall
from deepinfer_hal.formats import GROUP_SIZE
from deepinfer_hal.kernel import CallSpec, Kernel, No, Yes

from deepinfer_triton.targets import Target

Supports = Callable[[CallSpec], Yes | No]

DENSE = ("bf16", "f32")
ACTIVATIONS = (*DENSE, "u8")
PRIORITY = 50

NVIDIA = ("interpreter", "sm90", "sm100", "sm103")
"""Targets of the kernels whose tiles were chosen for a GPU alone: the interpreter checks them, an NPU has its own."""


def offer(
    op: str,
    fn: Callable[..., None],
    *,
    supports: Supports,
    invariant: str = "yes",
    capturable: bool = True,
    targets: tuple[str, ...] | None = None,
) -> Callable[[Target], Kernel | None]:
    """A maker of the op's kernel for a target: None where `targets` leaves it out. `fn` takes the target first."""

    def make(target: Target) -> Kernel | None:
        if targets is not None and target.name not in targets:
            return None
        return Kernel(
            op,
            "triton",
            functools.partial(fn, target),
            f"triton::{op}[{target.name}]",
            invariant=invariant,
            capturable=capturable,
            priority=PRIORITY,
            supports=supports,
        )

    return make


def group_size(op: str, format: str) -> int:
    """Values that share a scale in a row format. BadCall for a format that does not exist."""
    if format not in GROUP_SIZE:
        raise BadCall(f"{op}: format {format!r} is not one of {', '.join(GROUP_SIZE)}")
    return GROUP_SIZE[format]


def serves(**known: tuple[Any, ...]) -> Supports:
    """Refuses a static that is named and not among the known ones, e.g. serves(x=DENSE, format=("fp8_32",))."""

    def supports(call: CallSpec) -> Yes | No:
        for name, values in known.items():
            got = call.statics.get(name)
            if got is not None and got not in values:
                return No(f"{name} is {got!r}; the kernel knows {', '.join(map(str, values))}")
        return Yes()

    return supports
