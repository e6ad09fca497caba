"""What is static of a call: dtypes, formats and widths that a bound op knows, never how many rows there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from deepinfer_hal.card import OpCard
from deepinfer_hal.kernel import CallSpec
from deepinfer_hal.weights import WeightHandle

_DTYPES = {torch.bfloat16: "bf16", torch.float32: "f32", torch.uint8: "u8", torch.int32: "i32", torch.int64: "i64"}

_WIDTHS = frozenset({"D", "H", "h", "m", "r", "V", "k", "N", "E", "I", "J"})
"""Symbolic dimensions that the model fixes, as are all of a weight. Others, and leading ones, may count rows or blocks."""


def weight_format(handle: WeightHandle) -> str:
    """The checkpoint format of a prepared weight, remembered, since finding it may undo the layout."""
    if "format" not in vars(handle):
        handle.format = handle.canonical().format
    return handle.format


def open_statics(card: OpCard, statics: Mapping[str, Any]) -> list[str]:
    """What `call_spec` would tell of a call and these statics do not: tensors, weights, strings and flags by name."""
    told = (arg.name for arg in card.signature if arg.is_tensor or arg.kind in ("weight", "str", "bool"))
    return [name for name in told if name not in statics]


def call_form(card: OpCard) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """What makes a key of a call's arguments, given in order: equal for calls of equal shapes, dtypes, formats, strings and
    flags. Finer than `call_kind`, and told in less time."""
    tensors = [place for place, arg in enumerate(card.signature) if arg.is_tensor]
    weights = [place for place, arg in enumerate(card.signature) if arg.kind == "weight"]
    strings = [place for place, arg in enumerate(card.signature) if arg.kind == "str"]
    flags = [place for place, arg in enumerate(card.signature) if arg.kind == "bool"]

    def form(args: Sequence[Any]) -> tuple[Any, ...]:
        parts: list[Any] = []
        add = parts.append
        for place in tensors:
            value = args[place]
            if value is None:
                add(None)
            else:
                add(value.dtype)
                add(value.shape)
        for place in weights:
            value = args[place]
            if value is None:
                add(None)
            else:
                add(weight_format(value))
                add(tuple(value.shape))
        for place in strings:
            add(args[place])
        for place in flags:
            add(bool(args[place]))
        return tuple(parts)

    return form


def call_kind(form: Sequence[Any]) -> tuple[Any, ...]:
    """A key that is equal for calls with equal statics, of what `call_form` made: that without the leading sizes of tensors."""
    return tuple([part[1:] if isinstance(part, torch.Size) else part for part in form])


def call_spec(card: OpCard, args: Mapping[str, Any], batch_invariant: bool = False) -> CallSpec:
    """statics: dtype name of each tensor (None if not given), weight formats, strings and flags, and fixed sizes."""
    statics: dict[str, Any] = {}
    for arg in card.signature:
        value = args[arg.name]
        if arg.is_tensor:
            statics[arg.name] = None if value is None else _DTYPES[value.dtype]
        elif arg.kind == "weight":
            statics[arg.name] = None if value is None else weight_format(value)
        elif arg.kind == "str":
            statics[arg.name] = value
        elif arg.kind == "bool":
            statics[arg.name] = bool(value)
        if value is None or not (arg.is_tensor or arg.kind == "weight"):
            continue
        for axis, dim in enumerate(arg.dims):
            if (dim in _WIDTHS and axis > 0) or (arg.kind == "weight" and dim.isidentifier() and dim != "_"):
                statics.setdefault(dim, int(value.shape[axis]))
    return CallSpec(card.name, statics, batch_invariant)
