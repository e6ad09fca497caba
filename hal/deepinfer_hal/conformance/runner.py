"""The parent of workers: feeds them cases in batches, and lives on when one crashes or hangs."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from deepinfer_hal.conformance.cases import own_waivers
from deepinfer_hal.conformance.plan import Item, Plan
from deepinfer_hal.conformance.verdict import (
    BROKEN,
    CRASH,
    EXECUTED,
    NOT_RUN,
    PASS,
    TIMEOUT,
    UNSUPPORTED,
    CaseResult,
    Waiver,
    apply_waivers,
)
from deepinfer_hal.errors import BackendUnavailable, BadCall

BATCH = 16
OPEN_SECONDS = 120.0
MOST_CRASHES = 200
"""Worker deaths after which the rest of a run is given up, as not-run."""

Listener = Callable[[CaseResult], None]


@dataclass
class Run:
    """What came out: the plan, the subject as the worker described it, and a result for every item."""

    plan: Plan
    subject: dict[str, Any]
    results: list[CaseResult] = field(default_factory=list)
    waiver_problems: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def counts(self) -> dict[str, int]:
        """verdict -> results, for the verdicts there are."""
        found: dict[str, int] = {}
        for result in self.results:
            found[result.verdict] = found.get(result.verdict, 0) + 1
        return found

    def exit_status(self) -> int:
        """0: something ran and nothing failed; 1: a failure; 2: nothing was claimed or run."""
        if any(result.verdict in BROKEN for result in self.results) or self.waiver_problems:
            return 1
        claimed = [r for r in self.results if r.verdict in EXECUTED and r.symbol] or [
            r for r in self.results if r.verdict == PASS and self.plan.whole is False
        ]
        return 0 if claimed else 2


class _Died(Exception):
    """The worker ended or was stopped: why, in words, and the verdict for the case it was at."""

    def __init__(self, verdict: str, message: str) -> None:
        super().__init__(message)
        self.verdict = verdict


class _Worker:
    """One worker process and its answers."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self.errors = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", "deepinfer_hal.conformance.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self.errors, env=environment, text=True, encoding="utf-8",
        )  # fmt: skip
        self.answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in self.process.stdout:
            try:
                self.answers.put(json.loads(line))
            except ValueError:
                continue  # the last line of a process that died while writing
        self.answers.put(None)

    def send(self, command: dict[str, Any]) -> None:
        try:
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()
        except (BrokenPipeError, OSError):
            raise _Died(CRASH, self._last_words()) from None

    def receive(self, deadline: float) -> dict[str, Any]:
        """The next answer. _Died if the process ended, or was stopped because the deadline passed."""
        try:
            answer = self.answers.get(timeout=max(deadline - time.monotonic(), 0.001))
        except queue.Empty:
            self.stop()
            raise _Died(TIMEOUT, "was stopped at the time limit") from None
        if answer is None:
            raise _Died(CRASH, self._last_words())
        return answer

    def _last_words(self) -> str:
        code = self.process.wait()
        name = signal.Signals(-code).name if code < 0 and -code in set(signal.Signals) else f"exit status {code}"
        self.errors.seek(0)
        tail = [line for line in self.errors.read()[-4000:].decode(errors="replace").splitlines() if line.strip()]
        return f"the process died with {name}" + (f"; it said: {tail[-1][:200]}" if tail else "")

    def stop(self) -> None:
        """Ends this process, whatever it does."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.stdin.close()
            try:
                self.process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self.stop()
        self.errors.close()


def run_suite(plan: Plan, *, waivers: Iterable[Waiver] = (), listen: Listener = lambda result: None) -> Run:
    """Runs a plan in worker processes; `listen` hears every result as it comes.

    Raises BadCall for a plan that names what does not exist, BackendUnavailable if the backend cannot be opened.
    """
    started = time.monotonic()
    plan.check()
    worker, opened = _open(plan)
    run = Run(plan, opened["subject"])
    items = [Item(**values) for values in opened["items"]]
    for item in items:
        if item.unsupported:
            _add(run, _result_of(item, UNSUPPORTED, item.unsupported), listen)
    pending = [item for item in items if not item.unsupported]
    deaths = 0
    while pending and deaths < MOST_CRASHES:
        try:
            if worker is None:
                worker, _ = _open(plan)
            done = _run_batch(worker, plan, pending[:BATCH], run, listen)
            pending = pending[done:]
        except _BatchDied as died:
            deaths, worker = deaths + 1, None
            pending = pending[died.done :]
    for item in pending:
        _add(run, _result_of(item, NOT_RUN, f"given up after {deaths} crashes"), listen)
    if worker is not None:
        worker.close()
    run.waiver_problems = apply_waivers(run.results, [*waivers, *own_waivers(plan.profile)])
    run.seconds = time.monotonic() - started
    return run


class _BatchDied(Exception):
    """The worker died in a batch, of which `done` items have a result."""

    def __init__(self, done: int) -> None:
        super().__init__(done)
        self.done = done


def _open(plan: Plan) -> tuple[_Worker, dict[str, Any]]:
    worker = _Worker()
    try:
        worker.send({"do": "open", "plan": plan.to_dict()})
        answer = worker.receive(time.monotonic() + OPEN_SECONDS)
    except _Died as died:
        raise BackendUnavailable(f"{plan.spec} cannot be opened: {died}") from None
    if "error" in answer:
        worker.close()
        kinds = {"BadCall": BadCall}
        raise kinds.get(answer["kind"], BackendUnavailable)(answer["error"])
    return worker, answer["opened"]


def _run_batch(worker: _Worker, plan: Plan, items: list[Item], run: Run, listen: Listener) -> int:
    """Results of every item of a batch; _BatchDied counts those that have one when the worker died or lost its device."""
    done, check, started = 0, "", time.monotonic()
    try:
        worker.send({"do": "run", "items": [vars(item) for item in items]})
        while True:
            answer = worker.receive(started + plan.limit_seconds)
            if "start" in answer:
                check, started = "", time.monotonic()
            elif "check" in answer:
                check = answer["check"]
            elif "result" in answer:
                _add(run, CaseResult.from_dict(answer["result"]), listen)
                done, started = done + 1, time.monotonic()
            elif "lost" in answer:
                worker.stop()
                raise _BatchDied(done)
            else:
                return done
    except _Died as died:
        if done < len(items):
            result = _result_of(items[done], died.verdict, "")
            result.failures = {check or "start": str(died)}
            result.seconds, result.seed = time.monotonic() - started, plan.seed
            _add(run, result, listen)
            done += 1
        worker.stop()
        raise _BatchDied(done) from None


def _result_of(item: Item, verdict: str, reason: str) -> CaseResult:
    return CaseResult(item.id, item.op, item.provider, item.symbol, verdict, reason)


def _add(run: Run, result: CaseResult, listen: Listener) -> None:
    run.results.append(result)
    listen(result)
