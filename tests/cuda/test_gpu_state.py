"""What the benchmarks make of nvidia-smi's samples of a GPU's clock and power, without a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "tools/cuda")]
import gpu_state  # noqa: E402

TOOL = """#!/bin/sh
echo "$@" > "{asked}"
echo "1980, 90.1, Not Active"
for clock in 1980 1590 1560 1575; do echo "$clock, 698.5, Active"; done
echo "1600, [N/A], Not Active"
exec sleep 60
"""


class Replays:
    """In place of a graph."""

    count = 0

    def replay(self) -> None:
        self.count += 1


@pytest.fixture
def board(monkeypatch, tmp_path):
    """A stand-in for nvidia-smi that lowers the clock from its second sample on, and for the GPU that it is asked of."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(TOOL.format(asked=tmp_path / "asked"))
    tool.chmod(0o755)
    monkeypatch.setattr(gpu_state.shutil, "which", lambda name: str(tool))
    monkeypatch.setattr(gpu_state, "captured", lambda run: Replays())
    monkeypatch.setattr(gpu_state.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(gpu_state.torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: type("Properties", (), {"uuid": "12-34"}))
    return tmp_path


def test_the_clock_that_power_holds_down_is_told_without_the_first_samples(board):
    assert gpu_state.state_while(lambda: None, seconds=0.2) == dict(sm_mhz=1575.0, watts=698.5, power_capped=1.0)
    assert "-i GPU-12-34 " in (board / "asked").read_text()


def test_samples_that_say_no_number_are_left_out():
    lines = ["1800, 500.0, Active", "1900, 300.0, Not Active", "[Unknown Error]", "", "1, [N/A], Active"]
    assert gpu_state.state_of(lines) == dict(sm_mhz=1850.0, watts=400.0, power_capped=0.5)
    assert gpu_state.state_of(["No devices were found"]) == {}


def test_without_the_tool_nothing_is_said_and_nothing_replayed(monkeypatch):
    monkeypatch.setattr(gpu_state.shutil, "which", lambda name: None)
    monkeypatch.setattr(gpu_state, "captured", lambda run: pytest.fail("a graph was made"))
    assert gpu_state.state_while(lambda: None) == {}
