"""The native kernels of this backend, bound through the C ABI: one callable for each op card that has a native symbol.

Without the compiled extension there are none, and `native_unavailable_reason` says why.
"""

from __future__ import annotations

import functools
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from deepinfer_hal.card import OpCard, all_cards
from deepinfer_hal.errors import BackendError, BadCall
from deepinfer_hal.kernel import Kernel

_KINDS = {"in": "t", "out": "t", "inout": "t", "weight": "w", "int": "i", "bool": "i", "float": "d", "str": "s"}


@functools.cache
def _load() -> tuple[ModuleType | None, str | None]:
    try:
        from deepinfer_cpu import _native
    except ImportError as error:
        note = Path(__file__).with_name("native_not_built.txt")
        return None, note.read_text(encoding="utf-8").strip() if note.exists() else f"the extension is absent: {error}"
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        return None, f"torch {torch.__version__} has no DLPack exchange table; the native kernels need torch 2.11 or later"
    _native.setup(torch.Tensor, BadCall, BackendError)
    _native.set_num_threads(torch.get_num_threads())
    return _native, None


def native() -> ModuleType | None:
    """The compiled extension, ready for use, or None."""
    return _load()[0]


def native_unavailable_reason() -> str | None:
    """Why there are no native kernels, or None if there are."""
    return _load()[1]


def instruction_set() -> str:
    """The instruction level the kernels run at: "base", "avx2" or "avx512"; "none" without them."""
    module = native()
    return "none" if module is None else module.level()


def set_num_threads(threads: int) -> None:
    """Threads that share one call, the caller included. Results do not depend on it."""
    if threads < 1:
        raise BadCall(f"a thread count must be at least 1, got {threads}")
    module = native()
    if module is not None:
        module.set_num_threads(threads)


def bind(card: OpCard) -> Any:
    """The native callable of a card, taking its arguments in order or by name."""
    module = native()
    if module is None:
        raise BadCall(f"{card.name} has no native kernel: {native_unavailable_reason()}")
    return module.bind(card.name, "".join(_KINDS[arg.kind] for arg in card.signature), card.arg_names)


@functools.cache
def _kernels() -> tuple[Kernel, ...]:
    module = native()
    if module is None:
        return ()
    cards = all_cards()
    return tuple(
        Kernel(op, "cpu", bind(cards[op]), f"di_{op}", invariant="yes", priority=100) for op in module.ops() if op in cards
    )


def native_kernels() -> list[Kernel]:
    """Every native kernel. All are batch invariant: an output element has one order of summation, whatever else is in the
    call and however many threads share it."""
    return list(_kernels())
