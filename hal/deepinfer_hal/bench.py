"""Times every op at a model's real shapes, beside the least time that this device's measured ceilings allow.

The kernel is the one that the dispatcher chooses for the call, with fallback forbidden: the one that conformance runs. Each row
is checked against its card's float64 reference before it is timed, and calls go round through buffers that together exceed the
last-level cache. Bytes and FLOPs are the card's, with weights as the checkpoint stores them. What does not fit the budget is a
row too, with the reason.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from deepinfer_hal.backend import Backend
from deepinfer_hal.bench_budget import Budget, drawing_seconds, resolved
from deepinfer_hal.bench_shapes import MODELS, NOT_MEASURED, BenchCase, bench_cases
from deepinfer_hal.bench_timing import NotRun, TimedCalls, timed_calls
from deepinfer_hal.card import all_cards, get_card
from deepinfer_hal.ceilings import Ceilings, measure_ceilings, spread
from deepinfer_hal.conformance.arena import Placed
from deepinfer_hal.conformance.compare import compare_discrete, compare_values
from deepinfer_hal.conformance.plan import offers_of, subjects
from deepinfer_hal.conformance.problem import Problem, Subject
from deepinfer_hal.conformance.verdict import EXECUTED, FAIL, NOT_RUN, PASS, UNSUPPORTED, CheckFailed, Declined
from deepinfer_hal.dispatch import Choice, Dispatcher
from deepinfer_hal.errors import BadCall, Unsupported
from deepinfer_hal.ops._common import weights_drawn_once
from deepinfer_hal.statics import call_spec
from deepinfer_hal.weights import prepare_canonical

_BEYOND_CACHE = 1.5
_MOST_BUFFERS, _FEW_BUFFERS = 4096, 512
"""Of a call that touches so little that even the most would fit a cache there are few: more would only take time."""

_BYTES_PER_ELEMENT, _BYTES_PER_GATHERED = 20, 8
"""Host memory at the peak of a case: drawn and stored, laid out in float32, expanded to float64 by the reference."""

NOT_YET = "not yet timed"
"""What a row's verdict is until its turn; none in a result."""

Listener = Callable[["Row"], None]


@dataclass
class Row:
    """One op at one shape. verdict: pass (checked and timed), fail, unsupported or not-run, with the reason.

    seconds: median, min and max of a call; share: of the roofline, floor_seconds over the median; bound: which ceiling sets the
    floor; timing: "graph" (replays of a graph that goes round all buffers) or "calls"; buffers: sets of arguments that calls go
    round through; buffer_bytes: of all of them; used: output -> largest error as a share of what the card allows; spent: the
    benchmark's own seconds, for drawing, for checking and laying out buffers, and for timing with the wait for a turn.
    """

    id: str
    op: str
    use: str
    rows: int
    verdict: str = NOT_RUN
    reason: str = ""
    symbol: str = ""
    provider: str = ""
    invariant: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    bytes: int = 0
    flops: int = 0
    bytes_per_second: float = 0.0
    flops_per_second: float = 0.0
    floor_seconds: float = 0.0
    share: float | None = None
    bound: str = ""
    timing: str = ""
    buffers: int = 0
    buffer_bytes: int = 0
    used: dict[str, float] = field(default_factory=dict)
    spent: dict[str, float] = field(default_factory=dict)


def check_names(shapes: str, ops: Collection[str]) -> None:
    """BadCall for a model without shapes or an op without a card."""
    if shapes not in MODELS:
        raise BadCall(f"shapes must be {' or '.join(MODELS)}, got {shapes!r}")
    for op in ops:
        get_card(op)


