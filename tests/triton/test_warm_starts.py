"""A warm start takes the kernel that Triton would take: its own key is asked, call by call. Needs Triton, and no GPU."""

from __future__ import annotations

import os
import types

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not in this environment")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from deepinfer_triton import launch as launches  # noqa: E402
from deepinfer_triton import warm  # noqa: E402
from deepinfer_triton.ops.copy_rows import copy_rows_kernel  # noqa: E402
from deepinfer_triton.ops.rms_norm import rms_norm_kernel  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import make_backend  # noqa: E402
from triton.runtime import jit  # noqa: E402

if ".".join(triton.__version__.split(".")[:2]) not in warm.TESTED:
    pytest.skip(f"warm starts are not for Triton {triton.__version__}", allow_module_level=True)


class Starts:
    """In place of a GPU: `own` has the calls that went Triton's own way, `warm` those that did not, by the key under which Triton
    keeps the kernel that was started."""

    def __init__(self) -> None:
        self.own: list[str] = []
        self.warm: list[tuple[str, tuple]] = []
        self.keys: dict = {}

    def run(self, kernel, *args, grid, warmup, **named):
        """JITFunction.run up to the compiled kernel, which is the key's name."""
        _, specialised, options = kernel.device_caches[0][-1](*args, **named)
        self.own.append(jit.compute_cache_key(self.keys, specialised, options))
        return self.own[-1]

    def of(self, kernel, made):
        return warm._Compiled(kernel, lambda *passed: self.warm.append((made, passed)), ("function",))


@pytest.fixture
def starts(monkeypatch):
    made, backend = Starts(), make_backend(GPUTarget("cuda", 90, 32))
    for kernel in (rms_norm_kernel, copy_rows_kernel):
        binder = jit.create_function_from_signature(kernel.signature, kernel.params, backend)
        monkeypatch.setattr(kernel, "device_caches", {0: ({}, {}, None, backend, binder)})
    monkeypatch.setattr(jit.JITFunction, "run", lambda kernel, *args, **named: made.run(kernel, *args, **named))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 77, raising=False)
    monkeypatch.setattr(warm, "KERNEL", jit.JITFunction)
    monkeypatch.setattr(warm, "_known", {})
    monkeypatch.setattr(warm, "_of", made.of)
    return made


ROWS = torch.zeros(64, dtype=torch.float32)
ALIGNED, ODD = ROWS[16:], ROWS[17:]

COPIES = [
    (source, stride, rows, goal, row_bytes, tile, warps)
    for source in (ALIGNED, ODD, ALIGNED.view(torch.int32))
    for stride in (1, 16, 24, 48, 1 << 31, (1 << 31) + 8)
    for rows, goal in ((ALIGNED, ODD), (None, ALIGNED))
    for row_bytes, tile, warps in ((16, 16, 4), (17, 16, 4), (17, 32, 4), (17, 32, 8))
]


def copy(source, stride, rows, goal, row_bytes, tile, warps) -> None:
    launches.launch(copy_rows_kernel, (3, 2), source, stride, rows, ALIGNED, goal, 16, row_bytes, TILE=tile, warps=warps)


def test_a_warm_start_takes_the_kernel_that_triton_would_take(starts):
    for one in COPIES:
        copy(*one)
    compiled = list(dict.fromkeys(starts.own))
    assert len(compiled) > 20 and len(starts.own) == len(compiled), "Triton was asked for a kernel that was known"
    starts.own.clear(), starts.warm.clear()
    for one in COPIES:
        copy(*one)
        source, stride, rows, goal, row_bytes, tile, warps = one
        args, named = (source, stride, rows, ALIGNED, goal, 16, row_bytes), {"TILE": tile, "num_warps": warps, "num_stages": 2}
        wanted = starts.run(copy_rows_kernel, *args, grid=None, warmup=False, **named)
        assert starts.warm[-1][0] == wanted
    assert len(starts.warm) == len(starts.own) == len(COPIES)


def test_a_launcher_gets_grid_stream_and_all_arguments_in_the_kernels_order(starts):
    for _ in range(2):
        launches.launch(copy_rows_kernel, (3,), ALIGNED, 4, ODD, None, ALIGNED, 5, 6, TILE=32)
    ((_, passed),) = starts.warm
    assert passed[:5] == (3, 1, 1, 77, "function") and passed[6] == 4 and passed[8] is None and passed[10:] == (5, 6, 32)
    assert passed[5] is ALIGNED and passed[7] is ODD and passed[9] is ALIGNED


def test_an_argument_that_is_not_specialised_needs_no_other_kernel(starts):
    for rows in (1, 16, 17):
        args = (ALIGNED, 8, ALIGNED, 1e-6, None, rows, ALIGNED, 8, None, None)
        launches.launch(rms_norm_kernel, (rows,), *args, N=8, TILE=32)
    assert len(starts.own) == 1 and [passed[0] for _, passed in starts.warm] == [16, 17]


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_calls_go_tritons_own_way_while_a_hook_is_set(starts, monkeypatch, hook):
    chain = type(getattr(triton.knobs.runtime, hook))()
    monkeypatch.setattr(triton.knobs.runtime, hook, chain)
    copy(*COPIES[0])
    chain.add(print)
    copy(*COPIES[0])
    assert len(starts.own) == 2 and not starts.warm
    chain.remove(print)
    copy(*COPIES[0])
    assert len(starts.own) == 2 and len(starts.warm) == 1


def test_an_empty_grid_starts_nothing(starts):
    launches.launch(copy_rows_kernel, (3, 0), ALIGNED, 4, ODD, None, ALIGNED, 5, 6, TILE=32)
    assert not starts.own and not starts.warm


def test_what_needs_scratch_memory_or_is_no_compiled_kernel_is_left_to_triton():
    assert warm._of(copy_rows_kernel, None) is None
    assert warm._of(copy_rows_kernel, types.SimpleNamespace(run=None)) is None
