"""Ranks as threads of this process, for communicators that simulate several devices in one (`Communicator.in_process`).

The same jobs as in `ranks.py` run, each rank in a thread of its own; one that dies leaves its thread without closing anything.
"""

from __future__ import annotations

import importlib
import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from deepinfer_hal.backend import Backend
from deepinfer_hal.communicator import World
from deepinfer_hal.conformance.rank_process import Rank
from deepinfer_hal.conformance.ranks import JOB_SECONDS, Answer

_numbers = itertools.count()


class _Died(BaseException):
    """Leaves a rank's thread; no job catches it."""


class _ThreadRank(Rank):
    def die(self) -> NoReturn:
        raise _Died


def run_threads(
    job: str, size: int, backend: Backend, indices: Sequence[int], *, deadline_s: float = 2.0, limit_s: float = JOB_SECONDS,
    params: Mapping[str, Any] | None = None,
) -> list[Answer]:  # fmt: skip
    """The job in a new world of `size` ranks, rank r on device indices[r] of a backend; every rank's answer, by rank.

    A rank that is not done after limit_s counts as dead; its thread cannot be stopped, but ends with the process.
    """
    module, _, name = job.partition(":")
    play, world_name = getattr(importlib.import_module(module), name), f"threads{next(_numbers)}"
    answers: list[Answer | None] = [None] * size

    def run(rank: int) -> None:
        started = time.monotonic()
        world = World(rank, size, name=world_name, deadline_s=deadline_s)
        try:
            answer = Answer(value=play(_ThreadRank(world, backend, indices[rank]), **(params or {})))
        except _Died:
            answer = Answer(died="leaving its thread")
        except Exception as error:
            answer = Answer(error=type(error).__name__, message=str(error), ranks=tuple(getattr(error, "ranks", ())))
        answers[rank] = Answer(**{**vars(answer), "seconds": time.monotonic() - started})

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    limit = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, limit - time.monotonic()))
    return [answer or Answer(died="the time limit") for answer in answers]
