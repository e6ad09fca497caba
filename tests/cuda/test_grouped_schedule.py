"""The expert products' schedule, which runs on the GPU, compiled for the host: every tile once, equal shares."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_every_tile_is_computed_once_and_shares_are_equal(tmp_path):
    program = tmp_path / "check"
    source = ROOT / "tests/cuda/grouped_schedule_check.cpp"
    subprocess.run(["c++", "-O1", "-std=c++17", "-I", str(ROOT / "kernels_cuda"), str(source), "-o", str(program)], check=True)
    ran = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, "covered\n")
