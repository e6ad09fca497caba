"""An estimate as a dictionary for JSON and as text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from deepinfer_hal.card import get_card

from deepinfer_ascend import twin
from deepinfer_ascend.estimate import costs
from deepinfer_ascend.estimate.chips import Chip
from deepinfer_ascend.estimate.problems import Problem
from deepinfer_ascend.estimate.replay import Replay, replay

_CUBE_PIPES, _VECTOR_PIPES = ("M", "MTE1", "MTE2", "FIX", "S"), ("V", "MTE2", "MTE3", "S")


def record(problem: Problem, seed: int = 1) -> tuple[twin.Trace, dict[str, Any]]:
    """Runs a problem on the twin and gives its trace and its arguments. BackendError when the kernel breaks a rule."""
    args = problem.arguments()
    stream = twin.module().Stream(soc="Ascend950DT_9581", cores=problem.cores, seed=seed, trace=True)
    twin.bind(get_card(problem.op))(**args, stream=stream)
    return twin.take_trace(stream), args


def estimate(problem: Problem, chip: Chip, sensitivity: bool = True, timeline: Path | None = None) -> dict[str, Any]:
    """Everything known about one problem on one chip; all times and shares are estimates. timeline: where to write one."""
    trace, args = record(problem)
    result = summarise(trace, chip, problem.cores)
    if timeline is not None:
        timeline.write_text(json.dumps(events(trace, chip, problem.cores)))
    cost = get_card(problem.op).cost(args)
    us = result["time_us"]
    bytes_us = cost.bytes / (chip.hbm_bytes_s * problem.cores / chip.cores) * 1e6
    cube_us = cost.flops / chip.peak_flops(problem.peak, problem.cores) * 1e6
    result = {
        "what": "estimate",
        "op": problem.op,
        "shape": problem.shape,
        "case": dict(problem.case.params),
        "chip": chip.name,
        "cores": problem.cores,
        "cut": problem.cut,
        **result,
        "needed_bytes": cost.bytes,
        "flops": cost.flops,
        "bound_bytes_us": bytes_us,
        "bound_cube_us": cube_us,
        "peak_of": problem.peak,
        "share_of_peak": cube_us / us if us else 0.0,
        "times_bytes_bound": us / bytes_us if bytes_us else 0.0,
    }
    if sensitivity:
        result["sensitivity"] = sensitivities(trace, chip, problem.cores, us)
    return result


def summarise(trace: twin.Trace, chip: Chip, cores: int) -> dict[str, Any]:
    """Time, shares of pipes, bytes and the longest chain of one trace."""
    r = replay(trace, chip, cores)
    cycles = r.cycles or 1.0
    busy = {
        "cube core": _shares(r, 0, _CUBE_PIPES, cycles),
        "vector cores": _shares(r, 1, _VECTOR_PIPES, cycles),
    }
    memory = {
        "HBM": r.hbm_bytes / (chip.shared_bytes_a_cycle(chip.hbm_bytes_s, cores) * cycles),
        "L2": r.l2_bytes / (chip.shared_bytes_a_cycle(chip.l2_bytes_s, cores) * cycles),
    }
    chain = _chain(r, cycles)
    by_pipe = sorted(chain["by_pipe"].items(), key=lambda item: -item[1])
    return {
        "time_us": r.cycles / chip.hertz * 1e6,
        "time_us_with_chains": replay(trace, chip, cores, chains=True).cycles / chip.hertz * 1e6,
        "launches": [
            {"kernel": name, "us": c / chip.hertz * 1e6} for name, c in zip(trace.kernels, r.launch_cycles, strict=False)
        ],
        "launch_us_apart": len(r.launch_cycles) * costs.values()["launch_us"],
        "busy": busy,
        "bandwidth": memory,
        "binds": by_pipe[0][0] if by_pipe else "nothing",
        "chain": chain["by_pipe"],
        "chain_sites": _sites(trace, r, cycles),
        "hbm_bytes": r.hbm_bytes,
        "l2_bytes": r.l2_bytes,
        "flops_issued": 2 * int(trace.rows["work"][_products(trace)].sum()),
        "moved": _moved(trace),
        "rows": len(trace.rows),
    }


def _products(trace: twin.Trace) -> np.ndarray:
    return np.isin(trace.rows["op"], [trace.ops.index("Mmad"), trace.ops.index("MmadMx")])


def events(trace: twin.Trace, chip: Chip, cores: int) -> dict[str, Any]:
    """The replay of the first cube core and its vector cores in the trace event format of browsers; times in microseconds."""
    r = replay(trace, chip, cores)
    starts = np.concatenate(([0.0], np.cumsum(r.launch_cycles)))
    found = []
    for i in np.flatnonzero(r.rows["core"] < 3):
        row, begun, ended = r.rows[i], r.times["start"][i], r.times["end"][i]
        if ended <= begun:
            continue
        at = (starts[row["launch"] - r.rows["launch"][0]] + begun) / chip.hertz * 1e6
        found.append(
            {
                "name": trace.ops[row["op"]],
                "ph": "X",
                "ts": at,
                "dur": (ended - begun) / chip.hertz * 1e6,
                "pid": "estimate: " + ("cube core", "vector core 0", "vector core 1")[row["core"]],
                "tid": twin.PIPES[row["pipe"]],
                "args": {"site": _site(trace, row), "bytes": int(row["bytes"])},
            }
        )
    return {"traceEvents": found}


def _site(trace: twin.Trace, row: Any) -> str:
    return f"{trace.files[row['file']].rsplit('/', 1)[-1]}:{row['line']}"


def _shares(r: Replay, kind: int, pipes: tuple[str, ...], cycles: float) -> dict[str, float]:
    """Share of the time that a pipe had work, over the cores of one kind that had any."""
    vector = np.arange(r.active.shape[1]) % 3 != 0
    total = r.active.sum(0)[vector if kind else ~vector] if len(r.active) else np.zeros((0, 7))
    used = total[total.sum(1) > 0]
    if not len(used):
        return {}
    return {name: float(used[:, twin.PIPES.index(name)].mean() / cycles) for name in pipes}


def _where(row: Any) -> str:
    return f"{twin.PIPES[row['pipe']]} ({'vector' if row['core'] % 3 else 'cube'})"


def _chain(r: Replay, cycles: float) -> dict[str, dict[str, float]]:
    shares = {"issue": r.scalar_critical / cycles, "HBM and L2 bandwidth": r.bandwidth_critical / cycles}
    passed = np.flatnonzero(r.times["critical"] > 0)
    for i in passed:
        key = _where(r.rows[i])
        shares[key] = shares.get(key, 0.0) + float(r.times["critical"][i]) / cycles
    return {"by_pipe": {key: share for key, share in shares.items() if share > 0.001}}


def _sites(trace: twin.Trace, r: Replay, cycles: float, most: int = 12) -> list[dict[str, Any]]:
    """The places in the source where the longest chain spends its time."""
    found: dict[tuple[str, str, str], float] = {}
    for i in np.flatnonzero(r.times["critical"] > 0):
        row = r.rows[i]
        key = (_site(trace, row), trace.ops[row["op"]], _where(row))
        found[key] = found.get(key, 0.0) + float(r.times["critical"][i]) / cycles
    best = sorted(found.items(), key=lambda item: -item[1])[:most]
    return [{"site": site, "instruction": op, "pipe": pipe, "share": share} for (site, op, pipe), share in best]


def _moved(trace: twin.Trace) -> dict[str, int]:
    """Bytes by path, as the instructions name them."""
    rows = trace.rows
    copies = np.isin(rows["pipe"], [3, 4, 5, 6]) & (rows["bytes"] > 0)
    moved: dict[str, int] = {}
    for source, target in sorted({(int(a), int(b)) for a, b in zip(rows["from"][copies], rows["to"][copies], strict=True)}):
        mine = copies & (rows["from"] == source) & (rows["to"] == target)
        if source != target:
            moved[f"{twin.MEMORIES[source]} to {twin.MEMORIES[target]}"] = int(rows["bytes"][mine].sum(dtype=np.int64))
    return moved


def sensitivities(trace: twin.Trace, chip: Chip, cores: int, us: float) -> dict[str, list[float]]:
    """By class of costs: the change of the time when all its costs are 25 % lower, and 25 % higher."""
    table = {}
    for kind in costs.KINDS:
        table[kind] = [replay(trace, chip, cores, {kind: f}).cycles / chip.hertz * 1e6 / us - 1 for f in (0.75, 1.25)]
    return table


def as_text(e: dict[str, Any]) -> str:
    """A page for people."""
    lines = [
        f"estimate: {e['op']} {e['shape']} on {e['chip']}, {e['cores']} of 32 cores with their part of bandwidth and peak",
        f"  cut: {e['cut']}; nothing here was measured on a chip",
        f"  estimate of time        {e['time_us']:10.2f} us   in {len(e['launches'])} launches"
        f" (their cost of about {e['launch_us_apart']:.0f} us not included)",
        f"  with register chains    {e['time_us_with_chains']:10.2f} us   (estimate: vector functions last their longest chain)",
        f"  bound by bytes          {e['bound_bytes_us']:10.2f} us   {e['needed_bytes'] / 1e6:.2f} MB needed,"
        f" {e['hbm_bytes'] / 1e6:.2f} MB from HBM, {e['l2_bytes'] / 1e6:.2f} MB through L2",
        f"  bound by products       {e['bound_cube_us']:10.2f} us   {e['flops'] / 1e9:.3f} GFLOP at the {e['peak_of']} peak,"
        f" {e['flops_issued'] / 1e9:.3f} issued to the cube",
        f"  share of peak (estimate) {100 * e['share_of_peak']:8.1f} %    times the bytes bound: {e['times_bytes_bound']:.2f}",
        f"  what binds (estimate)    {e['binds']}",
    ]
    for kernel in e["launches"]:
        lines.append(f"    {kernel['kernel']:40s} {kernel['us']:10.2f} us")
    for core, shares in e["busy"].items():
        if shares:
            lines.append(f"  busy, {core}: " + ", ".join(f"{pipe} {100 * share:.0f} %" for pipe, share in shares.items()))
    lines.append("  bandwidth in use: " + ", ".join(f"{name} {100 * s:.0f} %" for name, s in e["bandwidth"].items()))
    lines.append("  moved: " + ", ".join(f"{path} {n / 1e6:.2f} MB" for path, n in e["moved"].items()))
    chain = sorted(e["chain"].items(), key=lambda item: -item[1])
    lines.append("  longest chain: " + ", ".join(f"{name} {100 * share:.0f} %" for name, share in chain))
    for site in e["chain_sites"]:
        lines.append(f"    {100 * site['share']:5.1f} %  {site['site']:34s} {site['instruction']:18s} {site['pipe']}")
    if "sensitivity" in e:
        lines.append("  sensitivity (estimate): change of the time when a class of costs is 25 % lower / higher")
        for kind, (low, high) in e["sensitivity"].items():
            lines.append(f"    {kind:14s} {100 * low:+6.1f} % / {100 * high:+6.1f} %")
    return "\n".join(lines)
