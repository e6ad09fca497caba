"""Which kernels a GPU gets: CUDA C++ where the library is for it, the Triton kernels of its target, each launched on that GPU.

Both may serve an op; the CUDA C++ kernel has the higher priority, and answers No to what it was not written for.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from deepinfer_hal.kernel import CallSpec, Kernel, No, Yes
from deepinfer_triton.provider import triton_kernels
from deepinfer_triton.ranks import rank_kernels
from deepinfer_triton.targets import Target, cuda_target

from deepinfer_cuda import gpu, native


def kernels_of(found: gpu.Gpu) -> list[Kernel]:
    """The kernels for this GPU; none where `gpu.missing_for_kernels` has a reason and there is no library either, so that the
    references serve."""
    made = native.kernels(found.capability, torch.device("cuda", found.index))
    made += [_beside_fragments(kernel) for kernel in _portable(found)] if made else _portable(found)
    return made if torch.cuda.device_count() == 1 else [_on_device(kernel, found.index) for kernel in made]


def _portable(found: gpu.Gpu) -> list[Kernel]:
    target = cuda_target(*found.capability)
    missing = gpu.missing_for_kernels(found) or not isinstance(target, Target)
    return [] if missing else [*triton_kernels(target), *rank_kernels(target)]


def _beside_fragments(kernel: Kernel) -> Kernel:
    """A portable kernel reads the checkpoint's bytes: where experts are kept as fragments it would have them unpacked in memory
    at each call, so it leaves those to the CUDA C++ kernel."""
    if kernel.op != "grouped_gemm":
        return kernel

    def supports(call: CallSpec) -> Yes | No:
        if native.kept_as_fragments(call):
            return No("experts of this size are kept as fragments, which the CUDA C++ kernel alone reads")
        return kernel.supports(call)

    return dataclasses.replace(kernel, supports=supports)


def _on_device(kernel: Kernel, index: int) -> Kernel:
    """A launch goes to the thread's current GPU, whatever GPU the tensors are on; where there are several, each call says
    which."""
    return dataclasses.replace(kernel, fn=functools.partial(_call_on, index, kernel.fn))


def _call_on(index: int, fn: Callable[..., None], *args: Any) -> None:
    with torch.cuda.device(index):
        fn(*args)
