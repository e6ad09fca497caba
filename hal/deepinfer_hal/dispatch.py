"""Chooses one kernel per bound op, once at load, and hands out the bound call.

The backend's declared priority decides, ties go to the first offered; the choice is frozen, printable and part of every
report. A fall to the reference is counted and shown; with fallback="forbid" it is an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from deepinfer_hal.backend import Backend
from deepinfer_hal.card import OpCard, get_card
from deepinfer_hal.checks import check_call
from deepinfer_hal.errors import Unsupported
from deepinfer_hal.kernel import CallSpec, Kernel, No, reference_kernel

Observer = Callable[[OpCard, Mapping[str, Any], Callable[[], None]], None]
"""Called as observer(card, args, call) in place of a bound call, which it makes by calling `call`."""


@dataclass(frozen=True)
class Choice:
    """A frozen decision: which kernel serves a bound op, and why others do not."""

    op: str
    role: str
    provider: str
    symbol: str
    invariant: str
    refused: tuple[str, ...] = ()


@dataclass
class Dispatcher:
    """Binds ops for one device.

    fallback: "allow" | "forbid". batch_invariant: only kernels that state invariant="yes" may serve, else Unsupported
    names the op. debug_checks: every call is checked against its card. observer: called as observer(card, args, call) in
    place of each call, for profiles and traces.
    """

    backend: Backend
    index: int
    fallback: str = "allow"
    batch_invariant: bool = False
    debug_checks: bool = False
    only_reference: bool = False
    observer: Observer | None = None
    choices: dict[tuple[str, str], Choice] = field(default_factory=dict)
    fallbacks: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._offers: dict[str, list[Kernel]] = {}
        for kernel in () if self.only_reference else self.backend.kernels(self.index):
            self._offers.setdefault(kernel.op, []).append(kernel)

    def bind(self, op: str, role: str = "", **statics: Any) -> Callable[..., None]:
        """The call of op `op` for `role` (e.g. "wq_b"), given what is known statically (dtypes, sizes, formats).

        Returns a callable that takes the card's arguments in order. Raises Unsupported, naming op and reasons, when no
        kernel may serve it.
        """
        card = get_card(op)
        kernel, refused = self._choose(card, CallSpec(op, statics, self.batch_invariant))
        self.choices[op, role] = Choice(op, role, kernel.provider, kernel.symbol, kernel.invariant, tuple(refused))
        call = kernel.fn
        if kernel.provider == "reference":
            self.fallbacks[op] += 1
        if self.debug_checks:
            call = _checked(card, call)
        if self.observer is not None:
            call = _observed(card, call, self)
        return call

    def _choose(self, card: OpCard, spec: CallSpec) -> tuple[Kernel, list[str]]:
        refused: list[str] = []
        offers = sorted(self._offers.get(card.name, ()), key=lambda kernel: -kernel.priority)
        if self.fallback == "allow" or self.only_reference:
            offers = [*offers, reference_kernel(card)]
        for kernel in offers:
            answer = kernel.supports(spec)
            if isinstance(answer, No):
                refused.append(f"{kernel.symbol}: {answer.reason}")
            elif self.batch_invariant and kernel.invariant != "yes":
                refused.append(f"{kernel.symbol}: batch invariance is {kernel.invariant!r}")
            else:
                return kernel, refused
        if self.fallback == "forbid" and not self.only_reference:
            refused.append("the reference is not allowed to serve (fallback is forbidden)")
        mode = " in batch-invariant mode" if self.batch_invariant else ""
        raise Unsupported(f"no kernel of backend {self.backend.name!r} serves op {card.name!r}{mode}: " + "; ".join(refused))

    def table(self) -> list[Choice]:
        """All choices made so far, by op and role."""
        return [self.choices[key] for key in sorted(self.choices)]


def _checked(card: OpCard, call: Callable[..., None]) -> Callable[..., None]:
    def checked(*values: Any, **named: Any) -> None:
        args = card.bind_args(values, named)
        check_call(card, args)
        call(*args.values())

    return checked


def _observed(card: OpCard, call: Callable[..., None], dispatcher: Dispatcher) -> Callable[..., None]:
    def observed(*values: Any, **named: Any) -> None:
        observer = dispatcher.observer
        if observer is None:
            call(*values, **named)
            return
        args = card.bind_args(values, named)
        observer(card, args, lambda: call(*args.values()))

    return observed
