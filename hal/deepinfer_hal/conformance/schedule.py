"""Which items a worker of a run takes next.

Items of one kernel follow each other in one worker: what the first of them costs, a compiler above all, is then paid once and
not by every worker at the same time. Every kernel has its first items run before any has its others, so that a run that ends
early has seen them all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from deepinfer_hal.conformance.plan import Item

BATCH = 4
"""Items that a worker takes at once: the last of them must not be waited for long."""

Name = tuple[str, str]


class Schedule:
    """The items that nobody has taken, by the group or the kernel that they belong to. Not thread safe."""

    def __init__(self, items: Iterable[Item]) -> None:
        self._left: dict[Name, deque[Item]] = {}
        self._owners: dict[Name, int] = {}
        # groups take longest, each together, then composites made of parts: so they come first
        for item in sorted(items, key=lambda item: (not item.group, item.group, "(" not in item.symbol)):
            self._left.setdefault(_name(item), deque()).append(item)

    def take(self, worker: int) -> list[Item]:
        """The next items for a worker: of what nobody has begun, of what it has begun itself, of what others have; none when all
        are taken."""
        if not self._left:
            return []
        new = next((name for name in self._left if name not in self._owners), None)
        if new is not None:
            self._owners[new] = worker
            return self._batch(new)
        own = [name for name in self._left if self._owners[name] == worker]
        return self._batch(max(own or self._left, key=lambda name: len(self._left[name])))

    def give_back(self, items: list[Item]) -> None:
        """Puts back what was taken and not run, to be taken first of its kernel."""
        for item in reversed(items):
            self._left.setdefault(_name(item), deque()).appendleft(item)

    def _batch(self, name: Name) -> list[Item]:
        """A group is taken whole."""
        items = self._left[name]
        taken = [items.popleft() for _ in range(len(items) if items[0].group else min(BATCH, len(items)))]
        if not items:
            del self._left[name]
        return taken


def _name(item: Item) -> Name:
    return item.group or item.op, item.symbol
