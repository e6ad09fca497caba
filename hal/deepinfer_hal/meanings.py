"""What a vendor's error means, in words: the form in which a backend's tables tell it (`deepinfer hal explain`)."""

from __future__ import annotations

from dataclasses import dataclass

OUT_OF_MEMORY, DEVICE_LOST, UNKNOWN = "out_of_memory", "device_lost", "unknown"
"""What `Backend.classify_error` answers."""

A_FOREIGN_ADDRESS = (
    "an index read from device memory (block table, slot, expert id) points outside its buffer: run the op's conformance "
    "cases, then the step with debug checks"
)
"""The likely cause of a touch outside a buffer, on any device."""


@dataclass(frozen=True)
class Meaning:
    """One error: `words` are a code, or what is looked for in a message; the first is its name. `kind` is what
    `Backend.classify_error` answers, `source` the page that says it."""

    words: tuple[str, ...]
    says: str
    causes: tuple[str, ...]
    kind: str
    source: str

    def lines(self) -> list[str]:
        """For people: what it says, likely causes, where that is written."""
        found = [f"{self.words[0]}: {self.says}"]
        found += [f"  likely: {cause}" for cause in self.causes]
        return [*found, f"  handled as {self.kind}; source: {self.source}"]
