"""Stop strings over text that arrives in pieces: cut at the leftmost match, and never let part of one out."""

from __future__ import annotations


class StopFinder:
    """Holds back the longest end of the text that could still become a stop string."""

    __slots__ = ("_held", "_include", "_stops")

    def __init__(self, stops: tuple[str, ...], include_in_output: bool = False) -> None:
        self._stops, self._include, self._held = stops, include_in_output, ""

    def push(self, text: str, active: bool = True) -> tuple[str, str | None]:
        """(text that may be shown, the stop string found or None).

        Only a match that ends within `text` counts, and only if `active`; of those the leftmost, of equals the
        shortest. A match that is passed over while inactive is ordinary text.
        """
        joined = self._held + text
        if active:
            found = self._find(joined, len(self._held))
            if found is not None:
                at, stop = found
                self._held = ""
                return joined[: at + len(stop) if self._include else at], stop
        keep = self._unfinished(joined)
        self._held = joined[len(joined) - keep :]
        return joined[: len(joined) - keep], None

    def flush(self) -> str:
        """What was held back, at the end."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str, seen: int) -> tuple[int, str] | None:
        best = None
        for stop in self._stops:
            at = text.find(stop, max(0, seen - len(stop) + 1))
            if at >= 0 and (best is None or (at, len(stop)) < (best[0], len(best[1]))):
                best = (at, stop)
        return best

    def _unfinished(self, text: str) -> int:
        """Length of the longest end of `text` that is a proper beginning of a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
