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
"""Changes by kind of site. drop: left out (a mask becomes the full one); up, down: the event id or the number of buffers is one
off; forget: a flag with all its ends left out (they take place, but order nothing): the SetFlags that the same WaitFlags meet,
such as the one that opens a buffer before a loop and the one that gives it back."""

CAUGHT = ("site", "ends", "elsewhere", "value")
"""How a mutant is caught: by a report that names its site; by one that names both ends of what the site orders, or its
partner; by a report of something else; by other values alone. `survived`, `crashed` and `hung` are none of these."""


@dataclass(frozen=True)
class Mutant:
    """One change at one site, or at the sites of one flag. `detail` is the event, pipe or mode that the site names."""

    kernel: str
    file: str
    line: int
    kind: str
    detail: str
    change: str
    also: tuple[str, ...] = ()

    @property
    def places(self) -> tuple[str, ...]:
        """Where it changes something, as file:line."""
        return (f"{self.file}:{self.line}", *self.also)

    @property
    def place(self) -> str:
        return f"{PurePath(self.file).name}:{self.line}"

    @property
    def id(self) -> str:
        return f"{self.kernel} {self.place} {self.kind}{f'<{self.detail}>' if self.detail else ''} {self.change}"


class Partners:
    """What met what in runs without a change: places as file:line, by event for the flags inside a core."""

    def __init__(self, pairs: Iterable[tuple[str, str, str]] = ()):
        self._of: dict[tuple[str, str], set[str]] = {}
        for first, second, event in pairs:
            self._of.setdefault((first, event), set()).add(second)
            self._of.setdefault((second, event), set()).add(first)

    def of(self, place: str, event: str) -> set[str]:
        """The places that one met."""
        return self._of.get((place, event), set()) | self._of.get((place, ""), set())

    def flag(self, place: str, event: str) -> set[str]:
        """All places that set or wait for the same flags as one, itself among them."""
        found, left = set(), {place}
        while left:
            found |= left
            left = {other for one in left for other in self.of(one, event)} - found
        return found


def mutants_of(sites: Iterable, partners: Partners) -> list[tuple[Mutant, list]]:
    """All mutants of recorded sites, each with the sites that it changes; a mask that is full whenever it is set has none."""
    sites = sorted((s for s in sites if s.kind != "mask" or s.highest > 0), key=lambda s: (s.file, s.line, s.kind, s.detail))
    found, forgotten = [], set()
    for site in sites:
        key = (site.kernel, site.kind, site.detail)
        for change in CHANGES[site.kind]:
            changed = [site]
            if change == "forget":
                if (*key, site.file, site.line) in forgotten:
                    continue
                flag = partners.flag(f"{site.file}:{site.line}", site.detail)
                same = [s for s in sites if (s.kernel, s.kind, s.detail) == key and f"{s.file}:{s.line}" in flag]
                changed = [site, *(s for s in same if s is not site)]
                forgotten |= {(*key, s.file, s.line) for s in changed}
            also = tuple(f"{s.file}:{s.line}" for s in changed[1:])
            found.append((Mutant(site.kernel, site.file, site.line, site.kind, site.detail, change, also), changed))
    return found


def _pipes_of_races(report: str) -> list[tuple[str, str]]:
    """The pipes of the two instructions of each race in a report."""
    races = [line for line in report.splitlines() if "race" in line]
    return [tuple(pipes[:2]) for line in races if len(pipes := re.findall(r"\(pipe (\w+) of", line)) >= 2]


def _holds(report: str, place: str) -> bool:
    return re.search(re.escape(place) + r"\b", report) is not None


def names(report: str, mutant: Mutant, partners: Partners) -> str:
    """How a report names a mutant: "site", "ends" or "elsewhere".

    The ends are the other half of a pair (the WaitFlag of a SetFlag, the DeQue of an EnQue, ... as `partners` has them from
    the runs without a change); two unordered instructions of which the earlier one is on the pipe that sets the flag or the
    later one on the pipe that waits for it (the other one may be what its pipe had waited for, or hands the order on to); the
    flag of the same event whose place a wrong id took; or the barrier that the report misses.
    """
    if any(_holds(report, place) for place in mutant.places):
        return "site"
    if any(_holds(report, other) for place in mutant.places for other in partners.of(place, mutant.detail)):
        return "ends"
    if mutant.change in ("up", "down") and f"Flag<{mutant.detail}>(" in report:
        return "ends"
    if mutant.kind == "PipeBarrier" and f"PipeBarrier<PIPE_{mutant.detail}>" in report:
        return "ends"
    wanted = mutant.detail.split("_")
    between_cores = mutant.kind in ("SyncAll", "CrossCoreSetFlag", "CrossCoreWaitFlag", "LocalMemBar")
    for pipes in _pipes_of_races(report):
        if between_cores or mutant.detail == "ALL" or pipes[0] == wanted[0] or pipes[1] == wanted[-1]:
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
