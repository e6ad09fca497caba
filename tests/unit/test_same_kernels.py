"""A benchmark's kernels held against those that conformance ran; and the stored reports, which must agree."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools/cuda")]
import same_kernels  # noqa: E402

BUILD = {"cuda c++ kernels": "sources aa", "triton kernels": "sources bb", "gpu": "one"}
CONFORMANCE = {
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
        ({"symbol": "di_linear"}, ["it tells no build"]),
        ({"build": BUILD, "rows": []}, ["it tells no symbol"]),
    ],
)  # fmt: skip
def test_what_differs_is_named(report, wrong):
    assert same_kernels.differences(CONFORMANCE, report) == wrong


def test_the_tool_names_each_report_and_fails_with_one(tmp_path, capsys):
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    (tmp_path / "all.json").write_text(json.dumps(CONFORMANCE))
    good.write_text(json.dumps({"build": BUILD, "symbol": "di_linear"}))
    bad.write_text(json.dumps({"symbol": "di_linear"}))
    assert same_kernels.main([str(tmp_path / "all.json"), str(good)]) == 0
    assert same_kernels.main([str(tmp_path / "all.json"), str(good), str(bad)]) == 1
    assert capsys.readouterr().out.splitlines()[1:] == [
        f"{good}: the same build, 1 symbols that passed", f"{bad}: it tells no build",
    ]  # fmt: skip


STORED = [path for path in sorted((ROOT / "reports/h200").glob("*.json")) if path.stem != "ranks"]
"""ranks.json, which takes two GPUs, is older than its tool's telling the build."""


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_every_stored_report_of_the_h200_is_of_the_kernels_that_conformance_ran(path):
    conformance = json.loads((ROOT / "reports/hal-cuda-full.json").read_text(encoding="utf-8"))
    assert same_kernels.differences(conformance, json.loads(path.read_text(encoding="utf-8"))) == []
