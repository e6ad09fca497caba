"""What an instruction costs: a table of named numbers, each with its source, and how rows of a trace are priced by it.

A source is a documentation page, a published figure, or the word `assumed` with the reason. Nothing was measured on a chip.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from deepinfer_ascend.estimate.chips import PUBLIC_KERNEL

ARCH = "page NPU architecture 351x"
PTO = "PTO ISA manual, A5 cycle counts"
PTO_A2 = "assumed as on A2/A3: PTO ISA manual"

F32, F16, BF16, I8, U8, E4M3, E5M2, E2M1X2 = 0, 1, 2, 7, 8, 11, 12, 13  # the twin's type numbers


@dataclass(frozen=True)
class Entry:
    """One number of the table. kind: the class that the sensitivity table scales as a whole."""

    name: str
    kind: str
    value: float
    unit: str
    source: str


TABLE = (
    Entry("cube_start", "cube", 8, "cycles a product", "assumed: filling the array once"),
    Entry("cube_drain", "latency", 16, "cycles", "assumed: page Mmad asks for a barrier below 10 blocks of 16 x 16"),
    Entry("mte1_rate", "mte1", 256, "bytes a cycle", ARCH),
    Entry("mte1_start", "mte1", 8, "cycles a copy", "assumed"),
    Entry("mte1_latency", "latency", 24, "cycles", "assumed"),
    Entry("mte2_rate", "mte2", 128, "bytes a cycle a core", f"assumed: as L1 to UB ({ARCH}); L2's 5 TB/s are 95 a cube core"),
    Entry("mte2_start", "mte2", 12, "cycles a copy", "assumed"),
    Entry("mte2_burst", "mte2", 4, "cycles a further burst", "assumed: a new address each"),
    Entry("mte2_nz_row", "mte2", 2, "cycles a row turned to NZ", "assumed: a row is one access"),
    Entry("mte3_rate", "mte3", 128, "bytes a cycle", f"UB to L1: {ARCH}; UB to global memory assumed the same"),
    Entry("mte3_start", "mte3", 12, "cycles a copy", "assumed"),
    Entry("mte3_burst", "mte3", 4, "cycles a further burst", "assumed"),
    Entry("mte3_latency", "latency", 32, "cycles inside the core", "assumed"),
    Entry("fix_rate", "fix", 128, "bytes a cycle", f"{ARCH}; {PUBLIC_KERNEL}; counted in the accumulator's 4 bytes (assumed)"),
    Entry("fix_start", "fix", 16, "cycles a move", "assumed"),
    Entry("fix_latency", "latency", 32, "cycles", "assumed"),
    Entry("vector_rate", "vector", 256, "bytes a cycle", ARCH),
    Entry("vector_start", "vector start", 14, "cycles a function or instruction", f"{PTO_A2}, start of binary operations"),
    Entry("vector_drain", "vector start", 26, "cycles until its stores have landed", f"{PTO}: load 9, operation 7 or 8, store 9"),
    Entry("vector_ports", "multiple", 2, "accesses of UB a cycle", f"{PTO}: two loads, or a load and a store, in one cycle"),
    Entry("transcendental_32", "multiple", 2, "cycles for 256 bytes", f"{PTO_A2}: exp, ln, sqrt, and division (assumed alike)"),
    Entry("transcendental_16", "multiple", 4, "cycles for 256 bytes", f"{PTO_A2}: exp, ln, sqrt in half precision"),
    Entry("gather", "multiple", 8, "cycles for 256 bytes", "assumed: 8 banks of UB, 64 addresses"),
    Entry("reduce_drain", "vector start", 38, "cycles a reduction over a tensor", f"{PTO}: 19 for each of two levels"),
    Entry("local_barrier", "vector", 18, "cycles", f"{PTO}: a store and a load one after the other"),
    Entry("issue", "scalar", 8, "cycles to issue an instruction", "assumed: addresses and parameters"),
    Entry("issue_flag", "scalar", 2, "cycles to issue a flag or queue step", "assumed"),
    Entry("scalar_access", "scalar", 20, "cycles for GetValue or SetValue", "assumed"),
    Entry("barrier", "scalar", 4, "cycles of a PipeBarrier", "assumed"),
    Entry("cross_flag", "sync", 60, "cycles between cores of a group", "assumed"),
    Entry("sync_all", "sync", 800, "cycles of a SyncAll or flag of mode 0", "assumed: half a microsecond"),
    Entry("hbm_latency", "latency", 800, "cycles from HBM", "assumed: half a microsecond"),
    Entry("l2_latency", "latency", 350, "cycles from L2", "assumed"),
    Entry("write_latency", "latency", 350, "cycles until a write is visible", "assumed"),
    Entry("line", "memory", 128, "bytes", f"granularity of SIMT accesses ({ARCH}), assumed for copies"),
    Entry("in_flight", "memory", 16, "copies under way on a pipe", f"MTE2 of a vector core: {PUBLIC_KERNEL}; assumed elsewhere"),
    Entry("launch_us", "launch", 2.0, "microseconds a launch", "assumed; reported apart, not part of the time"),
)
KINDS = ("cube", "mte1", "mte2", "mte3", "fix", "vector", "vector start", "scalar", "sync", "latency", "hbm", "l2")
"""Classes of the sensitivity table; entries of kind `multiple` count vector_rate's cycles and move with them. hbm and l2 are
the bandwidths of the chip's sheet."""

