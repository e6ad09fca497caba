"""`deepinfer hal bench`: rows that were checked, timed against ceilings, and tied to what conformance ran."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import pytest
import torch
from deepinfer_hal import bench
from deepinfer_hal.backend import Backend, Capabilities
from deepinfer_hal.bench import run_bench
from deepinfer_hal.bench_shapes import MODELS, NANO, NOT_MEASURED, V41, bench_cases
from deepinfer_hal.card import all_cards, get_card
from deepinfer_hal.ceilings import measure_ceilings
from deepinfer_hal.checks import check_call
from deepinfer_hal.conformance.arena import bits
from deepinfer_hal.conformance.cases import parse_case
from deepinfer_hal.errors import BadCall
from deepinfer_hal.kernel import Kernel
from deepinfer_hal.weights import prepare_canonical

from deepinfer.cli.app import app
from tests.conformance import captured
from tests.unit.bench_on_host import BUDGET, CEILINGS, Bench, kernel, known_ceilings  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]


def measured(backend: Backend, **options) -> dict[str, dict]:
    """Rows by id."""
    options = {"shapes": "nano", "rows": (1,), "budget": BUDGET, **options}
    return {row["id"]: row for row in run_bench(backend, 0, **options)["rows"]}


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
