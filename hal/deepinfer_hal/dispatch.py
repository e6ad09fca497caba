"""Chooses one kernel per bound op, once at load, and hands out the bound call.

Candidates are the backend's kernels for the op and, for a composite, its parts bound one by one. The declared priority
decides, ties go to the larger card and then to the first offered; the choice is frozen, printable and part of every
report. Where a kernel of higher priority refuses only what the statics leave open, the call's own statics decide at its first
call, and the choice is frozen then (see `late`). A fall to the reference is counted and shown; with fallback="forbid" it is an
error.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from deepinfer_hal.backend import Backend
from deepinfer_hal.card import OpCard, all_cards, get_card
from deepinfer_hal.checks import check_call
from deepinfer_hal.errors import BackendContractError, BadCall, Unsupported
from deepinfer_hal.kernel import INVARIANCE, CallSpec, Kernel, No, Yes, reference_kernel
from deepinfer_hal.late import LateCall
from deepinfer_hal.statics import open_statics

Observer = Callable[[OpCard, Mapping[str, Any], Callable[[], None]], None]
"""Called as observer(card, args, call) in place of a bound call, which it makes by calling `call`."""

FALLBACKS = ("allow", "forbid")


@dataclass(frozen=True)
class Choice:
    """A frozen decision: which kernel serves a bound op, and why others do not. eager: the ops in it whose kernels no graph
    can hold, since they allocate or wait; a composite from parts allocates as torch does, which a graph's own pool serves."""

    op: str
    role: str
    provider: str
    symbol: str
    invariant: str
    refused: tuple[str, ...] = ()
    eager: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f"{self.op}[{self.role}]" if self.role else self.op
        why = f"; refused: {'; '.join(self.refused)}" if self.refused else ""
        return f"{where}: {self.symbol} by {self.provider}, batch invariance {self.invariant}{why}"


@dataclass(frozen=True)
class _Candidate:
    """A kernel that may serve, the ops for which it falls to references, those that no graph can hold, and whether its parts
    are observed one by one. picky: kernels before it that refused what the statics leave open."""

    kernel: Kernel
    falls: tuple[str, ...] = ()
    eager: tuple[str, ...] = ()
    observed: bool = False
    picky: tuple[Kernel, ...] = ()

    @property
    def asked(self) -> tuple[Kernel, ...]:
        """The kernels that a late call asks, each once: without a last resort, `kernel` is the last that refused."""
        return self.picky if any(self.kernel is one for one in self.picky) else (*self.picky, self.kernel)


