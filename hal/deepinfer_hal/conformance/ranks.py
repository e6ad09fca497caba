"""Processes that are ranks: started once, they play world after world, and what happens to each is told.

A job is a function `job(rank: Rank, **params)` by its import path "module:function"; it runs in every rank's process and
returns what JSON can hold. A process that dies is an answer too, and is replaced when the next job needs it.
"""

from __future__ import annotations

import inspect
import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from deepinfer_hal.backend import Backend
from deepinfer_hal.communicator import World
from deepinfer_hal.conformance.rank_process import HOST, START_SECONDS
from deepinfer_hal.conformance.verdict import Declined
from deepinfer_hal.reference_communicator import serve_store

JOB_SECONDS = 60.0


@dataclass(frozen=True)
class Answer:
    """What became of a rank: its job's value, or the error it raised (`ranks`: those that it names), or how it died."""

    value: Any = None
    error: str = ""
    message: str = ""
    ranks: tuple[int, ...] = ()
    died: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.error and not self.died

    def __str__(self) -> str:
        return f"died with {self.died}" if self.died else f"raised {self.error}: {self.message}" if self.error else "finished"


@dataclass(frozen=True)
class Seat:
    """Which backend class, on which device, a rank uses."""

    backend: str
    index: int

    @classmethod
    def of(cls, backend: Backend, index: int) -> Seat:
        """Declined if another process cannot make such a backend."""
        kind = type(backend)
        needed = [p for p in inspect.signature(kind).parameters.values() if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
        if needed or "<locals>" in kind.__qualname__:
            raise Declined(f"{kind.__qualname__} cannot be opened in another process: it must be importable, without arguments")
        return cls(f"{kind.__module__}:{kind.__qualname__}", index)


class RankProcesses:
    """`most` rank processes on this machine, started when the first job is run, and the store at which they meet."""

    def __init__(self, most: int = 4) -> None:
        self.most, self._store, self._numbers = most, serve_store(HOST), itertools.count()
        self._processes: list[_Process] = []

    def run(
        self, job: str, size: int, seats: Sequence[Seat], *, deadline_s: float = 2.0, limit_s: float = JOB_SECONDS,
        params: Mapping[str, Any] | None = None,
    ) -> list[Answer]:  # fmt: skip
        """The job in a new world of `size` ranks, rank r on seats[r]; every rank's answer, by rank.

        A rank that is not done after limit_s is stopped, and has died of it.
        """
        name = f"world{next(self._numbers)}"
        self._replace_the_dead()
        processes = self._processes[:size]
        for process in processes:
            process.wait_until_ready()
        for rank, process in enumerate(processes):
            world = World(rank, size, HOST, self._store.port, name, deadline_s, HOST)
            process.send({"job": job, "world": asdict(world), "seat": asdict(seats[rank]), "params": dict(params or {})})
        limit = time.monotonic() + limit_s
        answers = [process.answer(limit) for process in processes]
        self._replace_the_dead()  # so that they start while the caller looks at the answers
        return answers

    def _replace_the_dead(self) -> None:
        """The living first, since new ones take a while to start."""
        self._processes = [process for process in self._processes if not process.dead]
        self._processes += [_Process(self._store.port) for _ in range(self.most - len(self._processes))]

    def close(self) -> None:
        """Ends every process that was started here."""
        for process in self._processes:
            process.stop()
        self._processes.clear()

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@dataclass
class _Process:
    """One rank process and its answers, one JSON line each; None when it has ended."""

    port: int
    process: subprocess.Popen[str] = field(init=False)
    answers: queue.Queue[dict[str, Any] | None] = field(default_factory=queue.Queue)
    ready: bool = False

    def __post_init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"}
        self.errors = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", "deepinfer_hal.conformance.rank_process", str(self.port)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, env=environment, text=True, encoding="utf-8",
        )  # fmt: skip
        threading.Thread(target=self._listen, daemon=True).start()

    @property
    def dead(self) -> bool:
        return self.process.poll() is not None

    def _listen(self) -> None:
        for line in self.process.stdout:
            self.answers.put(json.loads(line))
        self.answers.put(None)

    def wait_until_ready(self) -> None:
        if not self.ready and self.answers.get(timeout=START_SECONDS) is None:
            raise RuntimeError(f"a rank process could not start: {self._last_words()}")
        self.ready = True

    def send(self, command: dict[str, Any]) -> None:
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def answer(self, limit: float) -> Answer:
        try:
            told = self.answers.get(timeout=max(limit - time.monotonic(), 0.001))
        except queue.Empty:
            self.stop()
            return Answer(died="the time limit")
        if told is None:
            return Answer(died=self._last_words())
        return Answer(**{**told, "ranks": tuple(told.get("ranks", ()))})

    def _last_words(self) -> str:
        code = self.process.wait()
        self.errors.seek(0)
        tail = [line for line in self.errors.read()[-4000:].decode(errors="replace").splitlines() if line.strip()]
        how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        return f"{how}; it said: {tail[-1][:300]}" if tail else how

    def stop(self) -> None:
        if not self.dead:
            self.process.kill()
        self.process.wait()
        self.process.stdin.close()