_RATES = {"mte1_rate", "mte2_rate", "mte3_rate", "fix_rate", "vector_rate"}
_TRANSCENDENTAL = ("Exp", "Ln", "Sqrt", "Rsqrt", "Reciprocal", "Div", "RegExp", "RegLn", "RegSqrt", "RegDiv")
_TWO_SOURCES = ("Add", "Sub", "Mul", "Div", "Max", "Min", "And", "Or", "Xor", "MulAddDst", "Compare", "Select", "Axpy")
_FLAGS = ("SetFlag", "Wait", "Await", "EnQue", "FreeTensor", "CrossCoreSetFlag")
_LOADS, _STORES = ("LoadAlign", "LoadUnAlign"), ("StoreAlign", "StoreUnAlign")
_MACS = {F32: 256, I8: 8192, U8: 8192, E4M3: 8192, E5M2: 8192, E2M1X2: 16384}


def values(scale: Mapping[str, float] | None = None) -> dict[str, float]:
    """The table by name. scale: a factor on the time of every entry of a class, e.g. {"cube": 1.25}."""
    scale = scale or {}
    return {
        e.name: e.value / scale.get(e.kind, 1.0) if e.name in _RATES else e.value * scale.get(e.kind, 1.0) for e in TABLE
    }


def price(rows: np.ndarray, ops: list[str], v: Mapping[str, float], cube_scale: float = 1.0) -> np.ndarray:
    """float64 [n, 3] cycles (busy, latency, issue) of rows whose vector functions were folded (see replay.fold)."""
    at = {name: i for i, name in enumerate(ops)}
    op, pipe, bytes_ = rows["op"], rows["pipe"], rows["bytes"].astype(float)
    work = rows["work"].astype(float)
    cost = np.zeros((len(rows), 3))
    busy, latency, issue = cost.T

    def pick(*names: str) -> np.ndarray:
        return np.isin(op, [at[name] for name in names])

    issue[:] = v["issue"]
    issue[pick(*_FLAGS)] = v["issue_flag"]
    scalar = pipe == 0
    issue[scalar] = 0
    busy[scalar] = v["issue_flag"]
    busy[pick("GetValue", "SetValue", "GlobalGetValue", "GlobalSetValue")] = v["scalar_access"]
    busy[pick("PipeBarrier")] = v["barrier"]
    latency[pick("CrossCoreSetFlag")] = v["cross_flag"]
    latency[pick("CrossCoreSetFlag") & (rows["bytes"] == 0)] = v["sync_all"]  # mode 0: all cores
    latency[pick("SyncAll")] = v["sync_all"]
    moved = ~pick(*_FLAGS, "PipeBarrier", "SyncAll")
    _price_products(rows, pick("Mmad", "MmadMx"), busy, latency, v, cube_scale)
    for number, name in ((3, "mte1"), (4, "mte2"), (5, "mte3"), (6, "fix")):
        mine = moved & (pipe == number)
        size = np.where(pick("Fixpipe"), 4 * work, bytes_)
        busy[mine] = v[f"{name}_start"] + size[mine] / v[f"{name}_rate"]
        latency[mine] = v.get(f"{name}_latency", 0.0)
        if name in ("mte2", "mte3"):
            further = np.maximum(work - 1, 0) * v[f"{name}_burst"]
            busy[mine] += np.where(pick("Nd2Nz", "Dn2Nz"), work * v["mte2_nz_row"], further)[mine]
    latency[rows["extents"] > 0] = 0  # the shared memory's latency comes in the replay
    _price_vector(rows, pick, moved & (pipe == 1), busy, v)
    return cost


