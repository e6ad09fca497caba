"""A kernel that starts while the kernel before it on the stream still runs, so that its launch costs less.

Such a kernel calls `overlap()` before it touches memory: it lets the kernel after it start, and waits until the one before
has ended and what it wrote is seen. It is started with `launch(..., early=True)`; both are needed, and without the hardware
neither does anything.
"""

from __future__ import annotations

import contextlib

import triton
import triton.language as tl

from deepinfer_triton.numeric import NATIVE_FP8

with contextlib.suppress(ImportError):
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

OVERLAPS = tl.constexpr(NATIVE_FP8.value and "gdc_wait" in globals())
"""Whether the compiler's target has such starts: NVIDIA GPUs from compute capability 9.0 on."""


@triton.jit
def overlap():
    """See the module's docstring."""
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
