"""Arguments that kernels read or write without looking at their strides, several bytes at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from deepinfer_hal.card import get_card
from deepinfer_hal.errors import Unsupported

_SITE = {"fn": 16, "pre_prev": 16, "streams": 16, "out": 16}

DENSE: dict[str, dict[str, int]] = {
    "quantise": {"codes": 8, "scales": 1},
    "swiglu_quantise": {"out": 8, "out_scale": 1},
    "hyper_connection_pre": {**_SITE, "pre": 4, "post": 4, "comb": 16},
    "residual_site": {
        **_SITE, "y": 16, "post": 16, "comb": 16, "norm_weight": 16, "out_codes": 16, "out_scales": 1, "pre": 4, "post_out": 4,
        "comb_out": 16,
    },
    "top_logprobs": {"ids": 4, "values": 4},
    "verify_drafts": {"target": 4, "drafts": 4, "tokens": 4},
}  # fmt: skip
"""Op -> argument -> the bytes that its address must be a multiple of."""


def checked(op: str, fn: Callable[..., None]) -> Callable[..., None]:
    """`fn`, which refuses, with Unsupported, what it would read or write at wrong places or could not reach."""
    wanted = DENSE.get(op, {})
    places = [(i, arg.name, wanted[arg.name]) for i, arg in enumerate(get_card(op).signature) if arg.name in wanted]
    if not places:
        return fn

    def call(*args: Any) -> None:
        for place, name, multiple in places:
            tensor = args[place]
            if tensor is not None and (tensor.data_ptr() % multiple or not tensor.is_contiguous()):
                _refuse(op, name, tensor, multiple)
        fn(*args)

    return call


def _refuse(op: str, name: str, tensor: torch.Tensor, multiple: int) -> None:
    if not tensor.is_contiguous():
        shape, strides = list(tensor.shape), list(tensor.stride())
        raise Unsupported(f"{op}: the rows of {name} must follow one another; {shape} with strides {strides} has gaps")
    raise Unsupported(f"{op}: {name} must begin at a multiple of {multiple} bytes, it begins at {tensor.data_ptr():#x}")
