"""Writes docs/mutants.md: `python -m tests.conformance.mutants.page docs/mutants.md` from the root of the tree."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from deepinfer_hal.conformance import CHECKS

from tests.conformance.mutants import devices, processes, ranks
from tests.conformance.mutants.catalogue import FAMILIES, KERNEL_MUTANTS

_HEAD = """# Mutants

Made from `tests/conformance/mutants/` by `python -m tests.conformance.mutants.page docs/mutants.md`; edit the mutants, not
this page.

A mutant is a kernel, or a backend, that is wrong in one way. `tests/conformance/test_mutants.py` runs all {total} of them:
each must fail exactly the checks that it names here, and the kernels that they were made from must pass the same cases.

A kernel that claims less than it can is no mutant: its cases are `unsupported`, with its reason.

"""

_TITLES = {
    "formats": "Row formats", "caches": "Stores of KV rows", "attention": "Attention and carry",
    "selection": "Scores and selection",
    "gemm": "Products", "moe": "Experts", "residual": "Norms, rope, streams", "tokens": "Tokens", "weights": "Weights",
    "contract": "Claims, refusals, memory, streams",
}  # fmt: skip


def page() -> str:
    """The whole page: who kills whom, then every mutant by family."""
    others = (devices.MUTANTS, ranks.MUTANTS, processes.MUTANTS)
    total = len(KERNEL_MUTANTS) + sum(map(len, others))
    parts = [_HEAD.format(total=total), _checks()]
    for family, mutants in FAMILIES.items():
        rows = ((f"`{m.name}`", m.op, ", ".join(m.killed_by), m.why) for m in mutants)
        parts.append(_section(_TITLES[family], ("mutant", "op", "checks that fail", "the fault"), rows))
    for title, mutants in zip(("Devices", "Ranks", "Processes"), others, strict=True):
        kind = "verdict" if title == "Processes" else "cases that fail"
        rows = ((f"`{m.name}`", ", ".join(f"`{one}`" for one in m.killed_by), m.why) for m in mutants)
        parts.append(_section(title, ("mutant", kind, "the fault"), rows))
    return "\n".join(parts)


def _checks() -> str:
    """Each check with the mutants that nothing else catches, and how many it catches at all."""
    rows = []
    for check in CHECKS.values():
        alone = [f"`{m.name}`" for m in KERNEL_MUTANTS if m.killed_by == (check.name,)]
        caught = sum(check.name in m.killed_by for m in KERNEL_MUTANTS)
        rows.append((check.name, check.why, str(caught), ", ".join(alone)))
    head = ("check", "why", "mutants", "of these live without it")
    return _section("Checks", head, rows)


def _section(title: str, head: tuple[str, ...], rows: Iterable[tuple[Any, ...]]) -> str:
    lines = [f"## {title}", "", f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows), ""])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
