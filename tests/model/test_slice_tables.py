"""Stored reports of rank slices as tables: several of one size are one result, and errors hide nothing that was measured."""

from __future__ import annotations

import json

import pytest

from deepinfer.bench.slice_tables import joined, loops_table, ops_tables, phases_table, read_slices, steps_table
from deepinfer.errors import ConfigError


def step(kind: str, requests: int, tokens: int, ms: float, **more) -> dict:
    size = {"kind": kind, "requests": requests, "tokens": tokens}
    return {**size, "whole": {"median": ms / 1e3}, "phases": {"samples": 1.0}, **more}


def whole(kind: str, requests: int, tokens: int, ms: float, scaled: dict | None = None) -> dict:
    return {
        "kind": kind, "requests": requests, "tokens": tokens, "seconds": ms / 1e3, "tokens_per_second": 1e6 / ms,
        "published_scaled": scaled or {},
    }  # fmt: skip


def result(ranks: int, steps: list[dict], whole_model: list[dict], gaps: list[dict] | None = None) -> dict:
    return {"ranks": ranks, "steps": steps, "whole_model": whole_model, "gaps": gaps or [], "phases": {"weights": 2.0}}


OP = {"op": "linear", "role": "wo_b", "seconds": 4e-4, "floor_seconds": 1e-4, "share": 0.25}
LOOP = {
    "requests": 64, "step_seconds": 3e-3, "between_seconds": 2e-6, "between_share": 0.0007, "gap_seconds": 3e-5,
    "idle_share": 0.01,
}  # fmt: skip
FIRST = result(
    64,
    [step("decode", 64, 1, 3.0, ops=[OP]), {"kind": "prefill", "requests": 1, "tokens": 4096, "error": "not run: no time"}],
    [whole("decode", 64, 1, 13.4)],
    [LOOP],
)
LATER = result(
    64,
    [step("prefill", 1, 4096, 50.0), step("verify", 8, 4, 2.5)],
    [
        whole("prefill", 1, 4096, 300.0), whole("replayed prefill", 1, 4096, 150.0),
        whole("verify", 8, 4, 13.0, {"by_bandwidth": 1560.0, "by_compute": 1143.4}),
    ],
)  # fmt: skip
OTHER = result(8, [step("decode", 64, 1, 4.0)], [whole("decode", 64, 1, 20.0)])


def stored(folder, *slices: dict) -> list:
    paths = []
    for number, one in enumerate(slices):
        paths.append(folder / f"{number}.json")
        paths[-1].write_text(json.dumps({"benchmark": "rank-slice", "results": {"slices": [one]}}))
    return paths


def test_reports_of_one_size_are_one_result_and_a_later_measurement_takes_an_errors_place(tmp_path):
    both, other = read_slices(stored(tmp_path, FIRST, LATER, OTHER))
    assert (both["ranks"], other["ranks"]) == (64, 8)
    assert [one["kind"] for one in both["steps"]] == ["decode", "prefill", "verify"]
    assert not any("error" in one for one in both["steps"]) and both["gaps"] == [LOOP]


def test_a_later_error_hides_nothing_that_was_measured():
    failed = result(64, [{"kind": "decode", "requests": 64, "tokens": 1, "error": "no memory"}], [])
    assert joined(FIRST, failed)["steps"][0] == FIRST["steps"][0]


def test_every_step_has_its_row_in_order_with_the_published_figure_where_there_is_one():
    rows = steps_table([joined(FIRST, LATER), OTHER]).splitlines()[2:]
    assert [row.split(" | ")[1] for row in rows] == ["decode", "verify and draft", "prefill", "replayed prefill", "decode"]
    assert rows[0].startswith("| EP64 | decode | 64 x 1 | 3.00 | 13.4 | 74627 |")
    assert rows[1].endswith("| 1560 / 1143 |") and rows[-1].startswith("| EP8 |")


def test_a_step_that_was_not_measured_says_why():
    assert "| EP64 | prefill | 1 x 4096 | not run: no time |" in steps_table([FIRST])


def test_ops_stand_beside_their_floor_and_loops_beside_the_devices_work():
    ((title, table),) = ops_tables([FIRST])
    assert title == "EP64, decode 64 x 1, whole model, its ops alone 0.40 ms of 13.40"
    assert "| linear | wo_b | 400 | 25.0 % | 0.25 |" in table
    assert "| EP64 | 64 | 3.000 | 2.0 | 0.07 % | 30.0 | 1.00 % |" in loops_table([FIRST]) and loops_table([OTHER]) == ""


def test_the_benchmarks_own_time_adds_up():
    assert "| EP64 | 3.0 | weights 2.0, samples 1.0 |" in phases_table([FIRST])


@pytest.mark.parametrize("text", ["{", "[]", '{"benchmark": "hal"}'])
def test_another_file_is_refused_by_name(text, tmp_path):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="other.json"):
        read_slices([path])
