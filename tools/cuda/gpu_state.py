"""A GPU's clock and power while it does one thing: a board at its power limit lowers its clock, and every rate with it."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from graph_timing import captured

FIELDS = "clocks.sm", "power.draw.instant", "clocks_event_reasons.sw_power_cap"


def state_while(run: Callable[[], Any], seconds: float = 0.4) -> dict[str, float]:
    """Replays `run`'s graph for so long and says what nvidia-smi saw meanwhile: sm_mhz and watts, medians, and power_capped, the
    share of samples in which the power limit held the clock down. Empty where nvidia-smi is not there or says none of it."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    graph = captured(run)
    uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    query = [tool, "-i", uuid, f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits", "-lms", "20"]
    with subprocess.Popen(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as watch:
        try:
            watch.stdout.readline()  # it takes a while to start
            _replay(graph, seconds)
        finally:
            watch.terminate()
        lines = watch.stdout.read().splitlines()
    return state_of(lines[len(lines) // 4 :])  # the board takes a moment to lower its clock


def _replay(graph: Any, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(4):
            graph.replay()
        torch.cuda.synchronize()


def state_of(lines: Iterable[str]) -> dict[str, float]:
    """What samples of FIELDS say, a line each as nvidia-smi writes it; lines that are none are left out."""
    samples = []
    for line in lines:
        words = [word.strip() for word in line.split(",")]
        try:
            samples.append((float(words[0]), float(words[1]), float(words[2] == "Active")))
        except (ValueError, IndexError):
            continue
    if not samples:
        return {}
    clocks, watts, capped = zip(*samples, strict=True)
    return dict(
        sm_mhz=statistics.median(clocks), watts=round(statistics.median(watts), 1),
        power_capped=round(sum(capped) / len(capped), 2),
    )  # fmt: skip
