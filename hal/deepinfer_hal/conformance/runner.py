"""The parent of workers: feeds them cases in batches, and lives on when one crashes or hangs."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from deepinfer_hal.conformance.cases import own_waivers
from deepinfer_hal.conformance.plan import Item, Plan
from deepinfer_hal.conformance.resume import Earlier
from deepinfer_hal.conformance.schedule import Schedule
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
    workers: list[WorkerProcess] = []
    try:
        for _ in range(jobs):  # at once, since each takes seconds
            workers.append(_start(plan))
        opened = _answer(plan, workers[0])
        run = Run(plan, opened["subject"], jobs=jobs)
        earlier = Earlier.of(resume, plan, run.subject)
    except BaseException:
        for worker in workers:
            worker.stop()
        raise
    items = [Item(**values) for values in opened["items"]]
    kept = [earlier.passed.get((item.id, item.symbol)) for item in items]
    run.results += [result for result in kept if result is not None]
    new = [item for item, result in zip(items, kept, strict=True) if result is None]
    schedule = Schedule((item for item in new if not item.unsupported), jobs)
    shared = _Shared(run, listen, schedule, started + seconds, workers)
    for item in new:
        if item.unsupported:
            shared.add(_result_of(item, UNSUPPORTED, item.unsupported))
    run.resumed = earlier.told()
    _serve_all(shared)
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
    """What the workers of a run share: the items nobody has taken, and the results. `ends`: when the run's time is over.
    `workers`: the processes that an interrupt has to end, at first one for each thread."""

    run: Run
    listen: Listener
    schedule: Schedule
    ends: float
    workers: list[WorkerProcess]
    deaths: int = 0
    problem: Exception | None = None
    lock: threading.RLock = field(default_factory=threading.RLock)

    def interrupt(self) -> None:
        """Gives the run up: no more items are taken, and workers end in the midst of theirs."""
        with self.lock:
            self.run.interrupted = True
            for worker in self.workers:
                worker.stop()

    def keep(self, worker: WorkerProcess) -> WorkerProcess:
        """Notes a worker in another's place, which an interrupt has to end, too."""
        with self.lock:
            self.workers.append(worker)
            if self.run.interrupted:
                worker.stop()
        return worker

    def take(self, place: int) -> list[Item]:
        """The next items for a thread's worker; none when all are taken, or the run is given up."""
        with self.lock:
            over = self.deaths >= MOST_CRASHES or self.problem is not None or time.monotonic() >= self.ends
            return [] if over or self.run.interrupted else self.schedule.take(place)

    def give_back(self, items: list[Item]) -> None:
        with self.lock:
            self.schedule.give_back(items)

    def add(self, result: CaseResult) -> None:
        with self.lock:
            self.run.results.append(result)
            self.listen(result)

    def why_not(self) -> str:
        if self.run.interrupted:
            return "the run was interrupted"
        return f"given up after {self.deaths} crashes" if self.deaths >= MOST_CRASHES else "the time of the run was over"


def _serve_all(shared: _Shared) -> None:
    """Runs all items, in a thread for each worker process; this one has the first, which is open."""
    plan, first = shared.run.plan, shared.workers[0]
    opening = [functools.partial(_opened, plan, worker) for worker in shared.workers[1:]]
    others = [threading.Thread(target=_serve, args=(shared, i, each), daemon=True) for i, each in enumerate(opening, 1)]
    try:
        for thread in others:
            thread.start()
        _serve(shared, 0, lambda: first)
        for thread in others:
            thread.join()
    except KeyboardInterrupt:
        shared.interrupt()
        for thread in others:
            thread.join()


def _serve(shared: _Shared, place: int, opened: Callable[[], WorkerProcess]) -> None:
    """Runs batches until none is left, in one worker after another; `opened` gives the first."""
    plan, first, worker = shared.run.plan, shared.workers[place], None
    try:
        while items := shared.take(place):
            try:
                worker = worker or opened()
                _run_batch(worker, shared, items)
            except _BatchDied as died:
                with shared.lock:
                    shared.deaths += 1
                worker, opened = None, lambda: _opened(plan, shared.keep(_start(plan)))
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
        first.stop()  # it may never have had anything to do


class _BatchDied(Exception):
    """The worker died in a batch, of which `done` items have a result."""

    def __init__(self, done: int) -> None:
        super().__init__(done)
        self.done = done


def _start(plan: Plan) -> WorkerProcess:
    """A process that opens the plan's backend; `_answer` waits for it."""
    worker = WorkerProcess()
    try:
        worker.send({"do": "open", "plan": plan.to_dict()})
    except Died as died:
        raise BackendUnavailable(f"{plan.spec} cannot be opened: {died}") from None
    return worker


def _answer(plan: Plan, worker: WorkerProcess) -> dict[str, Any]:
    """What a process says once it has opened the plan's backend."""
    try:
        answer = worker.receive(time.monotonic() + OPEN_SECONDS)
    except Died as died:
        raise BackendUnavailable(f"{plan.spec} cannot be opened: {died}") from None
    if "error" in answer:
        worker.close()
        kinds = {"BadCall": BadCall}
        raise kinds.get(answer["kind"], BackendUnavailable)(answer["error"])
    return answer["opened"]


def _opened(plan: Plan, worker: WorkerProcess) -> WorkerProcess:
    _answer(plan, worker)
    return worker


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
