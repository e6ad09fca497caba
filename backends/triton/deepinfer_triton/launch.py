"""The one way a kernel is started, so that what is assembled without a device is what would be started on one.

with recording() as made: rms_norm(SM100, x, ...)      # tensors may be on the meta device
made[0].kernel, made[0].args, made[0].constants        # nothing ran
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from deepinfer_triton import overlap, warm


@dataclass(frozen=True)
class Launch:
    """A start of `kernel` on `grid`: run-time arguments in order, constants and compiler options by name."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__


_recorders: list[list[Launch]] = []


@contextlib.contextmanager
def recording() -> Iterator[list[Launch]]:
    """Starts inside are collected and not run. For tools, not thread safe."""
    made: list[Launch] = []
    _recorders.append(made)
    try:
        yield made
    finally:
        _recorders.pop()


def launch(
    kernel: Any, grid: tuple[int, ...], *args: Any, warps: int = 4, stages: int = 2, early: bool = False,
    unfused: bool = False, **constants: Any,
) -> None:  # fmt: skip
    """Starts `kernel` with its run-time arguments in order and its constants by name; an empty grid starts nothing.

    early: the kernel calls `overlap()` first, so it may start while the one before it runs. unfused: a product is rounded
    before it is added.
    """
    if 0 in grid:
        return
    options: dict[str, Any] = {"num_warps": warps, "num_stages": stages}
    if unfused:
        options["enable_fp_fusion"] = False
    if early:
        options |= {"launch_pdl": True} if overlap.OVERLAPS.value else {}
    if _recorders:
        _recorders[-1].append(Launch(kernel, grid, args, constants, options))
        return
    if type(kernel) is warm.KERNEL:
        warm.start(kernel, grid, args, constants, options)
    else:
        kernel[grid](*args, **constants, **options)
