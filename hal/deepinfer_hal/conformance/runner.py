"""The parent of workers: feeds them cases in batches, and lives on when one crashes or hangs."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from deepinfer_hal.conformance.cases import own_waivers
from deepinfer_hal.conformance.plan import Item, Plan
from deepinfer_hal.conformance.resume import Earlier
from deepinfer_hal.conformance.verdict import (
    BROKEN,
    EXECUTED,
    NOT_RUN,
    PASS,
    TIMEOUT,
    UNSUPPORTED,
    CaseResult,
    Waiver,
    apply_waivers,
)
from deepinfer_hal.conformance.worker_process import Died, WorkerProcess
from deepinfer_hal.errors import BackendUnavailable, BadCall

BATCH = 16
SHARED_BATCH = 4
"""Items of a batch when several workers share the rest: the last of them must not be waited for long."""

OPEN_SECONDS = 120.0
MOST_CRASHES = 200
"""Worker deaths after which the rest of a run is given up, as not-run."""

Listener = Callable[[CaseResult], None]


@dataclass
class Run:
    """What came out: the plan, the subject as the worker described it, and a result for every item, in the plan's order.

    jobs: workers side by side, which disturb each other's clocks. resumed: what was kept of an earlier report, if any.
    interrupted: by the user, so that what had no result then is not-run.
    """

    plan: Plan
    subject: dict[str, Any]
    results: list[CaseResult] = field(default_factory=list)
    waiver_problems: list[str] = field(default_factory=list)
    seconds: float = 0.0
    jobs: int = 1
    resumed: dict[str, Any] = field(default_factory=dict)
    interrupted: bool = False

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


def run_suite(
    plan: Plan, *, waivers: Iterable[Waiver] = (), listen: Listener = lambda result: None, jobs: int = 1,
    seconds: float = float("inf"), resume: Mapping[str, Any] | None = None,
) -> Run:  # fmt: skip
    """Runs a plan in `jobs` worker processes; `listen` hears every result as it comes, one at a time.

    seconds: time for the whole run; what is not done by then is not-run. resume: an earlier report, of the same sources,
    device and plan, whose passed cases are kept. A KeyboardInterrupt ends the run with what has a result by then.
    Raises BadCall for a plan that names what does not exist and for a report of something else, BackendUnavailable if the
    backend cannot be opened.
    """
    if jobs < 1:
        raise BadCall(f"a run needs at least one worker, got jobs={jobs}")
    started = time.monotonic()
    plan.check()
    worker, opened = _open(plan)
    run = Run(plan, opened["subject"], jobs=jobs)
    try:
        earlier = Earlier.of(resume, plan, run.subject)
    except BadCall:
        worker.close()
        raise
    items = [Item(**values) for values in opened["items"]]
    shared = _Shared(run, listen, deque(), started + seconds, BATCH if jobs == 1 else SHARED_BATCH)
    for item in items:
        if item.unsupported:
            shared.add(_result_of(item, UNSUPPORTED, item.unsupported))
        elif kept := earlier.passed.get((item.id, item.symbol)):
            run.results.append(kept)
        else:
            shared.pending.append(item)
    if jobs > 1:  # groups take longest, each together, then composites made of parts: so they come first
        shared.pending = deque(sorted(shared.pending, key=lambda item: (not item.group, item.group, "(" not in item.symbol)))
    run.resumed = earlier.told()
    others = [threading.Thread(target=_serve, args=(shared, None), daemon=True) for _ in range(jobs - 1)]
    try:
        for thread in others:
            thread.start()
        _serve(shared, worker)
        for thread in others:
            thread.join()
    except KeyboardInterrupt:
        shared.interrupt()
        for thread in others:
            thread.join()
    if shared.problem is not None and not run.interrupted:
        raise shared.problem
    have = {(result.id, result.symbol) for result in run.results}
    for item in items:
        if (item.id, item.symbol) not in have:
            shared.add(_result_of(item, NOT_RUN, shared.why_not()))
    places = {(item.id, item.symbol): place for place, item in enumerate(items)}
    run.results.sort(key=lambda result: places[result.id, result.symbol])
    run.waiver_problems = apply_waivers(run.results, [*waivers, *own_waivers(plan.profile)])
    run.seconds = time.monotonic() - started
    return run


@dataclass
class _Shared:
    """What the workers of a run share: the items nobody has taken, and the results. `ends`: when the run's time is over."""

    run: Run
    listen: Listener
    pending: deque[Item]
    ends: float
    batch: int
    deaths: int = 0
    problem: Exception | None = None
    lock: threading.RLock = field(default_factory=threading.RLock)
    workers: list[WorkerProcess] = field(default_factory=list)

    def interrupt(self) -> None:
        """Gives the run up: no more items are taken, and workers end in the midst of theirs."""
        with self.lock:
            self.run.interrupted = True
            for worker in self.workers:
                worker.stop()

    def keep(self, worker: WorkerProcess) -> WorkerProcess:
        """Notes a worker that an interrupt has to end."""
        with self.lock:
            self.workers.append(worker)
            if self.run.interrupted:
                worker.stop()
        return worker

    def take(self) -> list[Item]:
        """The next items for a worker; none when all are taken, or the run is given up."""
        with self.lock:
            over = self.deaths >= MOST_CRASHES or self.problem is not None or time.monotonic() >= self.ends
            if over or self.run.interrupted:
                return []
            group = self.pending[0].group if self.pending and self.batch == SHARED_BATCH else ""
            if group:
                return [self.pending.popleft() for _ in range(sum(item.group == group for item in self.pending))]
            return [self.pending.popleft() for _ in range(min(self.batch, len(self.pending)))]

    def give_back(self, items: list[Item]) -> None:
        with self.lock:
            self.pending.extendleft(reversed(items))

    def add(self, result: CaseResult) -> None:
        with self.lock:
            self.run.results.append(result)
            self.listen(result)

    def why_not(self) -> str:
        if self.run.interrupted:
            return "the run was interrupted"
        return f"given up after {self.deaths} crashes" if self.deaths >= MOST_CRASHES else "the time of the run was over"


