"""The words of a run: verdicts, the result of one case, and waivers."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepinfer_hal.errors import BadCall

PASS, FAIL, CRASH, TIMEOUT = "pass", "fail", "crash", "timeout"
WAIVED, UNSUPPORTED, NOT_RUN = "waived", "unsupported", "not-run"
VERDICTS = (PASS, FAIL, CRASH, TIMEOUT, WAIVED, UNSUPPORTED, NOT_RUN)
BROKEN = (FAIL, CRASH, TIMEOUT)
"""Verdicts that make a run fail unless they are waived."""

EXECUTED = (PASS, FAIL, CRASH, TIMEOUT, WAIVED)


class CheckFailed(Exception):
    """A check did not hold; the message says where, what was found and what must be. facts: measured, for the report."""

    def __init__(self, message: str, facts: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.facts = facts or {}


class Declined(Exception):
    """The kernel raised Unsupported for this call."""


@dataclass
class CaseResult:
    """One case on one kernel.

    failures: check -> message. checks: those that ran. used: output -> largest error as a share of what is allowed;
    histogram: output -> elements by error (see compare.BIN_EDGES). flips, boundary_hits: output -> elements that the
    contract excuses, counted. seconds: of the whole case; kernel_seconds: median of one call; bytes, flops: by the card.
    """

    id: str
    op: str
    provider: str = ""
    symbol: str = ""
    verdict: str = NOT_RUN
    reason: str = ""
    failures: dict[str, str] = field(default_factory=dict)
    checks: list[str] = field(default_factory=list)
    used: dict[str, float] = field(default_factory=dict)
    histogram: dict[str, list[int]] = field(default_factory=dict)
    flips: dict[str, int] = field(default_factory=dict)
    boundary_hits: dict[str, int] = field(default_factory=dict)
    seed: int = 0
    seconds: float = 0.0
    kernel_seconds: float | None = None
    bytes: int = 0
    flops: int = 0
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Case and kernel: unique in a report."""
        return f"{self.id} @ {self.symbol}" if self.symbol else self.id

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> CaseResult:
        return cls(**values)

    def line(self) -> str:
        """One line for people."""
        text = "; ".join(f"{check}: {message}" for check, message in self.failures.items()) or self.reason
        return f"{self.verdict:11} {self.key}" + (f"  {text}" if text else "")


@dataclass(frozen=True)
class Waiver:
    """A failure that is known and accepted until a day. `id` is a case id, exactly; `verdicts`: what may come of it."""

    id: str
    reason: str
    expires: datetime.date
    verdicts: tuple[str, ...] = BROKEN


def read_waivers(path: str | Path) -> list[Waiver]:
    """Waivers of a JSON file; BadCall names the entry that is not {"id", "reason", "expires": "YYYY-MM-DD"}."""
    try:
        entries = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadCall(f"waiver file {path} cannot be read: {error}") from None
    if not isinstance(entries, list):
        raise BadCall(f"waiver file {path} must hold a list")
    waivers = []
    for number, entry in enumerate(entries):
        good = isinstance(entry, dict) and set(entry) == {"id", "reason", "expires"} and all(map(str, entry.values()))
        try:
            waivers.append(Waiver(entry["id"], entry["reason"], datetime.date.fromisoformat(entry["expires"])))
        except (KeyError, TypeError, ValueError):
            good = False
        if not good or not entry["reason"].strip():
            raise BadCall(f'waiver {number} of {path} must be {{"id", "reason", "expires": "YYYY-MM-DD"}} with a reason')
    return waivers


def apply_waivers(
    results: Iterable[CaseResult], waivers: Iterable[Waiver], today: datetime.date | None = None
) -> list[str]:
    """Turns waived failures into `waived`, in place. Returns what is wrong with the waivers, a sentence each."""
    today = today or datetime.date.today()
    by_id: dict[str, list[CaseResult]] = {}
    for result in results:
        by_id.setdefault(result.id, []).append(result)
    problems = []
    for waiver in waivers:
        found = by_id.get(waiver.id, [])
        broken = [result for result in found if result.verdict in waiver.verdicts]
        if waiver.expires < today:
            problems.append(f"waiver of {waiver.id} expired on {waiver.expires}")
        elif found and not broken and any(result.verdict == PASS for result in found):
            problems.append(f"waiver of {waiver.id} is stale: the case passes")
        else:
            for result in broken:
                result.verdict = WAIVED
                result.reason = f"{waiver.reason} (until {waiver.expires})"
    return problems
