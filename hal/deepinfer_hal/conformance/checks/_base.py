"""What a check is, and how much it may repeat."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from deepinfer_hal.conformance.problem import Problem
from deepinfer_hal.errors import BadCall


@dataclass(frozen=True)
class Profile:
    """How thorough a run is.

    repetitions: runs of a case that must give the same bits; repeat_seconds: time one case may spend on them (the first to be
    reached ends it, but not before repeat_least runs); shapes: property-based problems an op; case_seconds: time limit of a
    case.
    """

    name: str
    repetitions: int
    repeat_seconds: float
    shapes: int
    case_seconds: float
    repeat_least: int = 3


CORE = Profile("core", repetitions=1000, repeat_seconds=1.0, shapes=4, case_seconds=60.0)
FULL = Profile("full", repetitions=1000, repeat_seconds=float("inf"), shapes=40, case_seconds=300.0)
PROFILES = {"core": CORE, "full": FULL}


def get_profile(name: str | Profile) -> Profile:
    """A profile by name; BadCall lists the names there are."""
    if isinstance(name, Profile):
        return name
    if name not in PROFILES:
        raise BadCall(f"no profile is named {name!r}; there are {', '.join(PROFILES)}")
    return PROFILES[name]


@dataclass(frozen=True)
class Check:
    """One thing that must hold of every kernel.

    why: one sentence. run(problem, profile) raises CheckFailed. applies(problem) is False where there is nothing to see.
    """

    name: str
    why: str
    run: Callable[[Problem, Profile], None]
    applies: Callable[[Problem], bool] = lambda problem: not problem.empty


class Checks(Mapping[str, Check]):
    """An ordered table of checks by name."""

    def __init__(self, checks: Iterable[Check]) -> None:
        self._checks = {check.name: check for check in checks}

    def __getitem__(self, name: str) -> Check:
        if name not in self._checks:
            raise BadCall(f"no check is named {name!r}; there are {', '.join(self._checks)}")
        return self._checks[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._checks)

    def __len__(self) -> int:
        return len(self._checks)

    def without(self, *names: str) -> Checks:
        """All but these. BadCall for an unknown name."""
        for name in names:
            self[name]
        return Checks(check for name, check in self._checks.items() if name not in names)

    def only(self, *names: str) -> Checks:
        """Just these."""
        return Checks(self[name] for name in names)
