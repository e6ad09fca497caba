"""What a run covers: the plan that the user asked for, and the items that it expands to on a backend."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from deepinfer_hal.backend import Backend
from deepinfer_hal.card import Case, OpCard, all_cards, get_card
from deepinfer_hal.conformance import cases as catalogue
from deepinfer_hal.conformance.checks import CHECKS, Checks, get_profile
from deepinfer_hal.conformance.execute import first_with_rows
from deepinfer_hal.conformance.problem import Subject
from deepinfer_hal.conformance.traces import trace_ids
from deepinfer_hal.dispatch import Dispatcher
from deepinfer_hal.errors import BadCall, Unsupported
from deepinfer_hal.kernel import Kernel, reference_kernel
from deepinfer_hal.late import LateCall

OPENER = "deepinfer_hal.registry:open_backend"

CARD, TRACE, SYSTEM = "card", "trace", "system"


@dataclass(frozen=True)
class Plan:
    """A run as it was asked for.

    spec: what `opener` opens, by default a backend as in "cpu" or "name:1". ops, cases: only these (empty: all).
    reference: test the references on the backend's device. traces: files of `deepinfer hal record`. checks: names, empty
    for all. case_seconds: time limit of a case, 0 for the profile's.
    """

    spec: str = "cpu"
    opener: str = OPENER
    profile: str = "core"
    ops: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    reference: bool = False
    traces: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    seed: int = 0
    case_seconds: float = 0.0

    @property
    def whole(self) -> bool:
        """Whether nothing was left out: only such a run can be verified."""
        return not (self.ops or self.cases or self.checks)

    @property
    def limit_seconds(self) -> float:
        return self.case_seconds or get_profile(self.profile).case_seconds

    def table(self) -> Checks:
        return CHECKS.only(*self.checks) if self.checks else CHECKS

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Plan:
        lists = {name: tuple(values[name]) for name in ("ops", "cases", "traces", "checks")}
        return cls(**{**values, **lists})

    def check(self) -> Plan:
        """Itself, after BadCall for an unknown profile, check, op or case id."""
        get_profile(self.profile)
        self.table()
        catalogue.check_ops(self.ops)
        known = {case.id for case in catalogue.system_cases(self.profile)} | {i for path in self.traces for i in trace_ids(path)}
        for id in self.cases:
            if id not in known:
                catalogue.parse_case(id)
        return self


@dataclass(frozen=True)
class Item:
    """One case on one kernel, as the worker is told of it. `unsupported`: why nothing can serve the op, else empty.

    first: the op's first case with rows. share: cases that share the op's time for repetitions. group: of `SystemCase`.
    """

    source: str
    op: str
    id: str
    symbol: str = ""
    provider: str = ""
    first: bool = False
    share: int = 1
    unsupported: str = ""
    group: str = ""


def open_subject(plan: Plan) -> tuple[Backend, int]:
    """The backend of a plan. BadCall if the opener is no function."""
    module, _, name = plan.opener.partition(":")
    try:
        opener: Callable[[str], tuple[Backend, int]] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise BadCall(f"opener {plan.opener!r} is no module:function that can be imported: {error}") from error
    return opener(plan.spec)


def offers_of(backend: Backend, index: int, reference: bool) -> dict[str, list[Kernel]]:
    """op -> the kernels under test: all that are offered, a composite's parts where it has no kernel, or the references."""
    if reference:
        return {name: [reference_kernel(card)] for name, card in all_cards().items()}
    offers: dict[str, list[Kernel]] = {}
    for kernel in backend.kernels(index):
        offers.setdefault(kernel.op, []).append(kernel)
    for name, card in all_cards().items():
        if card.decomposition and name not in offers:
            offers[name] = _from_parts(backend, index, card)
    return offers


def _from_parts(backend: Backend, index: int, card: OpCard) -> list[Kernel]:
    """The composite as a dispatcher would assemble it from the backend's own kernels, or nothing."""
    dispatcher = Dispatcher(backend, index, fallback="forbid")
    try:
        call = dispatcher.bind(card.name)
    except Unsupported:
        return []
    choice = dispatcher.table()[0]
    return [Kernel(card.name, choice.provider, call, choice.symbol, choice.invariant)]


def subjects(backend: Backend, index: int, reference: bool) -> dict[tuple[str, str], Subject]:
    """(op, symbol) -> what is tested; the backend's preferred kernels serve as parts of composites."""
    offers = offers_of(backend, index, reference)
    best = {op: _preferred(kernels) for op, kernels in offers.items() if kernels}
    return {
        (op, kernel.symbol): Subject(get_card(op), kernel, backend, index, best)
        for op, kernels in offers.items()
        if op in all_cards()
        for kernel in kernels
    }


def _preferred(kernels: list[Kernel]) -> Kernel:
    """The kernel of the highest priority, which gives a call that it does not serve to the next, as a binding does."""
    ordered = sorted(kernels, key=lambda kernel: -kernel.priority)
    if len(ordered) == 1:
        return ordered[0]
    call = LateCall(get_card(ordered[0].op), ordered, False, lambda kernel, refused: None)
    return replace(ordered[0], fn=call)


def expand(plan: Plan, backend: Backend, index: int) -> list[Item]:
    """Every item of a plan, in a fixed order: devices, ops by name, traces, then other packages' cases."""
    offers, items = offers_of(backend, index, plan.reference), []
    for name, card in sorted(all_cards().items()):
        if plan.ops and name not in plan.ops:
            continue
        chosen = [case for case in catalogue.op_cases(card, plan.profile) if not plan.cases or case.id in plan.cases]
        chosen += [c for c in map(_parse, plan.cases) if c is not None and c.op == name and c.id not in {x.id for x in chosen}]
        items += _op_items(card, chosen, offers.get(name, []))
    for path in plan.traces:
        recorded = trace_ids(path)
        calls = Counter(recorded.values())
        for id, op in recorded.items():
            kernels = offers.get(op, [])
            items += [Item(TRACE, op, id, k.symbol, k.provider, share=calls[op]) for k in kernels] or [_unserved(TRACE, op, id)]
    if not plan.reference or plan.cases:
        items += [Item(SYSTEM, case.op, case.id, group=case.group) for case in catalogue.system_cases(plan.profile)]
    if plan.ops:
        items = [item for item in items if item.op in plan.ops]
    return [item for item in items if item.id in plan.cases] if plan.cases else items


def _op_items(card: OpCard, chosen: list[Case], kernels: list[Kernel]) -> list[Item]:
    if not kernels:
        return [_unserved(CARD, card.name, case.id) for case in chosen]
    first = first_with_rows(card, chosen)
    return [
        replace(Item(CARD, card.name, case.id, kernel.symbol, kernel.provider), first=case.id == first, share=len(chosen))
        for kernel in kernels
        for case in chosen
    ]


def _unserved(source: str, op: str, id: str) -> Item:
    return Item(source, op, id, unsupported="the backend offers no kernel of this op")


def _parse(id: str) -> Case | None:
    """The case of a card, or None for ids of traces and systems, which `Plan.check` has accepted."""
    try:
        return catalogue.parse_case(id)
    except BadCall:
        return None
