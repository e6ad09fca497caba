"""Which items a worker of a run takes next.

Items of one kernel follow each other in one worker: what the first of them costs, a compiler above all, is then paid once and
not by every worker at the same time. Every kernel, but those of groups, has its first items run before any has its others, so
that a run that ends early has seen them all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from deepinfer_hal.conformance.plan import Item

BATCH = 4
"""Items that a worker takes at once: the last of them must not be waited for long."""

Name = tuple[str, str]


class Schedule:
    """The items that nobody has taken, by the group or the kernel that they belong to, for so many workers. Not thread safe."""

    def __init__(self, items: Iterable[Item], workers: int) -> None:
        self._left: dict[Name, deque[Item]] = {}
        self._owners: dict[Name, int] = {}
        self._most_groups, self._in_groups = workers // 2, set[int]()
        # groups take longest, each together, then composites made of parts: so they come first
        for item in sorted(items, key=lambda item: (not item.group, item.group, "(" not in item.symbol)):
            self._left.setdefault(_name(item), deque()).append(item)

    def take(self, worker: int) -> list[Item]:
        """The next items for a worker: of what nobody has begun, of what it has begun itself, of what others have; none when all
        are taken. At most half of the workers are in groups while there is anything else."""
        self._in_groups.discard(worker)
        new = next((name for name in self._left if name not in self._owners and self._may_begin(name)), None)
        begun = [name for name in self._left if name in self._owners]
        own = [name for name in begun if self._owners[name] == worker]
        choice = [new] if new else own or begun or list(self._left)
        return self._batch(max(choice, key=lambda name: len(self._left[name])), worker) if choice else []

    def _may_begin(self, name: Name) -> bool:
        return not self._left[name][0].group or len(self._in_groups) < self._most_groups

    def give_back(self, items: list[Item]) -> None:
        """Puts back what was taken and not run, to be taken first of its kernel."""
        for item in reversed(items):
            self._left.setdefault(_name(item), deque()).appendleft(item)

    def _batch(self, name: Name, worker: int) -> list[Item]:
        """A group is taken whole."""
        items = self._left[name]
        self._owners.setdefault(name, worker)
        if items[0].group:
            self._in_groups.add(worker)
        taken = [items.popleft() for _ in range(len(items) if items[0].group else min(BATCH, len(items)))]
        if not items:
            del self._left[name]
        return taken


def _name(item: Item) -> Name:
    return item.group or item.op, item.symbol
