"""Hearts: every rank tells a store that it lives and what it does, and watches whether the others still do.

A rank is silent while its count stands still over observations that this rank really made, so a rank that was itself
stopped for a while does not take the others for dead, and clocks need not agree.
"""

from __future__ import annotations

import contextlib
import json
import threading
from dataclasses import dataclass

import torch.distributed as dist

BEATS_PER_DEADLINE = 20

SILENT_SHARE = 0.75
"""Of the deadline: a heart that stood still so long is dead, which is then told before the deadline."""


@dataclass
class _Heart:
    """What was last seen of a rank: its count, observations since it changed, what it was doing, why it left.

    lost: ranks that it missed when it left.
    """

    count: int = 0
    stills: int = 0
    doing: str = ""
    left: str | None = None
    lost: tuple[int, ...] = ()


class Hearts:
    """The hearts of a world. A thread uses `store`, so nothing may block on the same connection."""

    def __init__(self, store: dist.Store, rank: int, size: int, deadline_s: float) -> None:
        self.rank, self.size = rank, size
        self.interval_s = deadline_s / BEATS_PER_DEADLINE
        self.dead_after_s = SILENT_SHARE * deadline_s
        self._store, self._beats, self._doing = store, 0, "opening the world"
        self._seen = {other: _Heart() for other in range(size) if other != rank}
        self._stop = threading.Event()
        self._write()
        self._thread = threading.Thread(target=self._run, name=f"heart of rank {rank}", daemon=True)

    def start(self) -> None:
        """Beats and watches from now on."""
        self._thread.start()

    def note(self, doing: str) -> None:
        """What others may say of this rank should they wait for it; told with the next beat."""
        self._doing = doing

    def gone(self, rank: int) -> str | None:
        """Why a rank will not come any more, or None."""
        heart = self._seen[rank]
        if heart.left is not None:
            return f"has left ({heart.left})"
        silent_s = heart.stills * self.interval_s
        if silent_s >= self.dead_after_s:
            return f"is dead (no heartbeat for {silent_s:.1f} s; last seen in {heart.doing})"
        return None

    def doing(self, rank: int) -> str | None:
        """What a living rank was last seen to do; None for one that was never seen."""
        return self._seen[rank].doing if self._seen[rank].count else None

    def lost(self, rank: int) -> tuple[int, ...]:
        """Ranks that a rank which left had missed, this one excepted."""
        return tuple(other for other in self._seen[rank].lost if other != self.rank)

    def stop(self, why: str, lost: tuple[int, ...] = ()) -> None:
        """Ends the thread and tells the others that this rank has left, and which ranks it missed."""
        if self._stop.is_set():
            return
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        with contextlib.suppress(RuntimeError):  # without a store there is nobody to tell
            self._store.set(self._key(self.rank), json.dumps({"left": why, "lost": lost}))

    def _run(self) -> None:
        while not self._stop.wait(self.interval_s):
            try:
                self._write()
                self._watch()
            except RuntimeError:
                return  # the store is gone; whoever uses it next says so

    def _write(self) -> None:
        self._beats += 1
        self._store.set(self._key(self.rank), json.dumps({"count": self._beats, "doing": self._doing}))

    def _watch(self) -> None:
        here = [other for other, heart in self._seen.items() if heart.count or self._store.check([self._key(other)])]
        values = self._store.multi_get([self._key(other) for other in here]) if here else []
        for heart, value in zip((self._seen[other] for other in here), values, strict=True):
            told = json.loads(value)
            if "left" in told:
                heart.left, heart.lost = told["left"], tuple(told["lost"])
            elif told["count"] == heart.count:
                heart.stills += 1
            else:
                heart.count, heart.stills, heart.doing = told["count"], 0, told["doing"]

    @staticmethod
    def _key(rank: int) -> str:
        return f"heart/{rank}"
