"""Where a benchmark's own time goes: seconds of the host by phase, each counted once."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator


class Phases:
    """`with phases("captures"):` adds the seconds until the block is left to that phase; a phase inside another takes its
    seconds from it, so that all of them add up to what passed.

    done: waits for the device, so that work which a phase enqueued counts as its own.
    """

    def __init__(self, done: Callable[[], None] = lambda: None) -> None:
        self._done, self._open = done, []
        self._since = 0.0
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._turn()
        self._open.append(name)
        try:
            yield
            self._done()
        finally:
            self._turn()
            self._open.pop()

    def _turn(self) -> None:
        """Gives the time since the last turn to the innermost phase."""
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] = self.seconds.get(self._open[-1], 0.0) + now - self._since
        self._since = now

    def take(self) -> dict[str, float]:
        """The seconds since the last taking, by phase; counts anew."""
        taken, self.seconds = self.seconds, {}
        return taken


def describe(seconds: dict[str, float]) -> str:
    """`captures 1.20 s, samples 0.31 s`, the longest first."""
    longest_first = sorted(seconds.items(), key=lambda one: -one[1])
    return ", ".join(f"{name} {value:.2f} s" for name, value in longest_first)