@dataclass
class Dispatcher:
    """Binds ops for one device.

    fallback: "allow" | "forbid". batch_invariant: only kernels that state invariant="yes" may serve, else Unsupported
    names the op. debug_checks: every call is checked against its card. observer: called as observer(card, args, call) in
    place of each call, for profiles and traces; observe_parts: of the parts of a composite that has no kernel of its own,
    instead of the composite.

    Raises BackendContractError, listing every mistake, when the backend's kernels are not what they say.
    """

    backend: Backend
    index: int
    fallback: str = "allow"
    batch_invariant: bool = False
    debug_checks: bool = False
    only_reference: bool = False
    observer: Observer | None = None
    observe_parts: bool = False
    choices: dict[tuple[str, str], Choice] = field(default_factory=dict)
    fallbacks: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        if self.fallback not in FALLBACKS:
            raise BadCall(f"fallback must be {' or '.join(FALLBACKS)}, got {self.fallback!r}")
        self._offers: dict[str, list[Kernel]] = {}
        self._bound: dict[tuple[str, str], Choice] = {}
        self._left_open: set[tuple[str, str]] = set()
        self._settled: set[tuple[str, str]] = set()
        kernels = () if self.only_reference else tuple(self.backend.kernels(self.index))
        mistakes = tuple(one for kernel in kernels for one in _kernel_mistakes(kernel))
        if mistakes:
            raise BackendContractError(f"backend {self.backend.name!r} offers kernels that break the contract:", mistakes)
        for kernel in kernels:
            self._offers.setdefault(kernel.op, []).append(kernel)

    def bind(self, op: str, role: str = "", **statics: Any) -> Callable[..., None]:
        """The call of op `op` for `role` (e.g. "wq_b"), given what is known statically (dtypes, sizes, formats).

        Returns a callable that takes the card's arguments in order. Raises Unsupported, naming op and reasons, when no
        kernel may serve it, and BadCall when the role is bound already to another kernel.
        """
        card = get_card(op)
        chosen, refused = self._choose(card, CallSpec(op, statics, self.batch_invariant))
        kernel = chosen.kernel
        eager = () if chosen.picky else chosen.eager
        choice = Choice(op, role, kernel.provider, kernel.symbol, kernel.invariant, tuple(refused), eager)
        frozen = self._bound.setdefault((op, role), choice)
        if (frozen.provider, frozen.symbol) != (choice.provider, choice.symbol):
            raise BadCall(
                f"{op}: role {role!r} is bound to {frozen.symbol} already; give calls that need {choice.symbol} another role"
            )
        self.choices.setdefault((op, role), choice)
        self.fallbacks.update(() if chosen.picky else chosen.falls)
        (self._left_open if chosen.picky else self._settled).add((op, role))
        call = self._late(card, role, chosen) if chosen.picky else kernel.fn
        if self.debug_checks:
            call = _checked(card, call)
        if self.observer is not None and not chosen.observed:
            call = _observed(card, call, self)
        return call

    def _late(self, card: OpCard, role: str, chosen: _Candidate) -> LateCall:
        """The call whose kernel its own statics decide. The table then has the kernels that really serve: under the role, and
        under role #2, #3, ... where calls of one role differ."""
        names: list[str] = []

        def settled(kernel: Kernel, refused: list[str]) -> None:
            last = kernel is chosen.kernel
            eager = chosen.eager if last else () if kernel.capturable else (card.name,)
            if any(self.choices[card.name, name].symbol == kernel.symbol for name in names):
                return
            names.append(f"{role} #{len(names) + 1}" if names else role)
            facts = (kernel.provider, kernel.symbol, kernel.invariant, tuple(refused), eager)
            self.choices[card.name, names[-1]] = Choice(card.name, names[-1], *facts)
            self._settled.add((card.name, names[-1]))
            self.fallbacks.update(chosen.falls if last else ())

        asked = chosen.asked
        if chosen.observed:  # the last resort's parts are observed, so the others must be as a whole
            *picky, last = asked
            asked = (*(dataclasses.replace(kernel, fn=_observed(card, kernel.fn, self)) for kernel in picky), last)
        nobody = f"no kernel of backend {self.backend.name!r} serves this call of op {card.name!r}"
        if role:
            nobody += f" (role {role!r})"
        if self.fallback == "forbid":
            nobody += ", and fallback is forbidden (fallback='allow' lets the reference serve)"
        return LateCall(card, asked, self.batch_invariant, settled, nobody)

    def _choose(self, card: OpCard, spec: CallSpec) -> tuple[_Candidate, list[str]]:
        refused: list[str] = []
        picky: list[Kernel] = []
        for offer in self._by_priority(card, refused):
            kernel = offer.kernel
            answer = kernel.supports(spec)
            if not isinstance(answer, (Yes, No)):
                raise BackendContractError(f"{kernel.symbol}: supports() must answer Yes or No, got {answer!r}")
            if self.batch_invariant and kernel.invariant != "yes":
                answer = No(f"batch invariance is {kernel.invariant!r}")
            elif isinstance(answer, No) and kernel.provider != "reference":
                picky.append(kernel)
            if isinstance(answer, Yes):
                late = tuple(picky) if open_statics(card, spec.statics) else ()
                return dataclasses.replace(offer, picky=late), refused
            refused.append(f"{kernel.symbol}: {answer.reason}")
        if picky and open_statics(card, spec.statics):
            last = picky[-1]
            return _Candidate(last, (), () if last.capturable else (card.name,), picky=tuple(picky)), refused
        if self.fallback == "forbid" and not self.only_reference:
            refused.append("the reference is not allowed to serve (fallback is forbidden)")
        mode = " in batch-invariant mode" if self.batch_invariant else ""
        raise Unsupported(f"no kernel of backend {self.backend.name!r} serves op {card.name!r}{mode}: " + "; ".join(refused))

    def _by_priority(self, card: OpCard, refused: list[str]) -> list[_Candidate]:
        """Every candidate for an op, the reference last."""
        offers = [
            _Candidate(kernel, eager=() if kernel.capturable else (card.name,)) for kernel in self._offers.get(card.name, ())
        ]
        if card.decomposition and (parts := self._from_parts(card, refused)):
            offers.append(parts)
        offers.sort(key=lambda offer: -offer.kernel.priority)
        if self.fallback == "allow" or self.only_reference:
            offers.append(_Candidate(reference_kernel(card), (card.name,), (card.name,)))
        return offers

    def _from_parts(self, card: OpCard, refused: list[str]) -> _Candidate | None:
        """A composite's default decomposition over the backend's kernels; None where it has none for any part.

        Its priority is the lowest of those kernels, its batch invariance that of the weakest part.
        """
        parts: dict[str, _Candidate] = {}
        for op in card.decomposition:
            try:
                parts[op] = self._choose(get_card(op), CallSpec(op, {}, self.batch_invariant))[0]
            except Unsupported as error:
                if any(self._offers.get(one) for one in card.decomposition):
                    refused.append(f"{card.name} from its parts: {error}")
                return None
        kernels = {op: part.kernel for op, part in parts.items()}
        native = [kernel for kernel in kernels.values() if kernel.provider != "reference"]
        native += [kernel for part in parts.values() for kernel in part.picky]
        if not native:
            return None
        observed = self.observe_parts and self.observer is not None
        calls = {op: self._part_call(card, get_card(op), part, observed) for op, part in parts.items()}
        whole = Kernel(
            card.name,
            "+".join(sorted({kernel.provider for kernel in native})),
            functools.partial(card.reference, parts=SimpleNamespace(**calls)),
            f"{card.name}({', '.join(_symbols(part) for part in parts.values())})",
            max((kernel.invariant for kernel in kernels.values()), key=INVARIANCE.index),
            priority=min(kernel.priority for kernel in native),
        )
        settled = [part for part in parts.values() if not part.picky]
        falls, eager = (tuple(op for part in settled for op in getattr(part, name)) for name in ("falls", "eager"))
        return _Candidate(whole, falls, eager, observed)

    def _part_call(self, composite: OpCard, card: OpCard, part: _Candidate, observed: bool) -> Callable[..., None]:
        call = self._late(card, f"in {composite.name}", part) if part.picky else part.kernel.fn
        if self.debug_checks:
            call = _checked(card, call)
        return _observed(card, call, self) if observed and not part.observed else call

    def table(self) -> list[Choice]:
        """All choices made so far, by op and role; each prints as a sentence."""
        return [self.choices[key] for key in sorted(self.choices)]

    def decided(self) -> list[Choice]:
        """The table without what its first call has yet to decide: there it names the kernel that was bound, which may never
        serve."""
        undecided = self._left_open - self._settled
        return [choice for choice in self.table() if (choice.op, choice.role) not in undecided]


def _symbols(part: _Candidate) -> str:
    """The kernels that may serve a part, in the order in which they are asked."""
    return " | ".join(kernel.symbol for kernel in part.asked)


def _kernel_mistakes(kernel: Kernel) -> list[str]:
    mistakes = []
    if kernel.op not in all_cards():
        mistakes.append(f"{kernel.symbol}: no op card is named {kernel.op!r}")
    if kernel.invariant not in INVARIANCE:
        mistakes.append(f"{kernel.symbol}: invariant must be one of {', '.join(INVARIANCE)}, got {kernel.invariant!r}")
    if kernel.provider == "reference":
        mistakes.append(f"{kernel.symbol}: the provider name 'reference' is that of the cards")
    return mistakes


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
