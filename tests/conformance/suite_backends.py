"""Backends that are wrong in a known way, for tests of the suite: each is opened by an opener of its own."""

from __future__ import annotations

import ctypes
import time
from typing import Any

import torch
from deepinfer_hal.backend import Backend, Capabilities, DeviceInfo
from deepinfer_hal.card import get_card
from deepinfer_hal.errors import Unsupported
from deepinfer_hal.kernel import CallSpec, Kernel, No, Yes

REFUSAL = "only bfloat16 rows"


def wrapped(op: str, change: str, fn: Any, **more: Any) -> Kernel:
    """A kernel around the reference of an op; its symbol says so, and how it differs."""
    return Kernel(op, "example", fn, f"reference::{op}+{change}", "yes", **more)


class Example(Backend):
    """One host device with the kernels that the opener gave it."""

    name = "example"

    def __init__(self, *kernels: Kernel) -> None:
        self._kernels = kernels

    def probe(self) -> list[DeviceInfo]:
        return [DeviceInfo(0, "example chip", details={"driver": "1.2"})]

    def device(self, index: int) -> torch.device:
        return torch.device("cpu")

    def capabilities(self, index: int) -> Capabilities:
        return Capabilities(stream_dtypes=(torch.bfloat16, torch.float32))

    def kernels(self, index: int) -> tuple[Kernel, ...]:
        return self._kernels


def open_right(spec: str) -> tuple[Backend, int]:
    """Two ops, both right."""
    ops = ("copy_rows", "nan_row_flags")
    return Example(*(wrapped(op, "nothing", get_card(op).reference) for op in ops)), 0


def open_wrong(spec: str) -> tuple[Backend, int]:
    """Flags of every row."""

    def flag_all(logits: torch.Tensor, flags: torch.Tensor) -> None:
        flags.fill_(1)

    return Example(wrapped("nan_row_flags", "flags_all", flag_all)), 0


def open_nothing(spec: str) -> tuple[Backend, int]:
    """No kernels at all."""
    return Example(), 0


def open_crashing(spec: str) -> tuple[Backend, int]:
    """Reads address 0 for three rows of 33; right for anything else."""

    def crash(logits: torch.Tensor, flags: torch.Tensor) -> None:
        if logits.shape == (3, 33):
            ctypes.string_at(0)
        get_card("nan_row_flags").reference(logits, flags)

    return Example(wrapped("nan_row_flags", "reads_null", crash)), 0


def open_hanging(spec: str) -> tuple[Backend, int]:
    """Never returns for three rows of 33."""

    def hang(logits: torch.Tensor, flags: torch.Tensor) -> None:
        while logits.shape == (3, 33):
            time.sleep(0.05)
        get_card("nan_row_flags").reference(logits, flags)

    return Example(wrapped("nan_row_flags", "hangs", hang)), 0


def open_choosy(spec: str) -> tuple[Backend, int]:
    """Serves bfloat16 rows, and says so."""

    def supports(call: CallSpec) -> Yes | No:
        return Yes() if call.statics.get("streams") == "bf16" else No(REFUSAL)

    return Example(wrapped("stream_collapse", "nothing", get_card("stream_collapse").reference, supports=supports)), 0


def open_boasting(spec: str) -> tuple[Backend, int]:
    """Says Yes to everything and then raises Unsupported for float32 rows."""

    def serve(streams: torch.Tensor, *rest: Any) -> None:
        if streams.dtype == torch.float32:
            raise Unsupported(REFUSAL)
        get_card("stream_collapse").reference(streams, *rest)

    return Example(wrapped("stream_collapse", "boasts", serve)), 0


def open_falling(spec: str) -> tuple[Backend, int]:
    """A kernel that is the reference under another name."""
    return Example(Kernel("nan_row_flags", "example", get_card("nan_row_flags").reference, "example_nan_row_flags", "yes")), 0


def open_noisy(spec: str) -> tuple[Backend, int]:
    """Right, but prints to standard output, from C too."""

    def noisy(logits: torch.Tensor, flags: torch.Tensor) -> None:
        print('{"result": "not from the suite"}', flush=True)
        ctypes.CDLL(None).puts(b'{"done": true}')
        ctypes.CDLL(None).fflush(None)
        get_card("nan_row_flags").reference(logits, flags)

    return Example(wrapped("nan_row_flags", "prints", noisy)), 0


def open_dying(spec: str) -> tuple[Backend, int]:
    """Kills the process while it is opened."""
    ctypes.string_at(0)
    return Example(), 0