def run_bench(
    backend: Backend,
    index: int,
    *,
    shapes: str = "v41",
    experts: int = 8,
    ops: tuple[str, ...] = (),
    rows: tuple[int, ...] = (),
    budget: Budget | None = None,
    conformance: Mapping[str, Any] | None = None,
    listen: Listener = lambda row: None,
    uses: Collection[tuple[str, str]] | None = None,
    turns: Any = None,
    first: bool = True,
    ends: float = math.inf,
) -> dict[str, Any]:
    """All rows as plain values, with the ceilings of the same run, measured before and after them; `listen` hears each row
    as it comes, with its share of the ceilings known by then. load_average: of the host's last minute, before and after.

    shapes: a name of `bench_shapes.MODELS`; experts: on one rank, at most the model's; ops, rows: only these. conformance: a
    report of `hal test`, whose kernels must be those of the rows. uses: (op, use), only these, the smallest first; turns: of
    several processes that share the device (bench_jobs.Turns), of which the first measures the ceilings and lists ops that are
    not measured; each makes all its rows ready, as far as their buffers fit, and times them when the others are ready too. ends:
    by time.time(); rows that would not have been drawn by then are not run.
    Raises BadCall for what does not exist.
    """
    check_names(shapes, ops)
    model = MODELS[shapes]
    experts = min(experts, model.experts)
    budget = resolved(budget or Budget(), backend, index)
    tested = None if conformance is None else tested_symbols(conformance, backend.name)
    copied, load = int(_BEYOND_CACHE * budget.cache_bytes), os.getloadavg()[0]
    turns = turns or _Alone()

    def measured(times: int) -> Ceilings:
        with turns.alone():
            return functools.reduce(Ceilings.best, (measure_ceilings(backend, index, copied) for _ in range(times)))

    ceilings = turns.ceilings(functools.partial(measured, 3) if first else None)
    bench = _Bench(backend, index, budget, ceilings, turns, ends)
    done = []
    cases = list(bench_cases(model, experts, rows, ops))
    if uses is not None:
        cases = smallest_first([case for case in cases if case.key in uses])

    def finish(timed: list[Row]) -> None:
        for row in timed:
            if tested is not None and row.symbol:
                _compare_symbols(row, tested)
            listen(row)

    with weights_drawn_once():
        for case in cases:
            row = bench.prepare(case)
            done.append(row)
            finish([row] if row.verdict != NOT_YET else [])
            if bench.held_bytes > turns.hold_bytes:
                finish(bench.time_prepared())
    turns.wait_for_others(ends)
    finish(bench.time_prepared())
    if first:
        bench.ceilings = bench.ceilings.best(measured(1))
    for row in done:
        rate(row, bench.ceilings)
    skipped = [op for op in sorted(all_cards()) if first and op in NOT_MEASURED and (not ops or op in ops)]
    done += [Row(op, op, "", 0, reason=NOT_MEASURED[op]) for op in skipped]
    return {
        "device": f"{backend.name}:{index}",
        "threads": torch.get_num_threads(),
        "load_average": [load, os.getloadavg()[0]],
        "shapes": {"name": shapes, "experts_per_rank": experts, **asdict(model)},
        "budget": asdict(budget),
        "ceilings": asdict(bench.ceilings),
        "conformance_symbols_compared": tested is not None,
        "rows": [asdict(row) for row in done],
    }


def tested_symbols(report: Mapping[str, Any], backend: str) -> dict[str, set[str]]:
    """op -> kernels that a report of `hal test` ran. BadCall if it is of another backend."""
    if report["subject"]["backend"] != backend:
        raise BadCall(f"the report is of backend {report['subject']['backend']!r}, the benchmark of {backend!r}")
    found: dict[str, set[str]] = {}
    for result in report["results"]:
        if result["verdict"] in EXECUTED and result["symbol"]:
            found.setdefault(result["op"], set()).add(result["symbol"])
    return found


def smallest_first(cases: list[BenchCase]) -> list[BenchCase]:
    """By what the largest row of a use draws, the rows of a use together, since they share its weights: where time is short, the
    most rows come of it."""
    largest: dict[tuple[str, str], int] = {}
    for case in cases:
        largest[case.key] = max(largest.get(case.key, 0), case.elements)
    return sorted(cases, key=lambda case: (largest[case.key], case.key))


class _Alone:
    """The turns of a process that has the device for itself."""

    beside = alone = staticmethod(contextlib.nullcontext)
    hold_bytes = -1

    @staticmethod
    def wait_for_others(ends: float) -> None:
        """There are none."""

    @staticmethod
    def ceilings(measure: Callable[[], Ceilings]) -> Ceilings:
        return measure()


# ------------------------------------------------------------------------------------------------- one row


@dataclass(frozen=True)
class _Ready:
    """A row whose calls may be timed: what frees them, the seconds left of the row's, and the memory that the calls read."""

    row: Row
    calls: TimedCalls
    until_timed: contextlib.ExitStack
    left: float
    buffers: list[tuple[Any, ...]]


