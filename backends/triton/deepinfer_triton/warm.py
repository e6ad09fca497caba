"""Starts kernels that Triton has compiled without what `kernel[grid](...)` does again at each call.

That takes 40 to 60 us of the host on an H200's machine, a launch 5 to 10 of them: the rest turns options into text, reads the
environment, compares the globals that a kernel uses with what they were, and prepares hooks that nobody has set. Here Triton's
own binder specialises the arguments (dtypes, divisibility by 16, the value 1, None, constants), so that a compiled kernel is
found for exactly the calls for which Triton would take it, and the launcher that it was compiled with starts it. A call of
another kind, and all calls where hooks are set, go Triton's own way.

What Triton compares at each call and this does not: globals of a kernel that change after its first start, and the environment
(TRITON_INSTRUMENTATION_MODE).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

TESTED = ("3.6",)
"""Releases of Triton whose binder and launcher are used here; kernels of others are started Triton's own way."""

KERNEL = JITFunction if ".".join(triton.__version__.split(".")[:2]) in TESTED and torch.version.cuda else None
"""The type of the kernels that `start` starts: none that are interpreted or autotuned."""


@dataclass(frozen=True)
class _Compiled:
    """A loaded kernel: its launcher's C function, and what that takes between the stream and the arguments. kernel: kept, since
    its id is in the key."""

    kernel: Any
    launch: Any
    before: tuple[Any, ...]


_known: dict[tuple[Any, ...], _Compiled] = {}


def start(
    kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: Mapping[str, Any], options: Mapping[str, Any]
) -> None:
    """As `kernel[grid](*args, **constants, **options)`; `grid` has no zeros."""
    device = torch._C._cuda_getDevice()
    runtime = triton.knobs.runtime
    values, specialised, _ = kernel.device_caches[device][-1](*args, **constants)
    key = (id(kernel), device, runtime.debug, *options.items(), *specialised)
    compiled = _known.get(key)
    if compiled is None or kernel.pre_run_hooks or _hooked(runtime.launch_enter_hook) or _hooked(runtime.launch_exit_hook):
        made = kernel[grid](*args, **constants, **options)
        if compiled is None and (found := _of(kernel, made)) is not None:
            _known[key] = found
        return
    stream = torch._C._cuda_getCurrentRawStream(device)
    compiled.launch(*grid, *_ONES[len(grid)], stream, *compiled.before, *values.values())


_ONES = ((1, 1, 1), (1, 1), (1,), ())
"""Sizes that a grid of so many dimensions leaves out."""


def _hooked(chain: Any) -> bool:
    """Whether something is to be called at a launch: a chain of hooks that is not empty, or what has replaced it."""
    return chain is not None and bool(getattr(chain, "calls", True))


def _of(kernel: Any, made: Any) -> _Compiled | None:
    """How to start what Triton has just started; None for what needs more than arguments."""
    from triton.backends.nvidia.driver import CudaLauncher
    from triton.compiler import CompiledKernel

    if type(made) is not CompiledKernel or type(made.run) is not CudaLauncher or kernel.pre_run_hooks:
        return None
    run = made.run
    if run.global_scratch_size or run.profile_scratch_size:
        return None
    no_memory, no_hooks = (None, None), (None, None, None)
    before = (made.function, run.launch_cooperative_grid, run.launch_pdl, *no_memory, made.packed_metadata, *no_hooks)
    return _Compiled(kernel, run.launch, before)
