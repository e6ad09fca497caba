"""From a trace and a chip to times: folds vector functions, prices rows, and has the twin's replay place them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from deepinfer_hal.errors import BackendError

from deepinfer_ascend import twin
from deepinfer_ascend.estimate import costs
from deepinfer_ascend.estimate.chips import Chip

_PIPES = len(twin.PIPES)
_TIMES = np.dtype([("start", "f8"), ("end", "f8"), ("critical", "f8")])


@dataclass(frozen=True)
class Replay:
    """One replay. Times in cycles. rows: folded, sorted by launch and core; times: start, end and share of the longest chain
    of each; active [launches, cores, pipes]: cycles with work under way; critical: the longest chain's cycles by what held it."""

    rows: np.ndarray
    times: np.ndarray
    launch_cycles: tuple[float, ...]
    active: np.ndarray
    hbm_bytes: float
    l2_bytes: float
    scalar_critical: float
    bandwidth_critical: float

    @property
    def cycles(self) -> float:
        """All launches one after the other."""
        return sum(self.launch_cycles)


def in_order(rows: np.ndarray) -> np.ndarray:
    """Rows sorted by launch and core, in issue order within: the same for any seed of the twin's scheduler."""
    return rows[np.lexsort((rows["core"], rows["launch"]))]


def fold(rows: np.ndarray, ops: list[str], v: Mapping[str, float], chains: bool = False) -> np.ndarray:
    """One row for each vector function, whose `work` is its cycles: arithmetic and accesses of UB overlap, a start and a drain
    come on top. chains: it takes at least as long as its longest chain of registers. `rows` are in order."""
    register = twin.register_ops(ops)
    inside = np.isin(rows["op"], register)
    functions = rows["op"] == ops.index("VectorFunction")
    if not functions.any():
        return rows[~inside]
    number = np.cumsum(functions) - functions
    count = int(functions.sum())
    cycles = {
        name: np.bincount(number[inside], weights=part, minlength=count)[:count]
        for name, part in costs.price_registers(rows[inside], ops, v).items()
    }
    accesses = cycles["stores"] + np.maximum(cycles["loads"] - cycles["stores"], 0) / 2
    total = np.maximum(cycles["arithmetic"], accesses * 2 / v["vector_ports"]) + cycles["barriers"]
    rows = rows.copy()
    total = total + v["vector_drain"]
    if chains:
        total = np.maximum(total, rows["bytes"][functions])
    rows["work"][functions] = np.ceil(total + v["vector_start"]).astype(np.uint64)
    return rows[~inside]


def replay(
    trace: twin.Trace, chip: Chip, cores: int, scale: Mapping[str, float] | None = None, chains: bool = False
) -> Replay:
    """Replays a trace of `cores` cores, which get their part of the chip's HBM and L2.

    scale: factors on the cost of classes, see costs.KINDS. chains: see fold. Pure: the same trace gives the same times.
    BackendError for a trace that waits for what never ends.
    """
    scale = dict(scale or {})
    v = costs.values(scale)
    rows = fold(in_order(trace.rows), trace.ops, v, chains)
    priced = costs.price(rows, trace.ops, v, scale.get("cube", 1.0))
    memory = {
        "hbm_bytes": chip.shared_bytes_a_cycle(chip.hbm_bytes_s, cores) / scale.get("hbm", 1.0),
        "l2_bytes": chip.shared_bytes_a_cycle(chip.l2_bytes_s, cores) / scale.get("l2", 1.0),
        **{name: v[name] for name in ("hbm_latency", "l2_latency", "write_latency", "line", "in_flight")},
    }
    try:
        out = twin.module().replay(rows.tobytes(), trace.extents.tobytes(), priced.tobytes(), memory)
    except RuntimeError as error:
        raise BackendError(f"replay: {error}") from error
    launches = len(out["launch_cycles"])
    active = np.frombuffer(out["active"]).reshape(launches, -1, _PIPES) if launches else np.zeros((0, 0, _PIPES))
    return Replay(
        rows,
        np.frombuffer(out["rows"], _TIMES),
        tuple(out["launch_cycles"]),
        active,
        out["hbm_bytes"],
        out["l2_bytes"],
        sum(out["scalar_critical"]),
        sum(out["bandwidth_critical"]),
    )