def _price_products(rows, mine, busy, latency, v, cube_scale) -> None:
    m, n, k = (np.ceil(rows[name][mine].astype(float) / 16) for name in ("m", "n", "k"))
    macs = np.array([_MACS.get(t, 4096) for t in range(16)], float)[rows["type"][mine] & 15]
    k_step = np.maximum(16, macs / 256)  # k of one cycle: 16, 32 or 64
    k = np.ceil(rows["k"][mine] / k_step) * k_step / 16
    busy[mine] = v["cube_start"] + cube_scale * m * n * k * 4096 / macs
    latency[mine] = v["cube_drain"]


def _price_vector(rows, pick, mine, busy, v) -> None:
    """Memory forms: each is a vector function of its own, whose stores must land before the next begins."""
    bytes_, lanes = rows["bytes"].astype(float), rows["work"].astype(float)
    wide = np.where(pick("Cast", "Compare", "Compares"), np.maximum(bytes_, 4 * lanes), bytes_)
    repeats = np.ceil(np.maximum(wide, 1) / 256) * 256 / v["vector_rate"]
    sources = np.where(pick(*_TWO_SOURCES), 2, np.where(pick("Duplicate", "CreateVecIndex"), 0, 1))
    ports = 1 + np.maximum(sources - 1, 0) / 2  # a store takes a port and lets one load pass beside it
    rate = np.maximum(1.0, ports * 2 / v["vector_ports"])
    narrow = bytes_ <= 2 * lanes
    slow = np.where(narrow, v["transcendental_16"], v["transcendental_32"])
    rate = np.where(pick(*_TRANSCENDENTAL), np.maximum(rate, slow), rate)
    rate = np.where(pick("Gather", "GatherMask"), v["gather"], rate)
    cycles = v["vector_start"] + v["vector_drain"] + repeats * rate
    cycles = cycles + np.where(pick("ReduceSum", "ReduceMax", "ReduceMin"), v["reduce_drain"], 0.0)
    memory = mine & ~pick("VectorFunction")
    busy[memory] = cycles[memory]
    function = mine & pick("VectorFunction")
    busy[function] = rows["work"][function]  # replay.fold has priced it


def price_registers(rows: np.ndarray, ops: list[str], v: Mapping[str, float]) -> dict[str, np.ndarray]:
    """Cycles of register instructions, by what they occupy: arithmetic, loads and stores (in accesses), barriers."""
    at = {name: i for i, name in enumerate(ops)}

    def pick(*names: str) -> np.ndarray:
        return np.isin(rows["op"], [at[name] for name in names])

    count = rows["count"].astype(float)
    narrow = rows["work"] > 64 * count
    loads, stores, barriers = pick(*_LOADS), pick(*_STORES), pick("LocalMemBar")
    slow = np.where(narrow, v["transcendental_16"], v["transcendental_32"])
    each = np.where(pick(*_TRANSCENDENTAL), slow, np.where(pick("RegGather"), v["gather"], 1.0))
    wide = np.where(rows["bytes"] > 256, 2.0, 1.0)
    return {
        "arithmetic": np.where(loads | stores | barriers, 0.0, count * each) * 256 / v["vector_rate"],
        "loads": np.where(loads, count * wide, 0.0) * 256 / v["vector_rate"],
        "stores": np.where(stores, count * wide, 0.0) * 256 / v["vector_rate"],
        "barriers": np.where(barriers, count * v["local_barrier"], 0.0),
    }
