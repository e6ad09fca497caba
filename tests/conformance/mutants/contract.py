"""What a kernel promises beside its result: claims, refusals, memory, streams, graphs."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from deepinfer_hal.backend import Capabilities
from deepinfer_hal.card import get_card
from deepinfer_hal.errors import BadCall, Unsupported
from deepinfer_hal.kernel import Kernel, No, Yes

from tests.conformance import captured
from tests.conformance.mutants import right
from tests.conformance.mutants._base import Host, Mutant, count_of, kernel

COLLAPSE = "stream_collapse(T=3,m=4,H=64,dtype=f32)"
FLAGS = "nan_row_flags(S=3,V=33)"
QUANTISE = "quantise(T=5,N=64,format=fp8_32,dtype=f32)"
LINEAR = "linear(T=5,K=64,N=32,x=bf16,w=bf16,out=f32)"
REDUCE = "all_reduce(T=3,N=64,x=f32,operation=sum)"


def collapse(streams, *rest: Any) -> None:
    """Right for BF16 rows, which are all it was written for."""
    if streams.dtype == torch.float32:
        raise Unsupported("only bfloat16 rows")
    get_card("stream_collapse").reference(streams, *rest)


def claiming(name: str, supports: Callable, killed_by: tuple[str, ...], why: str, fn: Callable = collapse) -> Mutant:
    return Mutant(name, "stream_collapse", COLLAPSE, lambda: kernel("stream_collapse", name, fn, supports=supports),
                  killed_by, why)  # fmt: skip


def raise_key_error(call: Any) -> Yes:
    return Yes() if call.statics["streams_dtype"] == "bf16" else No("only bfloat16 rows")


def cautious() -> Kernel:
    """Claims less than it can: no fault, and no mutant."""
    reference = get_card("stream_collapse").reference
    return kernel("stream_collapse", "cautious", reference, supports=lambda call: No("not measured on this device yet"))


def under_its_own_name() -> Kernel:
    return Kernel("nan_row_flags", "mutant", get_card("nan_row_flags").reference, "fast_nan_row_flags", "yes")


def any_format(x, format, count, codes, scales, flags) -> None:
    get_card("quantise").reference(x, format if format in ("fp8_32", "fp4_16", "mxfp4_32") else "fp8_32", count, codes, scales,
                                   flags)  # fmt: skip


def refuses_late(x, format, count, codes, scales, flags) -> None:
    scales[: count_of({"count": count}, x.shape[0])] = 0
    any_format(x, format, count, codes, scales, flags)
    if format not in ("fp8_32", "fp4_16", "mxfp4_32"):
        raise BadCall(f"unknown format {format}")


def trips_over_it(x, format, count, codes, scales, flags) -> None:
    {"fp8_32": 0, "fp4_16": 1, "mxfp4_32": 2}[format]
    get_card("quantise").reference(x, format, count, codes, scales, flags)


def quantise(name: str, fn: Callable, why: str) -> Mutant:
    return Mutant(name, "quantise", QUANTISE, lambda: kernel("quantise", name, fn), ("bad_calls",), why)


def allocates(comm, x, operation, out) -> None:
    right.copy_all_reduce(comm, x.clone(), operation, out)


def waits(comm, x, operation, out) -> None:
    """Looks at a value on the host to see whether there is anything to do."""
    if x.numel() == 0 or x[0, 0].item() == x[0, 0].item():
        right.copy_all_reduce(comm, x, operation, out)


def capturable(name: str, fn: Callable, why: str) -> Mutant:
    return Mutant(name, "all_reduce", REDUCE, lambda: kernel("all_reduce", name, fn, "yes", capturable=True), ("capturable",),
                  why, right=right.all_reduce_kernel)  # fmt: skip


class Keeps:
    """Keeps something of every call."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make, self.kept = make, []

    def __call__(self, *values: Any) -> None:
        right.linear(*values)
        self.kept.append(self.make())


def keeping(name: str, make: Callable[[], Any], why: str) -> Mutant:
    return Mutant(name, "linear", LINEAR, lambda: kernel("linear", name, Keeps(make), "yes"), ("memory",), why,
                  right=right.linear_kernel)  # fmt: skip


class Graphing(Host):
    """Has graphs, and a kernel that may be captured."""

    def __init__(self, name: str, keep: bool) -> None:
        self._graphs = captured.Graphs()
        super().__init__(kernel("all_reduce", name, captured.sums_of_one_rank(self._graphs, keep), "yes", capturable=True))

    def capabilities(self, index: int) -> Capabilities:
        return replace(super().capabilities(index), graphs=True)

    def graphs(self, index: int) -> captured.Graphs:
        return self._graphs


class Deferred(Host):
    """Runs calls when it is waited for, after copies that were enqueued later."""

    def __init__(self) -> None:
        super().__init__(kernel("linear", "runs_aside", lambda *values: self._calls.append(values), "yes"))
        self._calls: list[tuple] = []

    def synchronize(self, index: int) -> None:
        while self._calls:
            right.linear(*self._calls.pop(0))


def half_a_megabyte() -> mmap.mmap:
    """Touched pages of their own: an allocator could hand out memory that the process held already."""
    pages = mmap.mmap(-1, 1 << 19)
    pages.write(b"x" * (1 << 19))
    return pages


MUTANTS = [
    claiming("claims_too_much", lambda call: Yes(), ("claims",),
             "supports says Yes to rows that the kernel then declines."),
    claiming("claims_without_a_reason", lambda call: No("  "), ("claims",),
             "supports says No and does not say why.", fn=get_card("stream_collapse").reference),
    claiming("claims_true", lambda call: True, ("claims",),
             "supports answers True, which is neither Yes nor No.", fn=get_card("stream_collapse").reference),
    claiming("claims_by_crashing", raise_key_error, ("claims",),
             "supports fails on a call that does not tell it everything.", fn=get_card("stream_collapse").reference),
    Mutant("falls_back_silently", "nan_row_flags", FLAGS, under_its_own_name, ("claims",),
           "A kernel with a name of its own runs the reference."),
    quantise("unknown_format_accepted", any_format, "A format that does not exist is taken for the first one."),
    quantise("refuses_after_writing", refuses_late, "A wrong call is refused, but outputs were cleared before."),
    quantise("trips_over_a_bad_call", trips_over_it, "A wrong call ends in a KeyError from inside."),
    capturable("allocates_in_the_hot_path", allocates, "A capturable kernel allocates a temporary in every call."),
    capturable("waits_in_the_hot_path", waits, "A capturable kernel reads a device value on the host."),
    Mutant("keeps_what_it_captured", "all_reduce", REDUCE, lambda: Graphing("keeps_what_it_captured", keep=True), ("graphs",),
           "A captured kernel reads its input on the host, so a replay gives the step of the capture.",
           right=right.all_reduce_kernel),
    keeping("keeps_a_tensor", lambda: torch.empty(1), "Every call leaves a tensor alive."),
    keeping("memory_grows", half_a_megabyte, "Every call leaves half a megabyte that no tensor shows."),
    Mutant("runs_aside", "linear", LINEAR, Deferred, ("stream_order",),
           "Work is put on a stream of its own and ends after what was enqueued later.", right=right.linear_kernel),
]  # fmt: skip
