"""The twin from Python: kernels bound through the C ABI, run on CPU tensors by a functional model of an Ascend 950."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from deepinfer_hal.card import Arg, OpCard, all_cards
from deepinfer_hal.errors import BackendError, BadCall

# An instruction of a trace, or a wait: for a pipe up to a clock (Wait), or for all whose Arrive rows have the same round in
# `work` (Await). Cores are numbered 3 for each cube core: itself, then its two vector cores. `work` counts elements, or
# multiplications of the cube, or bursts of a copy; m, n, k are those of a product or tile; from and to number MEMORIES.
TRACE_ROW = np.dtype(
    [(name, "u2") for name in ("core", "pipe", "op", "launch", "source_core", "source_pipe", "file", "m", "n", "k")]
    + [(name, "u1") for name in ("from", "to", "type", "spare")]
    + [(name, "u4") for name in ("clock", "source_clock", "line", "bytes", "count", "extents")]
    + [(name, "u8") for name in ("work", "first_extent")],
    align=True,
)
TRACE_EXTENT = np.dtype([("offset", "u8"), ("bytes", "u4"), ("tensor", "u2"), ("use", "u2")])
MEMORIES = ("UB", "L1", "L0A", "L0B", "L0C", "BiasTable", "Fixpipe buffer", "L0A_MX", "L0B_MX", *([""] * 6), "global")
PIPES = ("S", "V", "M", "MTE1", "MTE2", "MTE3", "FIX")
_KINDS = {"in": "t", "out": "t", "inout": "t", "weight": "w", "int": "i", "bool": "i", "float": "d", "str": "s"}


@dataclass(frozen=True)
class Trace:
    """What a `Stream(trace=True)` recorded: rows [TRACE_ROW] in the order the twin ran them, the runs of global memory that
    they touch [TRACE_EXTENT], and the names that `op`, `launch` and `file` number. Bytes of `extents` count from the start of
    the call's tensor, so one trace should hold one call."""

    rows: np.ndarray
    extents: np.ndarray
    ops: list[str]
    kernels: list[str]
    files: list[str]


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
    if "comm" in card.arg_names:
        from deepinfer_ascend import ranks  # which binds the kernels of several ranks, and needs this module

        return ranks.bind(card)
    return twin.bind(card.name, "".join(kind(arg) for arg in card.signature), list(card.arg_names))


def kind(arg: Arg) -> str:
    """What `module().bind` is told of a card's argument."""
    return _KINDS[arg.kind]


def take_trace(stream: Any) -> Trace:
    """What a `Stream(trace=True)` recorded since the last call."""
    rows, extents, kernels, files = stream.take_trace()
    return Trace(
        np.frombuffer(rows, TRACE_ROW), np.frombuffer(extents, TRACE_EXTENT), module().ops(), list(kernels), list(files)
    )


def register_ops(ops: list[str]) -> np.ndarray:
    """Numbers of the instructions that run inside vector functions."""
    moves = {"LocalMemBar", "LoadAlign", "StoreAlign", "LoadUnAlign", "StoreUnAlign"}
    return np.array([i for i, name in enumerate(ops) if name.startswith("Reg") or name in moves])
