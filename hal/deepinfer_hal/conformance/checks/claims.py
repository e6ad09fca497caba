"""What `supports` says is true both ways: Yes is served, No has a reason and is refused when bound, nothing falls back."""

import re
import sys
from typing import Any

from deepinfer_hal.card import all_cards
from deepinfer_hal.conformance.checks._base import Check, Profile
from deepinfer_hal.conformance.problem import Problem
from deepinfer_hal.conformance.verdict import CheckFailed, Declined
from deepinfer_hal.dispatch import Dispatcher
from deepinfer_hal.errors import Unsupported
from deepinfer_hal.kernel import CallSpec, Kernel, No, Yes


def _served_from_parts(symbol: str) -> set[str]:
    """Composites that run as their default decomposition over the backend's own parts, nested ones too.

    The dispatcher names such a kernel "op(part, part, ...)".
    """
    return {name for name in re.findall(r"(\w+)\(", symbol) if name in all_cards() and all_cards()[name].decomposition}


def run(problem: Problem, profile: Profile) -> None:
    answer = answer_of(problem.kernel, problem.spec)
    if isinstance(answer, No):
        _assert_refused_when_bound(problem, answer)
        return
    placed = problem.place()
    reached = _references_reached(problem, placed.args)
    reached -= _served_from_parts(problem.kernel.symbol)
    if reached and not problem.kernel.symbol.startswith("reference::"):
        raise CheckFailed(f"{problem.kernel.symbol} ran the reference of {', '.join(sorted(reached))}: that is falling back")


def answer_of(kernel: Kernel, spec: CallSpec) -> Yes | No:
    """The kernel's answer. CheckFailed if it is neither Yes nor a No with a reason, or if asking raises."""
    try:
        answer = kernel.supports(spec)
    except Exception as error:
        raise CheckFailed(f"supports raised {type(error).__name__}: {error}") from error
    if not isinstance(answer, (Yes, No)):
        raise CheckFailed(f"supports answered {answer!r}; it must be Yes() or No(reason)")
    if isinstance(answer, No) and not answer.reason.strip():
        raise CheckFailed("supports answered No without a reason")
    return answer


def _assert_refused_when_bound(problem: Problem, answer: No) -> None:
    if problem.subject.backend is None:
        return
    dispatcher = Dispatcher(_Only(problem.subject.backend, problem.kernel), problem.subject.index, fallback="forbid")
    try:
        dispatcher.bind(problem.card.name, "", **problem.spec.statics)
    except Unsupported:
        return
    raise CheckFailed(f"supports said No ({answer.reason}), but the op was bound")


class _Only:
    """A backend that offers one kernel, for a dispatcher that must not find another."""

    def __init__(self, backend: Any, kernel: Kernel) -> None:
        self.name, self._kernel = backend.name, kernel

    def kernels(self, index: int) -> list[Kernel]:
        return [self._kernel]


def _references_reached(problem: Problem, args: dict[str, Any]) -> set[str]:
    """Names of cards whose reference ran during the call. CheckFailed if the kernel declines what it claimed."""
    from deepinfer_hal.card import all_cards

    codes = {card.reference.__code__: name for name, card in all_cards().items() if hasattr(card.reference, "__code__")}
    reached: set[str] = set()

    def watch(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code in codes:
            reached.add(codes[frame.f_code])

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        problem.call(args)
    except Declined as error:
        raise CheckFailed(f"supports said Yes, but the call raised Unsupported: {error}") from error
    finally:
        sys.setprofile(before)
    return reached


CHECK = Check("claims", "A claim is a promise: Yes is served by this very kernel, No is refused with a reason.", run)
