"""The CUDA C++ kernels for Hopper, bound through the C ABI. `tools/cuda/build_kernels.sh` makes the library beside this file."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from deepinfer_hal.c_abi import CLibrary
from deepinfer_hal.kernel import CallSpec, Kernel, No, Yes

from deepinfer_cuda import packing, weights
from deepinfer_cuda.dense import checked
from deepinfer_cuda.native_library import CAPABILITY, LIBRARY
from deepinfer_cuda.serves_linear import serves_linear
from deepinfer_cuda.small_ops import (
    serves_quantise,
    serves_route,
    serves_site,
    serves_swiglu,
    serves_top_logprobs,
    serves_unpermute,
)  # fmt: skip
from deepinfer_cuda.workspaces import Workspaces

WORKSPACE_BYTES = 256 << 20
PRIORITY = 100
"""Above the Triton kernels'."""


@functools.cache
def library(device: torch.device) -> CLibrary:
    """The library bound to a device: calls go to the stream that is current there."""
    return CLibrary(
        LIBRARY, stream=_current_stream(device), pack=packing.tensors_of(device), pack_weight=packing.weights_of(device),
        workspace=Workspaces(device, WORKSPACE_BYTES),
    )  # fmt: skip


def _current_stream(device: torch.device) -> Callable[[], int]:
    """What gives the device's current stream (a cudaStream_t): cheaply where torch has a way without an object."""
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if raw is None or device.index is None:
        return lambda: torch.cuda.current_stream(device).cuda_stream
    return functools.partial(raw, device.index)


def kernels(capability: tuple[int, int], device: torch.device) -> list[Kernel]:
    """One kernel for every op that the library exports; none without the library or on another architecture."""
    if capability != CAPABILITY or not LIBRARY.is_file():
        return []
    made = library(device).kernels("cuda", invariant="yes", capturable=True, priority=PRIORITY, supports=supports)
    calling = _calling(device)
    return [
        dataclasses.replace(kernel, fn=_one_by_one(calling, checked(kernel.op, kernel.fn)))
        for kernel in made
        if kernel.op in _SUPPORTS
    ]


@functools.cache
def _calling(device: torch.device) -> threading.Lock:
    """One for all who have the device's kernels."""
    return threading.Lock()


def _one_by_one(calling: threading.Lock, fn: Callable[..., None]) -> Callable[..., None]:
    """A call starts several kernels, which leave things in the stream's workspace for one another; those of two threads that call
    on one stream must not come between each other."""

    def call(*args: Any) -> None:
        with calling:
            fn(*args)

    return call


def supports(call: CallSpec) -> Yes | No:
    """Whether the op's kernel serves every call that the statics leave open."""
    answer = _SUPPORTS.get(call.op)
    return answer(call) if answer else No(f"nothing is known of {call.op}")


def kept_as_fragments(call: CallSpec) -> bool:
    """Whether a grouped_gemm's experts are of a format and size that `weights.prepare` turns into fragments."""
    known = call.statics
    shape = (1, known.get("N", 0), known.get("K", 0))
    return weights.is_packed("experts_", known.get("weight") or "", shape)


def _grouped_gemm(call: CallSpec) -> Yes | No:
    """It serves every call, but what is not FP4 experts by an FP32 product at a time: where the weight is no fragments, the
    portable kernel has tiles for that."""
    known = call.statics
    if kept_as_fragments(call):
        return Yes()
    if known.get("weight") not in (None, "fp4_row32"):
        return No(f"it has matrix tiles for fp4_row32 experts alone, not for {known['weight']}")
    if known.get("x") == "f32" or known.get("out") == "u8":
        return No("it has matrix tiles for x of bf16 or codes and out of bf16 or f32")
    if known.get("N", 0) % weights.GRANULE:
        return No(f"it has matrix tiles for N of multiples of {weights.GRANULE}, not for {known['N']}")
    return Yes()


MOST_SELECTED = 1536
"""Selected rows of a query row that sparse_attention's list in shared memory has room for, beside 512 of a window; rows of bf16
need no such list."""

ATTENDED = {"fp8_32": ("fp4_16", "fp8_32"), "bf16": ("bf16",)}
"""Window formats of sparse_attention, and the compressed formats that each goes with."""


def _sparse_attention(call: CallSpec) -> Yes | No:
    """One tile of the matrix unit: up to 64 heads of 512 in BF16, over rows of BF16 or whose expansion to it is exact."""
    known = call.statics
    formats = {"window_format": tuple(ATTENDED), "compressed_format": ATTENDED.get(known.get("window_format"), ())}
    for name, values in {"q": ("bf16",), "out": ("bf16",), "D": (512,), **formats}.items():
        if known.get(name) not in values:
            return No(f"it serves {name} of {' or '.join(map(str, values))}, not {known.get(name, 'what is not known yet')}")
    listed = known.get("k", 0) if known["window_format"] != "bf16" else 0
    if not 1 <= known.get("h", 0) <= 64 or listed > MOST_SELECTED:
        got = f"h = {known.get('h')} and k = {known.get('k')}"
        return No(f"it serves up to 64 heads and {MOST_SELECTED} selected rows, not {got}")
    return Yes()


def _draft_attention(call: CallSpec) -> Yes | No:
    """The tile of sparse_attention: up to 64 heads of 512 in BF16, over rows of fp8_32."""
    known = call.statics
    for name, value in {"q": "bf16", "out": "bf16", "D": 512, "window_format": "fp8_32"}.items():
        if known.get(name) != value:
            return No(f"it serves {name} of {value}, not {known.get(name, 'what is not known yet')}")
    return Yes() if 1 <= known.get("h", 0) <= 64 else No(f"it serves up to 64 heads, not h = {known.get('h')}")


def _score_index(call: CallSpec) -> Yes | No:
    """It serves every call, but what is not MXFP4 on both sides one product at a time, where the portable kernel has tiles."""
    for name, known in (("q", ("u8", "mxfp4_32")), ("format", ("mxfp4_32",))):
        if call.statics.get(name) not in (None, *known):
            return No(f"it has matrix tiles for {name} of {known[-1]} alone, not for {call.statics[name]}")
    return Yes()


def _everything(call: CallSpec) -> Yes:
    """It serves every call of the card."""
    return Yes()


_SUPPORTS = {
    "draft_attention": _draft_attention,
    "grouped_gemm": _grouped_gemm,
    "grouped_linear": serves_linear,
    "hyper_connection_pre": serves_site,
    "linear": serves_linear,
    "mask_logits": _everything,
    "nan_row_flags": _everything,
    "permute": _everything,
    "quantise": serves_quantise,
    "residual_site": serves_site,
    "route_topk": serves_route,
    "sample": _everything,
    "sparse_attention": _sparse_attention,
    "score_index": _score_index,
    "select_candidate_blocks": _everything,
    "select_topk": _everything,
    "swiglu_quantise": serves_swiglu,
    "top_logprobs": serves_top_logprobs,
    "unpermute": serves_unpermute,
    "verify_drafts": _everything,
}
"""By op: its answer. An op without one is not offered."""
