"""Argument checks made from a card's signature: kinds, dtypes, devices, shapes. BadCall before anything is launched."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Mapping
from typing import Any

import torch

from deepinfer_hal.card import DTYPES, Arg, OpCard
from deepinfer_hal.communicator import Communicator
from deepinfer_hal.dims import DimExpression
from deepinfer_hal.errors import BadCall
from deepinfer_hal.weights import WeightHandle

_SCALARS = {"int": numbers.Integral, "float": numbers.Real, "bool": bool, "str": str}


def check_call(card: OpCard, args: Mapping[str, Any]) -> dict[str, int]:
    """Checks `args` against the card and returns the sizes of the signature's symbolic dims.

    Raises BadCall naming the op, the argument, what it was and what would be right.
    """
    sizes: dict[str, int] = {}
    scalars: dict[str, int] = {}
    device: torch.device | None = None
    for arg in card.signature:
        value = args.get(arg.name)
        if value is None:
            if not arg.optional:
                raise BadCall(f"{card.name}: argument {arg.name!r} is missing")
            continue
        if arg.is_tensor:
            _check_tensor(card, arg, value, sizes)
            if device is not None and value.device != device:
                raise BadCall(f"{card.name}: {arg.name} is on {value.device}, other arguments are on {device}")
            device = value.device
        elif arg.kind == "weight":
            if not isinstance(value, WeightHandle):
                raise BadCall(f"{card.name}: {arg.name} must be a prepared weight handle, got {type(value).__name__}")
            _bind_dims(card, arg, tuple(value.shape), sizes)
        elif arg.kind == "comm":
            if not isinstance(value, Communicator):
                raise BadCall(f"{card.name}: {arg.name} must be a Communicator, got {type(value).__name__}")
            sizes["world"] = value.world_size
        else:
            _check_scalar(card, arg, value)
            if arg.kind == "int":
                scalars[arg.name] = int(value)
    _check_expressions(card, args, scalars, sizes)
    if card.check is not None:
        card.check(args)
    return sizes


def _check_scalar(card: OpCard, arg: Arg, value: Any) -> None:
    """bool is an int in Python, and is none here."""
    if not isinstance(value, _SCALARS[arg.kind]) or (isinstance(value, bool) and arg.kind != "bool"):
        raise BadCall(f"{card.name}: {arg.name} must be {arg.kind}, got {type(value).__name__}")


def _check_tensor(card: OpCard, arg: Arg, value: Any, sizes: dict[str, int]) -> None:
    if not isinstance(value, torch.Tensor):
        raise BadCall(f"{card.name}: {arg.name} must be a tensor, got {type(value).__name__}")
    allowed = DTYPES[arg.dtype]
    if value.dtype not in allowed:
        names = " or ".join(str(d).removeprefix("torch.") for d in allowed)
        raise BadCall(f"{card.name}: {arg.name} must be {names}, got {str(value.dtype).removeprefix('torch.')}")
    if value.dim() and value.numel() and value.stride(-1) != 1 and value.shape[-1] != 1:
        raise BadCall(f"{card.name}: the last dimension of {arg.name} must be contiguous, its stride is {value.stride(-1)}")
    if arg.kind != "in" and _overlaps_itself(value):
        raise BadCall(
            f"{card.name}: {arg.name} is written, so its elements must not share memory; its shape is {list(value.shape)} "
            f"with strides {list(value.stride())}"
        )
    _bind_dims(card, arg, tuple(value.shape), sizes)


def _overlaps_itself(value: torch.Tensor) -> bool:
    """Whether a step along some dim is shorter than what the smaller strides span (an expanded tensor, for example)."""
    if value.is_contiguous() or value.numel() == 0:
        return False
    extent = 1
    for stride, size in sorted((stride, size) for stride, size in zip(value.stride(), value.shape, strict=True) if size > 1):
        if stride < extent:
            return True
        extent = stride * (size - 1) + extent
    return False


def _bind_dims(card: OpCard, arg: Arg, shape: tuple[int, ...], sizes: dict[str, int]) -> None:
    if arg.dims == ("...",):
        return
    if len(shape) != len(arg.dims):
        raise BadCall(f"{card.name}: {arg.name} must have shape [{', '.join(arg.dims)}], got {list(shape)}")
    for dim, size in zip(arg.dims, shape, strict=True):
        if dim.isdigit() and int(dim) != size:
            raise BadCall(f"{card.name}: {arg.name} must have shape [{', '.join(arg.dims)}], got {list(shape)}")
        if dim.isidentifier() and dim != "_" and sizes.setdefault(dim, size) != size:
            raise BadCall(f"{card.name}: {arg.name} has {dim} = {size}, but {dim} = {sizes[dim]} in earlier arguments")


@functools.cache
def _expression(text: str) -> DimExpression:
    return DimExpression(text)


def _check_expressions(card: OpCard, args: Mapping[str, Any], scalars: dict[str, int], sizes: dict[str, int]) -> None:
    """Dims such as "K/32" or "R+1", once every name is known; and dims that an int argument of the same name gives."""
    for name in scalars.keys() & sizes.keys():
        if scalars[name] != sizes[name]:
            holder = next(arg.name for arg in card.signature if name in arg.dims and args.get(arg.name) is not None)
            raise BadCall(f"{card.name}: {holder} has {name} = {sizes[name]}, but the argument {name} = {scalars[name]}")
    known = {**scalars, **sizes}
    for arg in card.signature:
        value = args.get(arg.name)
        if value is None or not (arg.is_tensor or arg.kind == "weight") or arg.dims == ("...",):
            continue
        for dim, size in zip(arg.dims, value.shape, strict=True):
            if dim.isidentifier() or dim.isdigit():
                continue
            expression = _expression(dim)
            if not expression.names <= known.keys():
                continue
            wanted = expression.value(known)
            if wanted is None:
                given = ", ".join(f"{name} = {known[name]}" for name in sorted(expression.names))
                raise BadCall(f"{card.name}: {arg.name} needs {dim} values, which is no whole number at {given}")
            if wanted != size:
                raise BadCall(f"{card.name}: {arg.name} needs {dim} = {wanted}, got {size} (shape {list(value.shape)})")
