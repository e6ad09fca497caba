"""Argument checks made from a card's signature: kinds, dtypes, devices, shapes. BadCall before anything is launched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from deepinfer_hal.card import DTYPES, Arg, OpCard
from deepinfer_hal.errors import BadCall

_SCALARS = {"int": (int,), "float": (float, int), "bool": (bool,), "str": (str,)}


def check_call(card: OpCard, args: Mapping[str, Any]) -> dict[str, int]:
    """Checks `args` against the card and returns the sizes of the signature's symbolic dims.

    Raises BadCall naming the op, the argument, what it was and what would be right.
    """
    sizes: dict[str, int] = {}
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
            _bind_dims(card, arg, tuple(value.shape), sizes)
        elif not isinstance(value, _SCALARS[arg.kind]):
            raise BadCall(f"{card.name}: {arg.name} must be {arg.kind}, got {type(value).__name__}")
    _check_expressions(card, args, sizes)
    if card.check is not None:
        card.check(args)
    return sizes


def _check_tensor(card: OpCard, arg: Arg, value: Any, sizes: dict[str, int]) -> None:
    if not isinstance(value, torch.Tensor):
        raise BadCall(f"{card.name}: {arg.name} must be a tensor, got {type(value).__name__}")
    allowed = DTYPES[arg.dtype]
    if value.dtype not in allowed:
        names = " or ".join(str(d).removeprefix("torch.") for d in allowed)
        raise BadCall(f"{card.name}: {arg.name} must be {names}, got {str(value.dtype).removeprefix('torch.')}")
    if value.dim() and value.numel() and value.stride(-1) != 1 and value.shape[-1] != 1:
        raise BadCall(f"{card.name}: the last dimension of {arg.name} must be contiguous, its stride is {value.stride(-1)}")
    _bind_dims(card, arg, tuple(value.shape), sizes)


def _bind_dims(card: OpCard, arg: Arg, shape: tuple[int, ...], sizes: dict[str, int]) -> None:
    if arg.dims == ("...",):
        return
    if len(shape) != len(arg.dims):
        raise BadCall(f"{card.name}: {arg.name} must have shape [{', '.join(arg.dims)}], got {list(shape)}")
    for dim, size in zip(arg.dims, shape, strict=True):
        if not dim.isidentifier() or dim == "_":
            if dim.isdigit() and int(dim) != size:
                raise BadCall(f"{card.name}: {arg.name} must have shape [{', '.join(arg.dims)}], got {list(shape)}")
            continue
        if sizes.setdefault(dim, size) != size:
            raise BadCall(f"{card.name}: {arg.name} has {dim} = {size}, but {dim} = {sizes[dim]} in earlier arguments")


def _check_expressions(card: OpCard, args: Mapping[str, Any], sizes: dict[str, int]) -> None:
    """Dims such as "K/32" or "R+1", once every name is known."""
    for arg in card.signature:
        value = args.get(arg.name)
        if value is None or not (arg.is_tensor or arg.kind == "weight") or arg.dims == ("...",):
            continue
        for dim, size in zip(arg.dims, value.shape, strict=True):
            if dim.isidentifier() or dim.isdigit() or dim == "_":
                continue
            scalars = {k: v for k, v in args.items() if isinstance(v, int)}
            try:
                wanted = int(eval(dim.replace("/", "//"), {"__builtins__": {}}, {**scalars, **sizes}))  # noqa: S307
            except NameError:
                continue
            if wanted != size:
                raise BadCall(f"{card.name}: {arg.name} needs {dim} = {wanted}, got {size} (shape {list(value.shape)})")
