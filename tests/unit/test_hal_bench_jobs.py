"""`deepinfer hal bench` by several processes: how they share work and device, and what an interrupted one leaves."""

from __future__ import annotations

import dataclasses
import fcntl
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from deepinfer_hal import bench, bench_jobs
from deepinfer_hal.bench import run_bench, smallest_first
from deepinfer_hal.bench_jobs import Turns, arrived, merged, share_work
from deepinfer_hal.bench_shapes import NANO, V41, bench_cases
from deepinfer_hal.errors import BadCall

from tests.unit.bench_on_host import BUDGET, CEILINGS, Bench, kernel, known_ceilings  # noqa: F401


def test_every_use_of_an_op_is_in_one_share_and_shares_are_even():
    shares = share_work(4, "nano", 8, (), ())
    uses = [one for share in shares for one in share]
    assert len(set(uses)) == len(uses) and set(uses) == {case.key for case in bench_cases(NANO, 8)}
    assert len(shares) == 4 and all(shares)
    assert share_work(4, "nano", 8, ("rope",), (1,)) == [[("rope", "query")]]


def test_a_process_begins_with_the_smallest_and_keeps_the_rows_of_a_use_together():
    cases = smallest_first(list(bench_cases(V41, 8, ops=("linear", "rope"))))
    keys = [case.key for case in cases]
    assert keys[0] == ("rope", "query") and keys[-1] == ("linear", "head")
    assert len([key for key, before in zip(keys, [None, *keys], strict=False) if key != before]) == len(set(keys))


def test_results_of_several_processes_are_one_with_the_best_ceilings():
    options = dict(shapes="nano", rows=(1,), ops=("rope", "stream_collapse"), budget=BUDGET)
    backend = Bench(kernel("rope"), kernel("stream_collapse"))
    whole = run_bench(backend, 0, **options)
    parts = [run_bench(backend, 0, uses={(op, use)}, **options) for op, use in (("stream_collapse", ""), ("rope", "query"))]
    parts[1]["ceilings"] = dataclasses.asdict(dataclasses.replace(CEILINGS, bandwidth=2e12))
    found = merged(parts, ["rope", "stream_collapse"])
    assert [row["id"] for row in found["rows"]] == [row["id"] for row in whole["rows"]]
    assert found["jobs"] == 2 and found["ceilings"]["bandwidth"] == 2e12
    for row in found["rows"]:
        assert row["floor_seconds"] == pytest.approx(max(row["bytes"] / 2e12, row["flops"] / 1e15))


def test_one_process_measures_the_ceilings_and_the_others_wait_for_them(tmp_path):
    read = []
    reader = threading.Thread(target=lambda: read.append(Turns(tmp_path).ceilings(None)))
    reader.start()
    assert Turns(tmp_path).ceilings(lambda: CEILINGS) == CEILINGS
    reader.join(20)
    assert read == [CEILINGS]


def test_who_wants_a_turn_alone_waits_for_the_others_and_keeps_newcomers_out(tmp_path):
    first, second, third = (Turns(tmp_path) for _ in range(3))
    done = []

    def alone():
        with second.alone():
            done.append("alone")

    def beside():
        with third.beside():
            done.append("beside")

    threads = [threading.Thread(target=target) for target in (alone, beside)]
    with first.beside():
        threads[0].start()
        while not _held(tmp_path / "gate"):
            time.sleep(1e-3)
        threads[1].start()
        assert done == []
    for thread in threads:
        thread.join(20)
    assert done == ["alone", "beside"]


def test_processes_time_their_rows_when_all_are_ready_or_ended(tmp_path):
    first, second = Turns(tmp_path, 0, 3), Turns(tmp_path, 1, 3)
    passed = []

    def wait(turns):
        turns.wait_for_others(time.time() + 60)
        passed.append(turns)

    threads = [threading.Thread(target=wait, args=(turns,)) for turns in (first, second)]
    for thread in threads:
        thread.start()
    while len(list(tmp_path.glob("arrived-*"))) < 2:
        time.sleep(1e-3)
    assert passed == []
    arrived(tmp_path, 2)  # the third has ended without a word
    for thread in threads:
        thread.join(20)
    assert len(passed) == 2


def test_who_is_late_is_not_waited_for_without_end(tmp_path):
    Turns(tmp_path, 0, 2).wait_for_others(time.time() - 60)


def test_rows_hold_their_buffers_until_they_are_timed_as_far_as_memory_is_given(tmp_path):
    options = dict(ops=("rope", "stream_collapse"), rows=(1, 16))
    backend = Bench(kernel("rope"), kernel("stream_collapse"))
    heard = []
    held = run_bench(
        backend, 0, shapes="nano", budget=BUDGET, turns=Turns(tmp_path, 0, 1, hold_bytes=1 << 30), listen=heard.append, **options
    )
    assert [row["verdict"] for row in held["rows"]] == ["pass"] * 4 == [row.verdict for row in heard]
    assert all(row["share"] and row["spent"]["timing"] > 0 for row in held["rows"])


def _held(path: Path) -> bool:
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


class TestProcesses:
    ASKED = {"shapes": "nano", "experts": 4, "ops": ("rope", "quantise"), "rows": (), "budget": BUDGET, "conformance": None}

    @pytest.mark.parametrize("wrong, named", [({"shapes": "huge"}, "v41 or nano, got 'huge'"), ({"ops": ("roap",)}, "'roap'")])
    def test_what_does_not_exist_is_told_before_they_start(self, wrong, named, monkeypatch):
        monkeypatch.setattr(subprocess, "Popen", lambda *given, **more: pytest.fail("started"))
        with pytest.raises(BadCall, match=named):
            bench_jobs.run_bench_jobs("cpu:0", 2, **self.ASKED | wrong)

    def test_an_interrupt_keeps_what_was_measured(self, monkeypatch):
        row = bench.Row("rope(T=1,...)", "rope", "query", 1, "pass", seconds={"median": 1e-6}, bytes=10)

        def play(job, listen, hearing, started):
            bench_jobs.shared_ceilings(job["folder"], (lambda: CEILINGS) if job["number"] == 0 else None)
            with hearing:
                listen(dataclasses.replace(row, id=f"{row.id} of {job['number']}"))
            return "killed"

        joined = threading.Thread.join

        def interrupted(thread, timeout=None):
            joined(thread, timeout)
            raise KeyboardInterrupt

        monkeypatch.setattr(bench_jobs, "_play", play)
        monkeypatch.setattr(threading.Thread, "join", interrupted)
        found = bench_jobs.run_bench_jobs("cpu:0", 2, **self.ASKED)
        timed = [one for one in found["rows"] if one["seconds"]]
        assert found["interrupted"] and len(timed) >= 1 and found["jobs"] == 2 and timed[0]["floor_seconds"] > 0
        assert {one["reason"] for one in found["rows"] if not one["seconds"]} == {"the benchmark was interrupted"}

    def test_an_interrupt_leaves_none_behind(self, monkeypatch):
        started, start = [], subprocess.Popen

        def idle(command, **more):
            started.append(start([sys.executable, "-c", "import time; time.sleep(60)"], **more))
            return started[-1]

        def interrupted(thread):
            while len(started) < 2:
                time.sleep(0.01)
            raise KeyboardInterrupt

        monkeypatch.setattr(subprocess, "Popen", idle)
        monkeypatch.setattr(threading.Thread, "join", interrupted)
        with pytest.raises(KeyboardInterrupt):
            bench_jobs.run_bench_jobs("cpu:0", 2, **self.ASKED)
        assert [process.wait(10) for process in started] == [-9, -9]
