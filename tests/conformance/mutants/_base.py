"""What a mutant is, how it is run, and the ways in which a right kernel is broken."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from deepinfer_hal.backend import Backend, Capabilities, DeviceInfo
from deepinfer_hal.card import get_card
from deepinfer_hal.conformance import CHECKS, CORE, run_op
from deepinfer_hal.conformance.cases import parse_case
from deepinfer_hal.conformance.checks import Checks, Profile
from deepinfer_hal.conformance.verdict import CaseResult
from deepinfer_hal.kernel import Kernel, reference_kernel

Args = dict[str, Any]

QUICK = replace(CORE, repetitions=4, repeat_seconds=0.1)
"""Few repetitions: only a mutant that is seldom wrong needs many."""


@dataclass(frozen=True)
class Mutant:
    """A kernel, or a backend with a kernel of `op`, that is wrong in one way.

    case: id of the smallest case that shows it. killed_by: all checks that fail on it; one that names a single check lives
    where that check is missing. why: what the fault is. right: the kernel it was made from, which passes the case.
    """

    name: str
    op: str
    case: str
    make: Callable[[], Kernel | Backend]
    killed_by: tuple[str, ...]
    why: str
    right: Callable[[], Kernel] | None = None
    profile: Profile = QUICK
    parts: Mapping[str, Kernel] = field(default_factory=dict)

    @property
    def checks(self) -> Checks:
        """All checks; `memory`, which makes a hundred calls, only where it is named."""
        return CHECKS if "memory" in self.killed_by else CHECKS.without("memory")

    def run(self, *missing: str) -> CaseResult:
        """All checks but the missing ones on the mutant."""
        checks = self.checks.without(*missing)
        made = self.make()
        backend = made if isinstance(made, Backend) else None
        kernel = made if backend is None else next(one for one in backend.kernels(0) if one.op == self.op)
        return self._run(kernel, checks, backend, self.parts)

    def run_right(self) -> CaseResult:
        """All checks on the kernel that the mutant was made from."""
        right = self.right() if self.right else reference_kernel(get_card(self.op))
        return self._run(right, self.checks, None, {})

    def _run(self, kernel: Kernel, checks: Checks, backend: Backend | None, parts: Mapping[str, Kernel]) -> CaseResult:
        cases = [parse_case(self.case)]
        (result,) = run_op(get_card(self.op), kernel, self.profile, checks, cases=cases, backend=backend, parts=parts)
        return result


# ------------------------------------------------------------------------------------------- kernels from references


def kernel(op: str, name: str, fn: Callable[..., None], invariant: str | None = None, **more: Any) -> Kernel:
    """A kernel that says it is made from the op's reference; `invariant` as the reference's unless given."""
    stated = get_card(op).reference_invariant if invariant is None else invariant
    return Kernel(op, "mutant", fn, f"reference::{op}+{name}", stated, **more)


def changed(op: str, change: Callable[[Args], Args], inner: Callable[..., None] | None = None) -> Callable[..., None]:
    """The right kernel, called with other arguments: `change(args)` gives those to replace."""
    card = get_card(op)

    def fn(*values: Any) -> None:
        args = dict(zip(card.arg_names, values, strict=True))
        (inner or card.reference)(*{**args, **change(args)}.values())

    return fn


def spoiled(op: str, spoil: Callable[[Args], None], inner: Callable[..., None] | None = None) -> Callable[..., None]:
    """The right kernel, and then `spoil(args)`, if any row is valid."""
    card = get_card(op)

    def fn(*values: Any) -> None:
        (inner or card.reference)(*values)
        args = dict(zip(card.arg_names, values, strict=True))
        if args.get("count") is None or int(args["count"][0]):
            spoil(args)

    return fn


def patched(op: str, target: str, replacement: Any, inner: Callable[..., None] | None = None) -> Callable[..., None]:
    """The right kernel with something it calls replaced: `target` is its dotted path."""

    def fn(*values: Any) -> None:
        with mock.patch(target, replacement):
            (inner or get_card(op).reference)(*values)

    return fn


def with_rows(op: str, broken: Callable[..., None]) -> Callable[..., None]:
    """`broken` where there are valid rows, else the reference."""
    card = get_card(op)

    def fn(*values: Any) -> None:
        count = values[card.arg_names.index("count")]
        (card.reference if count is not None and int(count[0]) == 0 else broken)(*values)

    return fn


def count_of(args: Args, rows: int) -> int:
    """Valid rows of a call."""
    return rows if args["count"] is None else int(args["count"][0])


# ----------------------------------------------------------------------------------------------------- backends


class Host(Backend):
    """One host device with the kernels it is given; mutants of backends override a slot of it."""

    name = "host"

    def __init__(self, *kernels: Kernel) -> None:
        self._kernels = kernels

    def probe(self) -> list[DeviceInfo]:
        return [DeviceInfo(0, "host")]

    def device(self, index: int) -> torch.device:
        return torch.device("cpu")

    def capabilities(self, index: int) -> Capabilities:
        return Capabilities(stream_dtypes=(torch.bfloat16, torch.float32))

    def kernels(self, index: int) -> tuple[Kernel, ...]:
        return self._kernels
