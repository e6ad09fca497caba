"""The process of one rank: jobs come as JSON lines on standard input, answers go out as JSON lines.

The store's port is its argument. It ends when standard input does, whatever it is doing then, so that no rank outlives
the process that started it.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import signal
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any, NoReturn, TextIO

import torch

from deepinfer_hal.backend import Backend
from deepinfer_hal.communicator import Communicator, World
from deepinfer_hal.reference_communicator import connect_to_store

HOST = "127.0.0.1"
START_SECONDS = 120.0


@dataclass(frozen=True)
class Rank:
    """What a job has: its world, and the backend and device it is to use."""

    world: World
    backend: Backend
    index: int

    @property
    def device(self) -> torch.device:
        return self.backend.device(self.index)

    def open(self) -> Communicator:
        """Joins the world through the backend's own communicator."""
        return self.backend.communicator(self.index).open(self.world, self.device)

    def die(self) -> NoReturn:
        """Ends this rank without a word to the others."""
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("a killed process went on")


def main() -> int:
    torch.set_num_threads(1)
    answers, jobs = _private_output(), queue.Queue()
    threading.Thread(target=_read, args=(jobs,), daemon=True).start()
    connect_to_store(World(0, 1, HOST, int(sys.argv[1]), deadline_s=START_SECONDS))
    _tell(answers, {"value": "ready"})
    while True:
        _tell(answers, _play(jobs.get()))


def _read(jobs: queue.Queue[dict[str, Any]]) -> None:
    for line in sys.stdin:
        jobs.put(json.loads(line))
    os._exit(0)


def _private_output() -> TextIO:
    """The pipe to the parent; file descriptor 1 becomes standard error."""
    mine = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return mine


def _tell(answers: TextIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


def _play(command: dict[str, Any]) -> dict[str, Any]:
    started = time.monotonic()
    try:
        rank = Rank(World(**command["world"]), _load(command["seat"]["backend"])(), command["seat"]["index"])
        answer = {"value": _load(command["job"])(rank, **command["params"])}
    except Exception as error:
        answer = {"error": type(error).__name__, "message": str(error), "ranks": list(getattr(error, "ranks", ()))}
    return {**answer, "seconds": time.monotonic() - started}


def _load(path: str) -> Any:
    """What "module:name" names."""
    module, _, name = path.partition(":")
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


if __name__ == "__main__":
    sys.exit(main())
