"""The twin from Python: kernels bound through the C ABI, run on CPU tensors by a functional model of an Ascend 950."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import numpy as np
import torch
from deepinfer_hal.card import OpCard, all_cards
from deepinfer_hal.errors import BackendError, BadCall

# An instruction of a trace, or a wait: then what was waited for is the source's pipe at the source's clock. Cores are
# numbered 3 for each cube core: itself, then its two vector cores.
TRACE_ROW = np.dtype(
    [(name, "u2") for name in ("core", "pipe", "op", "source_core", "source_pipe", "launch")]
    + [(name, "u4") for name in ("clock", "source_clock", "line", "bytes")]
    + [("work", "u8")],
    align=True,
)
PIPES = ("S", "V", "M", "MTE1", "MTE2", "MTE3", "FIX")
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


def take_trace(stream: Any) -> tuple[np.ndarray, list[str], list[str]]:
    """What a `Stream(trace=True)` recorded since the last call: rows of TRACE_ROW in issue order, the names of the
    instructions that `op` numbers, and the kernels that `launch` numbers. `work` counts elements, or multiplications of
    the cube, or rounds of a barrier."""
    rows, kernels = stream.take_trace()
    return np.frombuffer(rows, dtype=TRACE_ROW), module().ops(), kernels
