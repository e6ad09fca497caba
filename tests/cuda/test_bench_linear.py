"""What the benchmark of the dense projections keeps when it ends before its last size, without a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / part) for part in ("tools", "tools/cuda")]
import bench_linear  # noqa: E402


@pytest.fixture
def clock(monkeypatch):
    """A stand-in for the GPU, on which each size takes ten seconds and the head of 4096 rows ends the tool."""
    now = [bench_linear.START]

    def measure(library, shape, rows, with_torch):
        if (shape, rows) == ("head", 4096):
            raise KeyboardInterrupt
        now[0] += 10
        theirs = (60.0, 0.83) if with_torch else (None, None)
        return bench_linear.Row(shape, rows, 50.0, 10.0, 2.0, *theirs, least_us=4.9, calls=40, kernels={"k": 50.0})

    monkeypatch.setattr(bench_linear, "require_gpu", lambda: None)
    monkeypatch.setattr(bench_linear, "measure", measure)
    monkeypatch.setattr(bench_linear, "ceilings", lambda: {"copy_tb_per_s": 4.0})
    monkeypatch.setattr(bench_linear, "CLibrary", lambda *given, **named: None)
    monkeypatch.setattr(bench_linear.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(bench_linear.torch.cuda, "get_device_name", lambda: "stand-in")
    empty = torch.empty
    monkeypatch.setattr(bench_linear.torch, "empty", lambda *shape, dtype, device: empty(*shape, dtype=dtype))


def run(monkeypatch, tmp_path, *options):
    report = tmp_path / "linear.json"
    given = ["bench_linear.py", "--library", "none.so", "--json", str(report), "--shapes", "router", "head", *options]
    monkeypatch.setattr(sys, "argv", given)
    return report, bench_linear.main


def test_sizes_measured_before_the_tool_is_ended_are_stored(clock, monkeypatch, tmp_path, capsys):
    report, main = run(monkeypatch, tmp_path, "--rows", "64", "4096")
    with pytest.raises(KeyboardInterrupt):
        main()
    stored = json.loads(report.read_text())
    assert [(row["shape"], row["rows"]) for row in stored["rows"]] == [("router", 64), ("head", 64), ("router", 4096)]
    assert stored["symbols"] == {"linear": "di_linear"} and {"cuda c++ kernels", "triton kernels"} <= set(stored["build"])
    assert len(stored["suite"]["source_sha256"]) == 64 and "python" in stored["host"]
    assert stored["ceilings"] == {"copy_tb_per_s": 4.0} and stored["device"]["name"] == "stand-in" and stored["left_out"] == []
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 3 and shown[0].startswith("router    64 rows") and shown[0].endswith("torch    60.0 us, ratio 0.83")


def test_sizes_that_have_not_begun_in_time_are_left_out_and_named(clock, monkeypatch, tmp_path, capsys):
    report, main = run(monkeypatch, tmp_path, "--rows", "64", "256", "4096", "--seconds", "25", "--no-torch")
    main()
    stored = json.loads(report.read_text())
    assert [(row["shape"], row["rows"]) for row in stored["rows"]] == [("router", 64), ("head", 64), ("router", 256)]
    assert stored["left_out"] == ["head 256 rows", "router 4096 rows", "head 4096 rows"]
    shown = capsys.readouterr().out
    assert "left out after 25.0 s: head 256 rows, router 4096 rows, head 4096 rows" in shown and "ratio" not in shown


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_tool_says_so(monkeypatch, tmp_path):
    _, main = run(monkeypatch, tmp_path)
    with pytest.raises(SystemExit, match="error: this times kernels on a GPU"):
        main()