class _Bench:
    """What all rows share: the dispatcher, the kernels under test, the ceilings and the budget."""

    def __init__(
        self, backend: Backend, index: int, budget: Budget, ceilings: Ceilings, turns: Any, ends: float = math.inf
    ) -> None:
        self.ends, self.ready, self.drawn = ends, [], set()
        self.backend, self.index, self.budget, self.ceilings, self.turns = backend, index, budget, ceilings, turns
        self.dispatcher = Dispatcher(backend, index, fallback="forbid")
        self.offers = offers_of(backend, index, reference=False)
        self.subjects = subjects(backend, index, reference=False)
        self.seconds_per_element = drawing_seconds()

    @property
    def held_bytes(self) -> int:
        """Device memory of the rows that are ready and not timed yet."""
        return sum(one.row.buffer_bytes for one in self.ready)

    def prepare(self, case: BenchCase) -> Row:
        """The row of a case, checked and ready to be timed (NOT_YET), or with why it is not; never raises for what a kernel
        does."""
        row = Row(case.case.id, case.case.op, case.use, case.rows, NOT_YET)
        with self._judged(row), contextlib.ExitStack() as unless_ready:
            if not self.offers.get(row.op):
                raise Unsupported("the backend offers no kernel of this op")
            self._foresee(case)
            one = self._make_ready(case, row, unless_ready)
            self.ready.append(one)
            self.drawn.add(case.key)
        return row

    def time_prepared(self) -> list[Row]:
        """Times the rows that are ready, in one turn, and frees what they hold; those rows."""
        timed, self.ready = self.ready, []
        if timed:
            started = time.perf_counter()
            with self.turns.alone():
                for one in timed:
                    with self._judged(one.row), one.until_timed:
                        one.row.seconds = spread(one.calls.seconds(self.budget.repeats, one.left))
                        one.row.verdict = PASS
                        rate(one.row, self.ceilings)
                    one.row.spent["timing"], started = time.perf_counter() - started, time.perf_counter()
        return [one.row for one in timed]

    @contextlib.contextmanager
    def _judged(self, row: Row) -> Iterator[None]:
        """Turns what is raised inside into the row's verdict and reason."""
        try:
            yield
        except NotRun as reason:
            row.verdict, row.reason = NOT_RUN, str(reason)
        except (Unsupported, Declined) as reason:
            row.verdict, row.reason = UNSUPPORTED, str(reason)
        except Exception as error:  # a benchmark of many kernels outlives one that cannot be run
            if self.backend.classify_error(error) == "out_of_memory":
                row.verdict, row.reason = NOT_RUN, "memory ran out"
                return
            row.verdict, row.reason = FAIL, str(error) if isinstance(error, CheckFailed) else f"{type(error).__name__}: {error}"

    def _foresee(self, case: BenchCase) -> None:
        """NotRun if drawing and checking the case would take more memory or time than a row has."""
        nbytes = (case.elements - case.gathered) * _BYTES_PER_ELEMENT + case.gathered * _BYTES_PER_GATHERED
        if nbytes > self.budget.memory_bytes:
            allowed = self.budget.memory_bytes / 1e9
            raise NotRun(f"drawing and checking it takes about {nbytes / 1e9:.1f} GB of memory, a row has {allowed:.1f} GB")
        seconds = 0.0 if case.key in self.drawn else case.elements * self.seconds_per_element[case.coded]
        if seconds > self.budget.row_seconds:
            raise NotRun(f"drawing it takes about {seconds:.0f} s, a row has {self.budget.row_seconds:.0f} s")
        if time.time() + seconds >= self.ends:
            raise NotRun("the time of the run was over, or was too short to draw it")

    def _make_ready(self, case: BenchCase, row: Row, unless_ready: contextlib.ExitStack) -> _Ready:
        """Draws and checks a case, and lays out what its calls go round through."""
        started = time.perf_counter()
        args = get_card(row.op).generate(case.case, 0, "cpu", prepare_canonical)
        subject, call = self._choose(case, args, row)
        problem = Problem(subject, case.case, pristine=args)
        cost = problem.card.cost(problem.pristine)
        row.bytes, row.flops = int(cost.bytes), int(cost.flops)
        drawn = time.perf_counter()
        with self.turns.beside():
            check_values(problem)
            buffers, row.buffer_bytes = self._buffers(problem, case, row.bytes)
            calls = unless_ready.enter_context(timed_calls(subject, call, buffers))
        row.used, row.buffers, row.timing = dict(problem.statistics["used"]), len(buffers), calls.how
        checked = time.perf_counter()
        row.spent = {"drawing": drawn - started, "checking": checked - drawn}
        return _Ready(row, calls, unless_ready.pop_all(), self.budget.row_seconds - (checked - started), buffers)

    def _choose(self, case: BenchCase, args: Mapping[str, Any], row: Row) -> tuple[Subject, Callable[..., None]]:
        """The kernel that the dispatcher chooses for the call; it must be one that conformance has as a subject."""
        spec = call_spec(get_card(row.op), args)
        call = self.dispatcher.bind(row.op, case.case.id, **spec.statics)
        choice: Choice = self.dispatcher.choices[row.op, case.case.id]
        row.symbol, row.provider, row.invariant = choice.symbol, choice.provider, choice.invariant
        if (row.op, choice.symbol) not in self.subjects:
            raise CheckFailed(f"the dispatcher chose {choice.symbol}, which is none of the kernels that conformance runs")
        return self.subjects[row.op, choice.symbol], call

    def _buffers(self, problem: Problem, case: BenchCase, touched: int) -> tuple[list[tuple[Any, ...]], int]:
        """Sets of arguments, each in memory of its own, that together exceed the cache where memory allows; and their bytes."""
        wanted = math.ceil(_BEYOND_CACHE * self.budget.cache_bytes / max(touched, 1))
        wanted = _FEW_BUFFERS if wanted > _MOST_BUFFERS else wanted
        first = problem.place()
        each = max(_set_bytes(problem, first.args, case.gathered > 0), 1)
        count = max(1, min(wanted, self.budget.memory_bytes // (2 * each)))
        return [_buffer(problem, first if number == 0 else first.twin(), number, case) for number in range(count)], count * each


def rate(row: Row, ceilings: Ceilings) -> None:
    """Fills in what follows from a row's times, bytes and FLOPs; nothing for a row without times."""
    if not row.seconds:
        return
    median = row.seconds["median"]
    row.bytes_per_second, row.flops_per_second = row.bytes / median, row.flops / median
    row.floor_seconds = ceilings.seconds(row.bytes, row.flops)
    row.share = row.floor_seconds / median
    row.bound = "memory" if row.floor_seconds == ceilings.seconds(row.bytes, 0) else "arithmetic"


def check_values(problem: Problem) -> None:
    """The suite's check of values and discrete outputs, on the case as it is. CheckFailed or Declined."""
    compare_values(problem, problem.pristine, problem.expected, problem.base)
    compare_discrete(problem, problem.pristine, problem.expected, problem.base)


# ------------------------------------------------------------------------------------------------- helpers


def _buffer(problem: Problem, placed: Placed, number: int, case: BenchCase) -> tuple[Any, ...]:
    """One set of arguments; weights are laid out anew, but for tables of which a call reads a few other rows each time."""
    args = placed.args
    for arg in problem.card.signature:
        handle = problem.pristine[arg.name]
        if arg.kind == "weight" and handle is not None and number and not case.gathered:
            args[arg.name] = problem.another_weight(handle)
    for name, limit in case.vary.items():
        args[name].add_(number * 7919).remainder_(limit)
    return tuple(args.values())


def _set_bytes(problem: Problem, args: Mapping[str, Any], shared: bool) -> int:
    """Bytes of a set of arguments; of weights only where each set has its own."""
    storages = [v.untyped_storage() for v in args.values() if isinstance(v, torch.Tensor)]
    weights = [args[arg.name] for arg in problem.card.signature if arg.kind == "weight" and args[arg.name] is not None]
    distinct = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return sum(distinct.values()) + (0 if shared else sum(weight.nbytes for weight in weights))


def _compare_symbols(row: Row, tested: Mapping[str, set[str]]) -> None:
    """Turns a row whose kernel the conformance report did not run into a failure."""
    known = tested.get(row.op, set())
    if row.symbol not in known:
        ran = ", ".join(sorted(known)) or "no kernel"
        row.verdict, row.reason = FAIL, f"{row.symbol} was measured, the conformance report ran {ran} for this op"
