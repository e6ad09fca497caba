"""What is static of a call: dtypes, formats and widths that a bound op knows, never how many rows there are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from deepinfer_hal.card import OpCard
from deepinfer_hal.kernel import CallSpec

_DTYPES = {torch.bfloat16: "bf16", torch.float32: "f32", torch.uint8: "u8", torch.int32: "i32", torch.int64: "i64"}

_WIDTHS = frozenset({"D", "H", "h", "m", "r", "V", "k", "N", "E", "I", "J"})
"""Symbolic dimensions that the model fixes. Others, and all leading ones, may count rows or blocks."""


def call_spec(card: OpCard, args: Mapping[str, Any], batch_invariant: bool = False) -> CallSpec:
    """statics: dtype name of each tensor (None if not given), weight formats, strings and flags, and fixed sizes."""
    statics: dict[str, Any] = {}
    for arg in card.signature:
        value = args[arg.name]
        if arg.is_tensor:
            statics[arg.name] = None if value is None else _DTYPES[value.dtype]
        elif arg.kind == "weight":
            statics[arg.name] = None if value is None else value.canonical().format
        elif arg.kind in ("str", "bool"):
            statics[arg.name] = value
        if value is None or not (arg.is_tensor or arg.kind == "weight"):
            continue
        for axis, dim in enumerate(arg.dims):
            if dim in _WIDTHS and (axis > 0 or arg.kind == "weight"):
                statics.setdefault(dim, int(value.shape[axis]))
    return CallSpec(card.name, statics, batch_invariant)
