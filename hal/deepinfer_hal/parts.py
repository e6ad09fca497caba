"""One thing that a device needs on a machine, as it is told to people: what is wanted and what was found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """One thing that a device needs: its name, what is wanted, what was found, and whether that will do."""

    name: str
    wanted: str
    found: str
    ok: bool

    def __str__(self) -> str:
        return f"{self.name}: wanted {self.wanted}, found {self.found}"
