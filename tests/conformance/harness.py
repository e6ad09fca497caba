"""One case of a card on one kernel, for tests: the suite's basic checks, raising where the suite would report.

    run_case(get_card("linear"), case)                     the float32 reference itself
    run_case(card, case, kernel, device="cuda", prepare=backend.prepare_weight)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from deepinfer_hal.card import Case, OpCard, all_cards
from deepinfer_hal.checks import check_call
from deepinfer_hal.conformance import CHECKS, CORE, Problem, Subject
from deepinfer_hal.conformance.checks.batch import assert_rows
from deepinfer_hal.conformance.verdict import CheckFailed
from deepinfer_hal.kernel import Kernel, reference_kernel
from deepinfer_hal.weights import WeightHandle, prepare_canonical

BASIC = CHECKS.only("empty", "values", "discrete", "untouched", "sentinels", "inputs")
"""Checks that every case gets here; the whole table is run by `deepinfer hal test`."""


class Mismatch(AssertionError):
    """A kernel's result differs from its card; the message names the case, the output and the worst element."""


@dataclass
class Outcome:
    """What a case showed: per float output the largest difference as a share of what is allowed, and flipped codes."""

    case: str
    used: dict[str, float] = field(default_factory=dict)
    flips: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class _Subject(Subject):
    """A subject on a device and with weight layouts of the test's own choice."""

    where: torch.device | str = "cpu"
    preparer: Callable[..., Any] = prepare_canonical

    @property
    def device(self) -> torch.device:
        return torch.device(self.where)

    def prepare(self, role: str, canonical: Any) -> WeightHandle:
        return self.preparer(role, canonical)

    def synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


def cases_of(*names: str) -> list[tuple[OpCard, Case]]:
    """(card, case) of the named ops, for parametrising a test; `case_id` gives the ids."""
    cards = all_cards()
    return [(cards[name], case) for name in names for case in cards[name].enumerate_cases()]


def case_id(value: Any) -> str | None:
    """pytest id of a parameter made by `cases_of`."""
    return value.id if isinstance(value, Case) else value.name if isinstance(value, OpCard) else None


def run_case(
    card: OpCard,
    case: Case,
    kernel: Kernel | Callable[..., None] | None = None,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    prepare: Callable[..., Any] = prepare_canonical,
) -> Outcome:
    """Runs `kernel` (the card's reference if None) on the case; raises Mismatch, or tells how close it was."""
    subject = _Subject(card, _kernel(card, kernel), where=device, preparer=prepare)
    problem = Problem(subject, case, seed, first=False)
    check_call(card, problem.pristine)
    for check in BASIC.values():
        if check.applies(problem):
            _run(case, check.run, problem, CORE)
    return Outcome(case.id, problem.statistics["used"], problem.statistics["flips"])


def assert_row_independent(card: OpCard, case: Case, kernel: Kernel | Callable[..., None] | None = None) -> None:
    """The bits of the first rows are the same whether or not there are rows after them."""
    problem = Problem(Subject(card, _kernel(card, kernel)), case)
    rows = problem.valid_rows
    for few in sorted({1, 2, rows // 2, rows - 1} & set(range(1, rows))):
        _run(case, assert_rows, problem, f"{few} rows without the rows after them", list(range(few)))


def _kernel(card: OpCard, kernel: Kernel | Callable[..., None] | None) -> Kernel:
    if kernel is None:
        return reference_kernel(card)
    return kernel if isinstance(kernel, Kernel) else Kernel(card.name, "test", kernel, f"test::{card.name}")


def _run(case: Case, check: Callable[..., None], *arguments: Any) -> None:
    try:
        check(*arguments)
    except CheckFailed as error:
        raise Mismatch(f"{case.id}: {error}") from error
