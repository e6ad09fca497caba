"""What changed from one report to another: verdicts, kernels, errors, times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deepinfer_hal.conformance.verdict import BROKEN, PASS

ERROR_GROWTH, SLOWER = 2.0, 1.5

_LEAST_ERROR = 0.1
"""Share of the tolerance below which a growing error is no news."""


@dataclass
class Difference:
    """Lines for people, sorted by how much they matter. A regression is a case that passed and does not any more."""

    regressions: list[str] = field(default_factory=list)
    repairs: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)
    slower: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        sections = {"regression": self.regressions, "repaired": self.repairs, "changed": self.other, "time": self.slower}
        return [f"{name:10} {line}" for name, lines in sections.items() for line in lines]


def compare_reports(a: Mapping[str, Any], b: Mapping[str, Any]) -> Difference:
    """From report a to report b, case by case; a case on another kernel of the same provider is the same case."""
    difference = Difference()
    before, after = _by_case(a), _by_case(b)
    for key in [*before, *(key for key in after if key not in before)]:
        name = " @ ".join(part for part in key if part)
        if key not in after:
            kind = difference.regressions if before[key]["verdict"] == PASS else difference.other
            kind.append(f"{name}: {before[key]['verdict']} -> absent")
        elif key not in before:
            kind = difference.regressions if after[key]["verdict"] in BROKEN else difference.other
            kind.append(f"{name}: absent -> {after[key]['verdict']}")
        else:
            _compare_case(name, before[key], after[key], difference)
    for part in ("backend", "device"):
        if a["subject"][part] != b["subject"][part]:
            difference.other.append(f"{part}: {a['subject'][part]} -> {b['subject'][part]}")
    if a["suite"]["commit"] != b["suite"]["commit"]:
        difference.other.append(f"suite: {a['suite']['commit']} -> {b['suite']['commit']}")
    return difference


def _by_case(report: Mapping[str, Any]) -> dict[tuple[str, str], Mapping[str, Any]]:
    return {(result["id"], result["provider"]): result for result in report["results"]}


def _compare_case(name: str, old: Mapping[str, Any], new: Mapping[str, Any], difference: Difference) -> None:
    if old["verdict"] != new["verdict"]:
        text = "; ".join(f"{check}: {message}" for check, message in new["failures"].items()) or new["reason"]
        line = f"{name}: {old['verdict']} -> {new['verdict']}" + (f" ({text})" if text else "")
        if old["verdict"] == PASS:
            difference.regressions.append(line)
        else:
            (difference.repairs if new["verdict"] == PASS else difference.other).append(line)
    if old["symbol"] != new["symbol"]:
        difference.other.append(f"{name}: kernel {old['symbol']} -> {new['symbol']}")
    for output, used in new["used"].items():
        was = old["used"].get(output, 0.0)
        if used > max(_LEAST_ERROR, ERROR_GROWTH * was):
            difference.other.append(f"{name}: error of {output} {was:.2f} -> {used:.2f} of what is allowed")
    if old["kernel_seconds"] and new["kernel_seconds"]:
        ratio = new["kernel_seconds"] / old["kernel_seconds"]
        if ratio > SLOWER or ratio < 1 / SLOWER:
            times = f"{1e6 * old['kernel_seconds']:.0f} -> {1e6 * new['kernel_seconds']:.0f} us"
            difference.slower.append(f"{name}: {times} (x {ratio:.2f})")
