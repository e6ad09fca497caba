"""The porter's ladder: six rungs from the first token to speed, and what a backend lacks of each.

A rung of ops is reached when each of its ops is served by the backend's own kernels (a composite also by those of its
parts) and is right on one case of its card. The first rung asks only that every op runs on the device and is right,
whoever serves it. `deepinfer hal test` asks far more of each op; the ladder says where to work next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from deepinfer_hal.backend import Backend
from deepinfer_hal.card import Case, OpCard, all_cards
from deepinfer_hal.conformance import CHECKS, run_op
from deepinfer_hal.conformance.execute import first_with_rows
from deepinfer_hal.dispatch import Dispatcher
from deepinfer_hal.errors import BadCall, DeepInferError, Unsupported
from deepinfer_hal.kernel import Kernel
from deepinfer_hal.statics import call_spec
from deepinfer_hal.weights import prepare_canonical

FALLS = "falls to the reference"
"""What `Standing.missing` says of an op that the backend has no kernel for, nor for any part of."""

_QUICK = CHECKS.only("values", "discrete", "untouched")


@dataclass(frozen=True)
class Rung:
    """A step of the ladder. ops(card): whether the card is one of its ops; kernels: whether those need kernels."""

    name: str
    goal: str
    ops: Callable[[OpCard], bool]
    kernels: bool = True


@dataclass(frozen=True)
class Standing:
    """Where a backend stands on a rung: ops done of ops wanted, and one sentence for each thing that is missing."""

    rung: Rung
    done: int
    wanted: int
    missing: tuple[str, ...]

    @property
    def reached(self) -> bool:
        return not self.missing


def _groups(*names: str, also: tuple[str, ...] = ()) -> Callable[[OpCard], bool]:
    """Plain ops of these groups; composites, which may reach across rungs, only where `also` names them."""
    return lambda card: (card.group in names and not card.decomposition) or card.name in also


_KV_AND_ATTENTION = _groups("attention", also=("write_kv", "store_draft_kv"))

RUNGS = (
    Rung("first token", "every op runs on the device and is right", lambda card: True, kernels=False),
    Rung("KV and attention", "own kernels for caches, indexer and attention", _KV_AND_ATTENTION),
    Rung("GEMM and MoE", "own kernels for projections and experts", _groups("gemm", "moe", also=("moe_layer",))),
    Rung("communication", "a communicator, so that ranks share the experts", _groups("communication"), kernels=False),
    Rung("graphs", "a step is captured once and replayed", lambda card: False),
    Rung("speed", "no op falls to its reference", lambda card: card.group != "communication"),
)


def climb(backend: Backend, index: int, rungs: tuple[Rung, ...] = RUNGS) -> Iterator[Standing]:
    """Where the backend stands on each of these rungs. Runs one case of each op on the device."""
    for rung in rungs:
        missing, cards = [], [card for card in all_cards().values() if rung.ops(card)]
        for card in cards:
            problem = check_op(backend, index, card, rung.kernels)
            if problem:
                missing.append(f"{card.name}: {problem}")
        done = len(cards) - len(missing)
        missing += _missing_slots(rung, backend, index)
        yield Standing(rung, done, len(cards), tuple(missing))


def get_rung(number: int) -> Rung:
    """Rung 1, 2, ...; BadCall lists them."""
    if not 1 <= number <= len(RUNGS):
        names = ", ".join(f"{i} {rung.name}" for i, rung in enumerate(RUNGS, 1))
        raise BadCall(f"there is no rung {number}; they are {names}")
    return RUNGS[number - 1]


def _missing_slots(rung: Rung, backend: Backend, index: int) -> list[str]:
    if rung.name == "communication" and backend.communicator(index) is None:
        return ["communicator() gives None"]
    if rung.name != "graphs":
        return []
    missing = [] if backend.capabilities(index).graphs else ["capabilities() says graphs=False"]
    if backend.graphs(index) is None:
        missing.append("graphs() gives None")
    eager = [kernel.op for kernel in backend.kernels(index) if not kernel.capturable]
    if eager:
        missing.append(f"{len(eager)} kernels are not declared capturable, {eager[0]} for one")
    return missing


def check_op(backend: Backend, index: int, card: OpCard, own_kernel: bool) -> str | None:
    """Runs one case of an op on the device; what is wrong, or None. own_kernel: references must not serve any of it."""
    case = _quick_case(card)
    statics = call_spec(card, card.generate(case, 0, "cpu", prepare_canonical)).statics
    dispatcher = Dispatcher(backend, index, fallback="forbid" if own_kernel else "allow")
    try:
        serving = dispatcher.bind(card.name, "ladder", **statics)
    except Unsupported as error:
        return _why_not(card, backend.kernels(index), error)
    # A symbol of this form tells the suite that references may serve.
    symbol = dispatcher.choices[card.name, "ladder"].symbol if own_kernel else f"reference::{card.name}+ladder"
    kernel = Kernel(card.name, backend.name, serving, symbol)
    try:
        (result,) = run_op(card, kernel, checks=_QUICK, cases=[case], backend=backend, index=index)
    except (DeepInferError, RuntimeError) as error:
        return f"{case.id} raised {type(error).__name__}: {str(error).splitlines()[0]}"
    failures = "; ".join(f"{name}: {why}" for name, why in result.failures.items())
    return f"{case.id} is wrong: {failures}" if failures else None


def _why_not(card: OpCard, kernels: Sequence[Kernel], error: Unsupported) -> str:
    if any(kernel.op in (card.name, *card.decomposition) for kernel in kernels):
        return str(error)
    return FALLS


def _quick_case(card: OpCard) -> Case:
    """The first case that is no empty problem."""
    cases = list(card.enumerate_cases())
    wanted = first_with_rows(card, cases)
    return next(case for case in cases if wanted in (None, case.id))
