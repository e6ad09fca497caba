"""`deepinfer hal bench`: rows that were checked, timed against ceilings, and tied to what conformance ran."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from deepinfer_hal import bench, bench_jobs
from deepinfer_hal.backend import Backend, Capabilities, DeviceInfo
from deepinfer_hal.bench import Budget, run_bench, smallest_first
from deepinfer_hal.bench_jobs import Turns, arrived, merged, share_work
from deepinfer_hal.bench_shapes import MODELS, NANO, NOT_MEASURED, V41, bench_cases
from deepinfer_hal.card import all_cards, get_card
from deepinfer_hal.ceilings import Ceilings, measure_ceilings
from deepinfer_hal.checks import check_call
from deepinfer_hal.conformance.arena import bits
from deepinfer_hal.conformance.cases import parse_case
from deepinfer_hal.errors import BadCall
from deepinfer_hal.kernel import Kernel
from deepinfer_hal.weights import prepare_canonical

from deepinfer.cli.app import app
from tests.conformance import captured

ROOT = Path(__file__).resolve().parents[2]
BUDGET = Budget(repeats=3, row_seconds=20.0, memory_bytes=1 << 30, cache_bytes=1 << 19)
CEILINGS = Ceilings(bandwidth=1e12, copy_bytes=1, flops=1e15, gemm_flops={})
"""Of no machine here: floors that every kernel stays above."""


class Bench(Backend):
    """Host memory, with wrapped references as kernels."""

    name = "bench"

    def __init__(self, *kernels: Kernel) -> None:
        self._kernels = kernels

    def probe(self) -> list[DeviceInfo]:
        return [DeviceInfo(0, "a test's device", 1 << 30, {})]

    def device(self, index: int) -> torch.device:
        return torch.device("cpu")

    def capabilities(self, index: int) -> Capabilities:
        return Capabilities()

    def kernels(self, index: int) -> tuple[Kernel, ...]:
        return self._kernels


def kernel(op: str, fn=None, symbol: str = "") -> Kernel:
    return Kernel(op, "test", fn or get_card(op).reference, symbol or f"reference::{op}+wrapped", "yes")


def measured(backend: Backend, **options) -> dict[str, dict]:
    """Rows by id."""
    options = {"shapes": "nano", "rows": (1,), "budget": BUDGET, **options}
    return {row["id"]: row for row in run_bench(backend, 0, **options)["rows"]}


@pytest.fixture(autouse=True)
def known_ceilings(monkeypatch):
    """Shares do not depend on what else this machine does."""
    monkeypatch.setattr(bench, "measure_ceilings", lambda *_: CEILINGS)


def one_row(rows: dict[str, dict], op: str) -> dict:
    found = [row for row in rows.values() if row["op"] == op]
    assert len(found) == 1
    return found[0]


# ------------------------------------------------------------------------------------------------- shapes


def test_every_card_has_shapes_or_a_reason():
    measured = {case.case.op for case in bench_cases(V41, 8)}
    assert measured | set(NOT_MEASURED) == set(all_cards())
    assert not measured & set(NOT_MEASURED)


@pytest.mark.parametrize("model", MODELS)
def test_ids_replay_and_tell_rows_apart(model):
    cases = list(bench_cases(MODELS[model], 8))
    assert len({(case.case.id, case.use) for case in cases}) == len(cases)
    for case in cases:
        assert parse_case(case.case.id).id == case.case.id


def test_a_replayed_id_makes_the_same_call():
    for case in bench_cases(NANO, 8, rows=(1,), ops=("draft_attention", "sparse_attention", "gather_tokens")):
        replayed = parse_case(case.case.id)
        once, again = (get_card(one.op).generate(one, 0, "cpu", prepare_canonical) for one in (case.case, replayed))
        for name, value in once.items():
            tensor = torch.is_tensor(value)
            assert bits(value).equal(bits(again[name])) if tensor else value == again[name], f"{case.case.id}: {name}"


def test_every_op_has_decode_rows_and_the_released_sizes():
    ids = "\n".join(case.case.id for case in bench_cases(V41, 8))
    for text in (
        "linear(T=64,K=1280,N=32768,", "linear(T=1,K=5120,N=129280,", "grouped_linear(T=256,G=8,K=4096,N=1024,",
        "grouped_gemm(M=96,E=8,K=5120,N=4608,", "heads=64,D=512", "heads=32,d=128", "route_topk(T=256,E=384,k=6)", "k=512",
    ):  # fmt: skip
        assert text in ids


@pytest.mark.parametrize("op", sorted({case.case.op for case in bench_cases(NANO, 8)}))
def test_cards_make_the_cases(op):
    for case in bench_cases(NANO, 8, ops=(op,)):
        if case.rows != 256:
            card = get_card(op)
            check_call(card, card.generate(case.case, 0, "cpu", prepare_canonical))


def test_experts_beyond_the_model_are_refused():
    with pytest.raises(BadCall, match="1 to 384"):
        list(bench_cases(V41, 385))


# ------------------------------------------------------------------------------------------------- rows


def test_a_row_is_checked_and_timed_on_the_chosen_kernel():
    backend = Bench(kernel("stream_collapse"), dataclasses.replace(kernel("stream_collapse", symbol="better"), priority=5))
    row = one_row(measured(backend, ops=("stream_collapse",)), "stream_collapse")
    assert (row["verdict"], row["symbol"], row["provider"]) == ("pass", "better", "test")
    assert 0 < row["seconds"]["min"] <= row["seconds"]["median"] <= row["seconds"]["max"]
    assert 0 < row["share"] < 1 and row["bound"] == "memory" and row["bytes"] > 0
    assert row["buffer_bytes"] > BUDGET.cache_bytes and row["buffers"] > 1
    assert row["bytes_per_second"] == pytest.approx(row["bytes"] / row["seconds"]["median"])


def test_a_wrong_kernel_is_not_timed():
    def wrong(*values):
        get_card("stream_collapse").reference(*values)
        values[-1].mul_(1.5)

    row = one_row(measured(Bench(kernel("stream_collapse", wrong)), ops=("stream_collapse",)), "stream_collapse")
    assert row["verdict"] == "fail" and "must be" in row["reason"]
    assert not row["seconds"] and row["share"] is None


def test_what_raises_is_one_failed_row_and_the_rest_goes_on():
    def raises(*values):
        raise RuntimeError("no such instruction")

    rows = measured(Bench(kernel("rope", raises), kernel("stream_collapse")), ops=("rope", "stream_collapse"))
    assert one_row(rows, "rope")["verdict"] == "fail" and "no such instruction" in one_row(rows, "rope")["reason"]
    assert one_row(rows, "stream_collapse")["verdict"] == "pass"


def test_ops_without_kernels_are_unsupported_and_never_fall_back():
    row = one_row(measured(Bench(), ops=("rope",)), "rope")
    assert (row["verdict"], row["symbol"]) == ("unsupported", "")
    assert "no kernel" in row["reason"]


def test_rows_beyond_memory_or_time_are_listed_with_the_reason():
    gate = dict(ops=("grouped_gemm",), shapes="v41", experts=384)
    rows = measured(Bench(kernel("grouped_gemm")), **gate)
    assert len(rows) == 2
    for row in rows.values():
        assert row["verdict"] == "not-run" and "GB of memory, a row has 1.1 GB" in row["reason"]
    roomy = dataclasses.replace(BUDGET, memory_bytes=1 << 50, row_seconds=1e-3)
    for row in measured(Bench(kernel("grouped_gemm")), budget=roomy, **gate).values():
        assert row["verdict"] == "not-run" and "drawing it takes about" in row["reason"]


def test_a_call_that_leaves_no_time_for_repeats_is_not_run(monkeypatch):
    hasty = dataclasses.replace(BUDGET, row_seconds=1e-9)
    row = one_row(measured(Bench(kernel("stream_collapse")), ops=("stream_collapse",), budget=hasty), "stream_collapse")
    assert row["verdict"] == "not-run" and "left after checking it" in row["reason"]


def test_ops_of_several_ranks_are_listed():
    row = one_row(measured(Bench(), ops=("all_reduce",)), "all_reduce")
    assert row["verdict"] == "not-run" and "between ranks" in row["reason"]


def test_every_buffer_gathers_other_rows_of_a_shared_table():
    seen = set()

    def watching(ids, table, count, out):
        seen.add(int(ids[0]))
        get_card("embedding_gather").reference(ids, table, count, out)

    row = one_row(measured(Bench(kernel("embedding_gather", watching)), ops=("embedding_gather",)), "embedding_gather")
    assert row["verdict"] == "pass"
    assert len(seen) > min(row["buffers"], 10) / 2


# ------------------------------------------------------------------------------------------------- conformance


def report_of(symbol: str, verdict: str = "pass") -> dict:
    results = [{"op": "stream_collapse", "symbol": symbol, "verdict": verdict}]
    return {"subject": {"backend": "bench"}, "results": results}


def test_symbols_must_be_those_that_conformance_ran():
    backend = Bench(kernel("stream_collapse", symbol="mine"))
    same = measured(backend, ops=("stream_collapse",), conformance=report_of("mine"))
    assert one_row(same, "stream_collapse")["verdict"] == "pass"
    for report in (report_of("another"), report_of("mine", "unsupported")):
        row = one_row(measured(backend, ops=("stream_collapse",), conformance=report), "stream_collapse")
        assert row["verdict"] == "fail" and "mine was measured, the conformance report ran" in row["reason"]


def test_a_report_of_another_backend_is_refused():
    with pytest.raises(BadCall, match="is of backend 'other'"):
        measured(Bench(), conformance={"subject": {"backend": "other"}, "results": []})


# ------------------------------------------------------------------------------------------------- command


def run(*arguments: str) -> int:
    """Exit status of `deepinfer hal bench` on the CPU's kernels at nano's shapes, with a tiny budget."""
    common = ("hal", "bench", "--backend", "cpu", "--shapes", "nano", "--repeats", "3", "--cache", "512k", "--memory", "1G")
    try:
        return app([*common, *arguments], standalone_mode=False) or 0
    except SystemExit as stopped:
        return int(stopped.code or 0)


def test_the_command_prints_rows_and_stores_them(tmp_path, capsys):
    from deepinfer_cpu.kernels import native_unavailable_reason

    if native_unavailable_reason():
        pytest.skip(native_unavailable_reason())
    file = tmp_path / "bench.json"
    chosen = ("linear", "sparse_attention", "residual_site", "grouped_gemm")
    options = [part for op in chosen for part in ("--op", op)]
    assert run("--rows", "16", *options, "--json", str(file)) == 0
    printed = capsys.readouterr().out
    stored = json.loads(file.read_text(encoding="utf-8"))
    assert json.loads(json.dumps(stored)) == stored and stored["benchmark"] == "hal"
    results = stored["results"]
    assert results["ceilings"]["bandwidth"] > 0 and results["suite"]["hal_version"] and results["subject"]["kernels"]
    assert results["shapes"]["experts_per_rank"] == 8
    offered = {(known["op"], known["symbol"]) for known in results["subject"]["kernels"]}
    assert {row["op"] for row in results["rows"]} == set(chosen)
    for row in results["rows"]:
        assert row["verdict"] == "pass", row["reason"]
        assert (row["op"], row["symbol"]) in offered
        assert 0 < row["share"] <= 1.5
        assert row["symbol"] in printed


def test_ceilings_are_measured_and_the_better_of_two_counts():
    measured = measure_ceilings(Bench(), 0, 1 << 22)
    assert measured.bandwidth > 1e8 and measured.flops == max(measured.gemm_flops.values()) > 1e8
    low = dataclasses.replace(measured, bandwidth=1.0, flops=1.0, gemm_flops=dict.fromkeys(measured.gemm_flops, 1.0))
    assert low.best(measured) == measured.best(low) == measured


def test_stored_reports_hold_shares_of_a_roofline():
    for path in sorted((ROOT / "reports").glob("bench-*.json")):
        stored = json.loads(path.read_text(encoding="utf-8"))
        timed = [row for row in stored["results"]["rows"] if row["verdict"] == "pass"]
        assert timed and stored["command"].startswith("deepinfer hal bench")
        for row in timed:
            assert 0 < row["share"] <= 1.5 and row["symbol"], f"{path.name}: {row['id']}"
        for row in stored["results"]["rows"]:
            assert row["verdict"] == "pass" or row["reason"], f"{path.name}: {row['id']}"


def test_wrong_commands_exit_2_with_a_sentence(capsys):
    for wrong in (("--op", "no_such_op"), ("--shapes", "v5"), ("--row-seconds", "0"), ("--report", "missing.json")):
        assert run(*wrong) == 2
        assert capsys.readouterr().err.startswith("error: ")


def test_a_report_that_was_altered_is_no_witness(tmp_path, capsys):
    from deepinfer_hal.conformance.report import KIND, SCHEMA, sealed, write_report

    stored = tmp_path / "hal-report.json"
    whole = sealed({"kind": KIND, "schema": SCHEMA, "subject": {"backend": "cpu"}, "results": []})
    write_report(stored, {**whole, "results": [{"op": "rope", "symbol": "mine", "verdict": "pass"}]})
    assert run("--report", str(stored)) == 2
    assert "the report to compare kernels with was altered, its checksum does not match" in capsys.readouterr().err
    write_report(stored, whole)
    assert run("--report", str(stored), "--op", "barrier") == 2 and "altered" not in capsys.readouterr().err


def test_nothing_timed_exits_2():
    assert run("--op", "barrier") == 2


# ------------------------------------------------------------------------------------------------- graphs, several processes


class Graphing(Bench):
    """Has graphs; counts what is called while one is captured."""

    def __init__(self, capturable: bool) -> None:
        self.graph_slot = captured.Graphs()
        self.replays = 0

        def enqueue(*values):
            self.graph_slot.launch(lambda: self._do(values))

        kernel_ = Kernel("stream_collapse", "test", enqueue, "reference::stream_collapse+enqueued", "yes", capturable=capturable)
        super().__init__(kernel_)

    def _do(self, values) -> None:
        self.replays += 1
        get_card("stream_collapse").reference(*values)

    def capabilities(self, index: int) -> Capabilities:
        return Capabilities(graphs=True)

    def graphs(self, index: int) -> captured.Graphs:
        return self.graph_slot


@pytest.mark.parametrize(("capturable", "timing"), [(True, "graph"), (False, "calls")])
def test_a_capturable_kernel_is_timed_by_replays_over_all_buffers_and_others_by_calls(capturable, timing):
    backend = Graphing(capturable)
    row = one_row(measured(backend, ops=("stream_collapse",)), "stream_collapse")
    assert (row["verdict"], row["timing"]) == ("pass", timing)
    assert row["buffers"] > 1 and (timing == "calls" or backend.replays > 2 * row["buffers"])


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


OVER = "the time of the run was over, or was too short to draw it"


def test_rows_that_cannot_be_drawn_in_time_are_not_begun(monkeypatch):
    monkeypatch.setattr(bench, "drawing_seconds", lambda: {True: 1.0, False: 1.0})
    backend = Bench(kernel("linear"), kernel("rope"))
    rows = measured(backend, ops=("linear", "rope"), ends=time.time() + 10, budget=dataclasses.replace(BUDGET, row_seconds=1e9))
    assert {row["reason"] for row in rows.values() if row["op"] == "linear"} == {OVER}
    assert one_row(rows, "rope")["verdict"] == "pass"


def test_a_row_tells_what_the_benchmark_spent_on_it():
    row = one_row(measured(Bench(kernel("rope")), ops=("rope",)), "rope")
    assert set(row["spent"]) == {"drawing", "checking", "timing"} and all(seconds > 0 for seconds in row["spent"].values())


def test_rows_that_have_not_begun_in_time_are_not_run_and_told():
    rows = measured(Bench(kernel("rope")), ops=("rope",), ends=time.time() - 1)
    row = one_row(rows, "rope")
    assert (row["verdict"], row["reason"]) == ("not-run", OVER) and not row["seconds"]


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
