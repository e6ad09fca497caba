"""Where ranks that are threads of one process meet, and how they learn who is missing."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from deepinfer_hal.communicator import World
from deepinfer_hal.errors import CommunicatorError, CommunicatorMismatch, CommunicatorTimeout

_LOOK_SECONDS = 0.02

_open: dict[tuple[str, int, str], Meeting] = {}
_opening = threading.Lock()


def join(world: World, make_shared: Callable[[], Any]) -> Meeting:
    """The meeting of a world, made by the first rank that opens it; this thread is the rank from now on."""
    key = (world.host, world.port, world.name)
    with _opening:
        meeting = _open.get(key)
        if meeting is None or meeting.size != world.size or meeting.is_over():
            meeting = _open[key] = Meeting(world.size, make_shared())
        meeting.enter(world.rank)
        for old in [other for other, one in _open.items() if one.is_over()]:
            del _open[old]
    return meeting


class Meeting:
    """Calls that all ranks make together: the last to come does the work, for everyone.

    shared: what the ranks have in common.
    """

    def __init__(self, size: int, shared: Any) -> None:
        self.size, self.shared = size, shared
        self._changed = threading.Condition()
        self._threads: dict[int, threading.Thread] = {}
        self._gone: dict[int, str] = {}
        self._missed: dict[int, tuple[int, ...]] = {}  # by a rank that gave up: whom it missed
        self._broken: dict[int, str] = {}
        self._doing: dict[int, str] = {}
        self._round = 0
        self._came: dict[int, tuple[str, Any]] = {}
        self._outcomes: dict[int, dict[int, Any] | Exception] = {}

    def enter(self, rank: int) -> None:
        """This thread is `rank`."""
        with self._changed:
            self._threads[rank] = threading.current_thread()

    def is_over(self) -> bool:
        """Whether no rank is left."""
        return len(self._threads) > 0 and all(self._why_gone(rank) for rank in self._threads)

    def leave(self, rank: int, why: str) -> None:
        """The others are told that this rank is gone."""
        with self._changed:
            self._gone.setdefault(rank, why)
            self._changed.notify_all()

    def meet(
        self, rank: int, call: str, said: Any, deadline_s: float, action: Callable[[Mapping[int, Any]], Mapping[int, Any]],
        *, partly: bool = False,
    ) -> Any:  # fmt: skip
        """Waits for all ranks; `action` gets what each said and gives what each receives.

        partly: when a rank does not come, `action` runs for those that did, and finds out itself. Otherwise
        CommunicatorTimeout names the missing. CommunicatorMismatch on every rank if their calls differ.
        """
        with self._changed:
            if rank in self._broken:
                raise CommunicatorError(f"{call}: this communicator of rank {rank} is broken since {self._broken[rank]}")
            number, self._doing[rank] = self._round, call
            self._came[rank] = (call, said)
            if len(self._came) == self.size:
                self._conclude(action)
            limit = time.monotonic() + deadline_s
            while self._round == number:
                absent = [other for other in range(self.size) if other not in self._came]
                gone = [other for other in absent if self._why_gone(other)]
                passed = time.monotonic() > limit
                if partly and (passed or len(gone) == len(absent)):
                    self._conclude(action)
                elif not partly and (gone or passed):
                    self._came.pop(rank)
                    told = self._give_up(rank, absent if passed else gone)
                    raise CommunicatorTimeout(f"{call}: rank {rank} of {self.size} waited, but {told}", self._missed[rank])
                else:
                    self._changed.wait(_LOOK_SECONDS)
            outcome = self._outcomes[number]
            if isinstance(outcome, CommunicatorMismatch):
                raise CommunicatorMismatch(str(outcome), outcome.ranks)
            if isinstance(outcome, Exception):
                self._broken.setdefault(rank, str(outcome))
                raise outcome
            return outcome[rank]

    def give_up(self, rank: int, missing: list[int]) -> str:
        """Takes this rank out of the meeting; why each of the missing did not come."""
        with self._changed:
            return self._give_up(rank, missing)

    def missed_by(self, rank: int) -> tuple[int, ...]:
        """Whom a rank that gave up missed."""
        with self._changed:
            return self._missed[rank]

    def _conclude(self, action: Callable[[Mapping[int, Any]], Mapping[int, Any]]) -> None:
        calls = {rank: call for rank, (call, _) in self._came.items()}
        try:
            _compare(calls)
            outcome: Any = action({rank: said for rank, (_, said) in self._came.items()})
        except Exception as error:  # each rank raises it
            outcome = error
        self._outcomes = {self._round: outcome, self._round - 1: self._outcomes.get(self._round - 1)}
        self._round += 1
        self._came = {}
        self._changed.notify_all()

    def _why_gone(self, rank: int) -> str:
        if rank in self._gone:
            return self._gone[rank]
        thread = self._threads.get(rank)
        return "" if thread is None or thread.is_alive() else "died"

    def _give_up(self, rank: int, missing: list[int]) -> str:
        """A rank that left because it missed another is not at fault: the one that it missed is."""
        named: dict[int, str] = {}
        for other in missing:
            if self._missed.get(other) and rank not in self._missed[other]:
                named.update({lost: f"was missed by rank {other}" for lost in self._missed[other]})
            else:
                named[other] = self._why_gone(other) or self._reason(other)
        self._missed[rank] = tuple(sorted(named))
        told = "; ".join(f"rank {other} {why}" for other, why in sorted(named.items()))
        self._broken[rank] = told
        self._gone.setdefault(rank, "has left")
        self._changed.notify_all()
        return told

    def _reason(self, rank: int) -> str:
        if rank not in self._threads:
            return "did not join in time"
        return f"is alive but did not come in time (last seen in {self._doing.get(rank, 'nothing')})"


def _compare(calls: Mapping[int, str]) -> None:
    if len(set(calls.values())) == 1:
        return
    usual = Counter(calls.values()).most_common(1)[0][0]
    others = tuple(rank for rank, call in sorted(calls.items()) if call != usual)
    told = "; ".join(f"rank {rank} called {call}" for rank, call in sorted(calls.items()))
    raise CommunicatorMismatch(f"ranks must make the same call, but {told}", others)
