"""A benchmark's kernels held against those that conformance ran; and the stored reports, which must agree."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from deepinfer_hal.conformance.report import KIND, SCHEMA, render, sealed
from deepinfer_hal.errors import BadCall

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools/cuda")]
import same_kernels  # noqa: E402

BUILD = {"cuda c++ kernels": "sources aa", "triton kernels": "sources bb", "gpu": "one"}
OLD = {**BUILD, "cuda c++ kernels": "sources zz"}
CONFORMANCE = {
    "kind": KIND, "schema": SCHEMA, "whole": True,
    "subject": {"build": BUILD},
    "results": [
        {"symbol": "di_linear", "verdict": "pass"}, {"symbol": "di_linear", "verdict": "waived"},
        {"symbol": "di_sample", "verdict": "pass"}, {"symbol": "di_sample", "verdict": "fail"},
        {"symbol": "never", "verdict": "unsupported"},
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("report", "wrong"),
    [
        ({"build": BUILD, "rows": [{"symbol": "di_linear"}]}, []),
        ({"slices": [{"build": BUILD, "kernels": [{"op": "linear", "symbol": "di_linear"}]}]}, []),
        ({"build": BUILD, "kernels": ["linear[head]: di_linear by cuda, batch invariance yes"]}, []),
        ({"build": {**BUILD, "gpu": "two"}, "symbols": {"linear": "di_linear"}}, []),
        ({"build": BUILD, "symbols": ["di_linear", "planted memcheck"]}, []),
        ({"build": BUILD, "symbols": {"sample": "di_sample"}}, ["di_sample did not pass there"]),
        ({"build": BUILD, "symbols": {"op": "never"}}, ["never did not pass there"]),
        ({"build": {**BUILD, "triton kernels": "sources cc"}, "symbol": "di_linear"},
         ["triton kernels are 'sources cc', there 'sources bb'"]),
        ({"build": BUILD, "slices": [{"build": OLD, "symbol": "di_linear"}]},
         ["cuda c++ kernels are 'sources zz', there 'sources aa'"]),
        ({"slices": [{"build": BUILD, "symbol": "di_linear"}, {"symbol": "di_linear"}]}, ["no build is told for di_linear"]),
        ({"slices": [{"build": BUILD, "symbol": "di_linear"}, {"build": BUILD}]}, ["a part of it tells a build and no symbol"]),
        ({"rows": [{"symbol": "di_linear"}], "subject": {"build": BUILD}}, []),
        ({"build": BUILD, "symbol": "di_linear", "load_kv_symbol": "di_sample"}, ["di_sample did not pass there"]),
        ([{"build": BUILD, "symbol": "di_linear"}, {"build": BUILD, "symbol": "never"}], ["never did not pass there"]),
        ({"symbol": "di_linear"}, ["it tells no build"]),
        ({"build": BUILD, "rows": []}, ["it tells no symbol"]),
    ],
)  # fmt: skip
def test_what_differs_is_named(report, wrong):
    assert same_kernels.differences(CONFORMANCE, report) == wrong


@pytest.mark.parametrize(
    "told", [{"symbol": None}, {"symbols": {"linear": {"one": "di_linear"}}}, {"kernels": ["Linear by cuda"]}], ids=str
)
def test_a_symbol_in_a_form_that_is_not_read_is_an_error(told):
    with pytest.raises(BadCall, match="in a form that is not read"):
        same_kernels.differences(CONFORMANCE, {"build": BUILD, "rows": [{"symbol": "di_linear"}, told]})


def test_the_tool_names_each_report_and_fails_with_one(tmp_path, capsys):
    good, bad, absent = (tmp_path / f"{name}.json" for name in ("good", "bad", "absent"))
    (tmp_path / "all.json").write_text(render(sealed(CONFORMANCE)))
    good.write_text(json.dumps({"build": BUILD, "symbol": "di_linear"}))
    bad.write_text(json.dumps({"symbol": "di_linear"}))
    run = [str(tmp_path / "all.json")]
    assert same_kernels.main([*run, str(good)]) == 0
    assert same_kernels.main([*run, str(bad), str(absent), str(good)]) == 1
    first, *others = capsys.readouterr().out.splitlines()
    assert first == others[2] == f"{good}: the same build, 1 symbols that passed"
    assert others[0] == f"{bad}: it tells no build" and others[1].startswith(f"{absent}: it cannot be read")


@pytest.mark.parametrize("change", [{"kind": "bench"}, {"whole": False}, {"subject": {"build": {"gpu": "one"}}}], ids=str)
def test_nothing_is_held_against_another_kind_of_report(change, tmp_path, capsys):
    (tmp_path / "all.json").write_text(render(sealed({**CONFORMANCE, **change})))
    with pytest.raises(SystemExit, match="2"):
        same_kernels.main([str(tmp_path / "all.json"), str(tmp_path / "all.json")])
    assert "error: " in capsys.readouterr().err


STORED = sorted((ROOT / "reports/h200").glob("*.json"))


def test_there_are_stored_reports():
    assert len(STORED) >= 13


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_every_stored_report_of_the_h200_is_of_the_kernels_that_conformance_ran(path):
    conformance = json.loads((ROOT / "reports/hal-cuda-full.json").read_text(encoding="utf-8"))
    assert same_kernels.differences(conformance, json.loads(path.read_text(encoding="utf-8"))) == []
