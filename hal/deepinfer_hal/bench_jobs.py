"""A benchmark in several processes: they draw and check their rows side by side, and time them one at a time.

Drawing weights of a model's size and expanding them is host work and takes nearly all of a benchmark's time. Device work of
checking is done under a shared turn, timing under one of its own, so that no clock runs while another process computes there.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import torch

from deepinfer_hal.bench import Budget, Listener, Row, check_names, run_bench
from deepinfer_hal.bench_shapes import MODELS, bench_cases
from deepinfer_hal.ceilings import Ceilings
from deepinfer_hal.errors import BackendUnavailable


class Turns:
    """Locks of a folder that processes share. Who wants to be alone closes the gate, so that no newcomer keeps it waiting."""

    def __init__(self, folder: str | Path, number: int = 0, of: int = 1, hold_bytes: int = 0) -> None:
        """number, of: this process among all; hold_bytes: device memory that its rows may hold until they are timed."""
        self._folder, self._number, self._of, self.hold_bytes = Path(folder), number, of, hold_bytes
        self._gate, self._room = (open(Path(folder) / name, "w", encoding="ascii") for name in ("gate", "room"))

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """A turn that others may have at the same time."""
        with _locked(self._gate, fcntl.LOCK_EX):
            fcntl.flock(self._room, fcntl.LOCK_SH)
        try:
            yield
        finally:
            fcntl.flock(self._room, fcntl.LOCK_UN)

    def ceilings(self, measure: Callable[[], Ceilings] | None) -> Ceilings:
        """See `shared_ceilings`."""
        return shared_ceilings(self._folder, measure)

    def wait_for_others(self, ends: float) -> None:
        """Returns when all processes are here, or ended, or have been waited for too long: clocks run best when none computes."""
        arrived(self._folder, self._number)
        while len(list(self._folder.glob("arrived-*"))) < self._of and time.time() < ends + _LATE_SECONDS:
            time.sleep(0.02)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """A turn that nobody else has."""
        with _locked(self._gate, fcntl.LOCK_EX), _locked(self._room, fcntl.LOCK_EX):
            yield


@contextlib.contextmanager
def _locked(file: TextIO, how: int) -> Iterator[None]:
    fcntl.flock(file, how)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


def arrived(folder: str | Path, number: int) -> None:
    """Notes that a process makes no more rows ready."""
    (Path(folder) / f"arrived-{number}").touch()


_ENDING_SECONDS = 5.0

_LATE_SECONDS = 20.0
"""After the end of the time given, for rows that were begun before it."""

CEILINGS = "ceilings.json"
_CEILINGS_SECONDS = 120.0


def shared_ceilings(folder: str | Path, measure: Callable[[], Ceilings] | None) -> Ceilings:
    """The ceilings that the process with `measure` measures and the others read. TimeoutError if they do not come."""
    path = Path(folder) / CEILINGS
    if measure is not None:
        whole = path.with_suffix(".part")
        whole.write_text(json.dumps(asdict(measure())), encoding="utf-8")
        whole.rename(path)
    deadline = time.monotonic() + _CEILINGS_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the first process measured no ceilings in {_CEILINGS_SECONDS:.0f} s")
        time.sleep(0.05)
    return Ceilings(**json.loads(path.read_text(encoding="utf-8")))


def run_bench_jobs(
    spec: str, jobs: int, *, shapes: str, experts: int, ops: tuple[str, ...], rows: tuple[int, ...], budget: Budget,
    conformance: Path | None, listen: Listener = lambda row: None, ends: float = math.inf,
) -> dict[str, Any]:  # fmt: skip
    """As `run_bench`, over `jobs` processes; rows in the order of one process, ceilings the best of all of them.

    BackendUnavailable with a process's last words if one ends without a result; BadCall for what does not exist. However it
    ends, it leaves no process behind. After a KeyboardInterrupt the result has the rows that were heard of, `interrupted`; it is
    raised again where nothing was measured.
    """
    check_names(shapes, ops)
    heard: list[Row] = []
    shares = share_work(jobs, shapes, experts, ops, rows)
    results: list[dict[str, Any] | str] = [""] * len(shares)
    hearing = threading.Lock()
    started: list[subprocess.Popen[str]] = []

    def hear(row: Row) -> None:
        heard.append(row)
        listen(row)

    with tempfile.TemporaryDirectory() as folder:

        def play(number: int) -> None:
            job = {
                "spec": spec, "uses": shares[number], "folder": folder, "shapes": shapes, "experts": experts,
                "budget": asdict(budget), "conformance": None if conformance is None else str(conformance), "ops": ops,
                "rows": rows, "number": number, "of": len(shares), "ends": ends if math.isfinite(ends) else None,
            }  # fmt: skip
            try:
                results[number] = _play(job, hear, hearing, started.append)
            finally:
                with contextlib.suppress(FileNotFoundError):  # after an interrupt the folder may be gone
                    arrived(folder, number)

        threads = [threading.Thread(target=play, args=(number,)) for number in range(len(shares))]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except KeyboardInterrupt:
            if not heard:
                raise
            known = shared_ceilings(folder, None)
            return _so_far(heard, known, spec, len(shares), shapes, experts, ops, rows, budget, conformance)
        finally:  # after an interrupt they would go on for as long as their rows take
            for process in started:
                if process.poll() is None:
                    process.kill()
            gone = time.monotonic() + _ENDING_SECONDS
            while any(thread.is_alive() for thread in threads) and time.monotonic() < gone:
                time.sleep(0.01)  # they write to the folder until their process has ended
    lost = [result for result in results if isinstance(result, str)]
    if lost:
        raise BackendUnavailable(f"a process of the benchmark ended without a result: {lost[0]}")
    return merged(results, [case.case.op for case in bench_cases(MODELS[shapes], min(experts, MODELS[shapes].experts))])


def _so_far(
    heard: list[Row], ceilings: Ceilings, spec: str, jobs: int, shapes: str, experts: int, ops: tuple[str, ...],
    rows: tuple[int, ...], budget: Budget, conformance: Path | None,
) -> dict[str, Any]:  # fmt: skip
    """The result of an interrupted benchmark: what was heard, and a row that was not run for every other case."""
    model = MODELS[shapes]
    experts = min(experts, model.experts)
    cases = list(bench_cases(model, experts, rows, ops))
    have = {(row.id, row.use) for row in heard}
    lacking = [case for case in cases if (case.case.id, case.use) not in have]
    others = [Row(one.case.id, one.case.op, one.use, one.rows, reason="the benchmark was interrupted") for one in lacking]
    whole = {
        "device": spec, "threads": torch.get_num_threads(), "load_average": [os.getloadavg()[0]] * 2,
        "shapes": {"name": shapes, "experts_per_rank": experts, **asdict(model)}, "budget": asdict(budget),
        "ceilings": asdict(ceilings), "conformance_symbols_compared": conformance is not None, "interrupted": True,
        "rows": [asdict(row) for row in (*heard, *others)],
    }  # fmt: skip
    return {**merged([whole], [case.case.op for case in cases]), "jobs": jobs}


_ROW_ELEMENTS, _PLAIN_SHARE = 12_000_000, 7
"""What a row costs beside drawing (its kernel, reference, buffers and clock), as elements that are drawn and quantised meanwhile;
of values that are not quantised so many count as one."""


def share_work(jobs: int, shapes: str, experts: int, ops: tuple[str, ...], rows: tuple[int, ...]) -> list[list[tuple[str, str]]]:
    """(op, use) of each process: the largest first, each to the process that has least to do. The rows of a use stay together,
    since they share its weights, which are drawn once."""
    model, rows_of, drawn = MODELS[shapes], Counter(), Counter()
    for case in bench_cases(model, min(experts, model.experts), rows, ops):
        rows_of[case.key] += 1
        drawn[case.key] = max(drawn[case.key], case.elements if case.coded else case.elements // _PLAIN_SHARE)
    work = Counter({key: drawn[key] + _ROW_ELEMENTS * count for key, count in rows_of.items()})
    shares: list[tuple[int, list[tuple[str, str]]]] = [(0, []) for _ in range(min(jobs, len(work)) or 1)]
    for key, elements in work.most_common():
        place = min(range(len(shares)), key=lambda number: shares[number][0])
        shares[place] = (shares[place][0] + elements, [*shares[place][1], key])
    return [keys for _, keys in shares]


def merged(results: list[dict[str, Any]], order: list[str]) -> dict[str, Any]:
    """One result of several: rows by op in the given order, rated again by the best ceilings."""
    from deepinfer_hal.bench import rate

    ceilings = functools.reduce(Ceilings.best, (Ceilings(**result["ceilings"]) for result in results))
    rows = [Row(**row) for result in results for row in result["rows"]]
    places = {op: place for place, op in enumerate(dict.fromkeys(order))}
    rows.sort(key=lambda row: (places.get(row.op, len(places)), row.use, row.rows, row.id))
    for row in rows:
        rate(row, ceilings)
    return {**results[0], "ceilings": asdict(ceilings), "jobs": len(results), "rows": [asdict(row) for row in rows]}


def _play(
    job: dict[str, Any], listen: Listener, hearing: threading.Lock, started: Callable[[subprocess.Popen[str]], None]
) -> dict[str, Any] | str:
    """The result of a process, or its last words."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "deepinfer_hal.bench_jobs", json.dumps(job)], stdout=subprocess.PIPE, stderr=errors,
            env=environment, text=True, encoding="utf-8",
        )  # fmt: skip
        started(process)
        result: dict[str, Any] | None = None
        for line in process.stdout:
            told = json.loads(line)
            if "row" in told:
                with hearing:
                    listen(Row(**told["row"]))
            else:
                result = told["result"]
        status = process.wait()
        errors.seek(0)
        words = [line.strip() for line in errors.read().splitlines() if line.strip()]
    return result if result is not None else f"exit status {status}; it said: {' '.join(words[-2:])[:300]}"


def main(text: str) -> int:
    """The process of one share."""
    from deepinfer_hal.conformance.report import read_report
    from deepinfer_hal.registry import open_backend

    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a kernel prints is no answer
    job = json.loads(text)
    backend, index = open_backend(job["spec"])
    known = None if job["conformance"] is None else read_report(job["conformance"])

    def tell(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    uses = {tuple(one) for one in job["uses"]}
    memory = backend.memory_info(index).total_bytes or Budget().memory_bytes
    turns = Turns(job["folder"], job["number"], job["of"], memory // (2 * job["of"]))
    result = run_bench(
        backend, index, shapes=job["shapes"], experts=job["experts"], ops=tuple(job["ops"]), rows=tuple(job["rows"]), uses=uses,
        budget=Budget(**job["budget"]), conformance=known, listen=lambda row: tell({"row": asdict(row)}),
        turns=turns, first=job["number"] == 0, ends=math.inf if job["ends"] is None else job["ends"],
    )  # fmt: skip
    tell({"result": result})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