def _serve(shared: _Shared, worker: WorkerProcess | None) -> None:
    """Runs batches until none is left, in one worker after another."""
    try:
        if worker is not None:
            shared.keep(worker)
        while items := shared.take():
            try:
                if worker is None:
                    worker = shared.keep(_open(shared.run.plan)[0])
                _run_batch(worker, shared, items)
            except _BatchDied as died:
                with shared.lock:
                    shared.deaths += 1
                worker = None
                shared.give_back(items[died.done :])
            except BackendUnavailable as error:
                shared.give_back(items)
                shared.problem = error
    except KeyboardInterrupt:  # only the main thread hears of it
        shared.interrupt()
        raise
    finally:
        if worker is not None:
            worker.close()


class _BatchDied(Exception):
    """The worker died in a batch, of which `done` items have a result."""

    def __init__(self, done: int) -> None:
        super().__init__(done)
        self.done = done


def _open(plan: Plan) -> tuple[WorkerProcess, dict[str, Any]]:
    worker = WorkerProcess()
    try:
        worker.send({"do": "open", "plan": plan.to_dict()})
        answer = worker.receive(time.monotonic() + OPEN_SECONDS)
    except Died as died:
        raise BackendUnavailable(f"{plan.spec} cannot be opened: {died}") from None
    if "error" in answer:
        worker.close()
        kinds = {"BadCall": BadCall}
        raise kinds.get(answer["kind"], BackendUnavailable)(answer["error"])
    return worker, answer["opened"]


def _run_batch(worker: WorkerProcess, shared: _Shared, items: list[Item]) -> None:
    """Results of every item of a batch; _BatchDied counts those that have one when the worker died or lost its device."""
    plan, done, check, started = shared.run.plan, 0, "", time.monotonic()
    try:
        worker.send({"do": "run", "items": [vars(item) for item in items]})
        while True:
            answer = worker.receive(min(started + plan.limit_seconds, shared.ends))
            if "start" in answer:
                check, started = "", time.monotonic()
            elif "check" in answer:
                check = answer["check"]
            elif "result" in answer:
                shared.add(CaseResult.from_dict(answer["result"]))
                done, started = done + 1, time.monotonic()
            elif "lost" in answer:
                worker.stop()
                raise _BatchDied(done)
            else:
                return
    except Died as died:
        over = died.verdict == TIMEOUT and time.monotonic() < started + plan.limit_seconds  # the run's time, not the case's
        over = over or shared.run.interrupted
        if done < len(items) and not over:
            result = _result_of(items[done], died.verdict, "")
            result.failures = {check or "start": str(died)}
            result.seconds, result.seed = time.monotonic() - started, plan.seed
            shared.add(result)
            done += 1
        worker.stop()
        raise _BatchDied(done) from None


def _result_of(item: Item, verdict: str, reason: str) -> CaseResult:
    return CaseResult(item.id, item.op, item.provider, item.symbol, verdict, reason)
