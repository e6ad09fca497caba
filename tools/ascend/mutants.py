"""Mutants of the AscendC kernels: what can be changed at a site, and what counts as naming it. Nothing here runs a kernel.

A site is a place in a kernel's source where the twin meets a flag, a barrier, a queue's step, a buffer count or a mask; a
helper that hands its caller's place on (`Sync` in di_rows.h) has one site for each use. A mutant is a site and one change,
made every time the site is reached.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePath

CHANGES = {
    "SetFlag": ("drop", "forget", "up", "down"),
    "WaitFlag": ("drop", "up", "down"),
    "PipeBarrier": ("drop",),
    "CrossCoreSetFlag": ("drop", "forget", "up", "down"),
    "CrossCoreWaitFlag": ("drop", "up", "down"),
    "SyncAll": ("drop",),
    "EnQue": ("drop",),
    "DeQue": ("drop",),
    "FreeTensor": ("drop",),
    "InitBuffer": ("up", "down"),
    "mask": ("drop",),
    "LocalMemBar": ("drop",),
}
"""Changes by kind of site. drop: left out (a mask becomes the full one); forget: it and its
wait take place, but order nothing, as if both were left out; up, down: the event id or the number of buffers is one off."""

CAUGHT = ("site", "ends", "elsewhere", "value")
"""How a mutant is caught: by a report that names its site; by one that names both ends of what the site orders, or its
partner; by a report of something else; by other values alone. `survived`, `crashed` and `hung` are none of these."""


@dataclass(frozen=True)
class Mutant:
    """One change at one site. `detail` is the event, pipe or mode that the site names."""

    kernel: str
    file: str
    line: int
    kind: str
    detail: str
    change: str

    @property
    def place(self) -> str:
        return f"{PurePath(self.file).name}:{self.line}"

    @property
    def id(self) -> str:
        return f"{self.kernel} {self.place} {self.kind}{f'<{self.detail}>' if self.detail else ''} {self.change}"


def mutants_of(sites: Iterable) -> list[Mutant]:
    """All mutants of recorded sites; a mask that is full whenever it is set has none."""
    found = []
    for site in sites:
        if site.kind == "mask" and site.highest == 0:
            continue
        for change in CHANGES[site.kind]:
            found.append(Mutant(site.kernel, site.file, site.line, site.kind, site.detail, change))
    return found


def _pipes_of_races(report: str) -> list[tuple[str, str]]:
    """The pipes of the two instructions of each race in a report."""
    races = [line for line in report.splitlines() if "race" in line]
    return [tuple(pipes[:2]) for line in races if len(pipes := re.findall(r"\(pipe (\w+) of", line)) >= 2]


def names(report: str, mutant: Mutant, partners: Mapping[str, set[str]]) -> str:
    """How a report names a mutant: "site", "ends" or "elsewhere".

    The ends are the other half of a pair (the WaitFlag of a SetFlag, the DeQue of an EnQue, ... as `partners` has them by
    `file:line` from the run without a change), or two unordered instructions on pipes that the site orders.
    """
    site = f"{mutant.file}:{mutant.line}"
    if re.search(re.escape(site) + r"\b", report):
        return "site"
    if any(re.search(re.escape(other) + r"\b", report) for other in partners.get(site, ())):
        return "ends"
    wanted = mutant.detail.split("_")
    for pipes in _pipes_of_races(report):
        between_cores = mutant.kind in ("SyncAll", "CrossCoreSetFlag", "CrossCoreWaitFlag", "LocalMemBar")
        if between_cores or mutant.detail == "ALL" or set(wanted) <= set(pipes):
            return "ends"
    return "elsewhere"


def summary(results: Iterable[Mapping]) -> dict:
    """Counts of results by kernel and over all: sites, mutants and outcomes."""
    kernels: dict[str, dict] = {}
    for result in results:
        row = kernels.setdefault(result["kernel"], {"sites": set(), "mutants": 0, "outcomes": {}})
        row["sites"].add((result["file"], result["line"], result["kind"], result["detail"]))
        row["mutants"] += 1
        row["outcomes"][result["outcome"]] = row["outcomes"].get(result["outcome"], 0) + 1
    for row in kernels.values():
        row["sites"] = len(row["sites"])
    total = {"sites": 0, "mutants": 0, "outcomes": {}}
    for row in kernels.values():
        total["sites"] += row["sites"]
        total["mutants"] += row["mutants"]
        for outcome, count in row["outcomes"].items():
            total["outcomes"][outcome] = total["outcomes"].get(outcome, 0) + count
    return {"total": total, "kernels": kernels}
