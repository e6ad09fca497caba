"""The twin from Python: kernels bound through the C ABI, run on CPU tensors by a functional model of an Ascend 950."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
from deepinfer_hal.card import OpCard, all_cards
from deepinfer_hal.errors import BackendError, BadCall

_KINDS = {"in": "t", "out": "t", "inout": "t", "weight": "w", "int": "i", "bool": "i", "float": "d", "str": "s"}


@functools.cache
def _load() -> tuple[ModuleType | None, str | None]:
    try:
        from deepinfer_ascend import _twin
    except ImportError as error:
        return None, f"the twin is not built ({error}); tools/ascend/build_twin.sh builds it"
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        return None, f"torch {torch.__version__} has no DLPack exchange table; the twin needs torch 2.11 or later"
    _twin.setup(torch.Tensor, BadCall, BackendError)
    return _twin, None


def module() -> ModuleType | None:
    """The compiled twin, ready for use, or None."""
    return _load()[0]


def unavailable_reason() -> str | None:
    """Why there is no twin, or None if there is."""
    return _load()[1]


def ops() -> list[str]:
    """The cards that have an AscendC kernel in the library."""
    twin = module()
    return [] if twin is None else [name for name in all_cards() if twin.has(name)]


def bind(card: OpCard) -> Any:
    """The kernel of a card as a callable that takes the card's arguments in order or by name, and `stream=`: a
    `module().Stream`, by default a whole Ascend950DT_9591 with seed 1. Raises BackendError with the twin's full report
    when the kernel breaks a rule of the chip."""
    twin = module()
    if twin is None:
        raise BadCall(f"{card.name} cannot run on the twin: {unavailable_reason()}")
    return twin.bind(card.name, "".join(_KINDS[arg.kind] for arg in card.signature), list(card.arg_names))
