"""Estimates: replays worked out by hand, what must make a kernel slower, sources of every cost, independence of the seed."""

from __future__ import annotations

import json

import numpy as np
import probes
import pytest
import torch
from deepinfer_ascend import twin
from deepinfer_ascend.estimate import CHIPS, costs, problems, replay, summarise
from deepinfer_ascend.estimate.__main__ import main, store
from deepinfer_hal.errors import BadCall

pytestmark = pytest.mark.skipif(probes.missing() is not None, reason=str(probes.missing()))

DT = CHIPS["950DT"]
MEMORY = dict(hbm_bytes=64, l2_bytes=128, hbm_latency=100, l2_latency=10, write_latency=20, line=128, in_flight=2)
NAMES = twin.module().ops() if twin.module() else []


def row(op, pipe, clock, *, core=0, source=None, work=0, extents=(0, 0)):
    """A row of a trace; source: core, pipe and clock that a wait waits for."""
    r = np.zeros((), twin.TRACE_ROW)
    r["op"], r["pipe"], r["clock"], r["core"], r["work"] = NAMES.index(op), twin.PIPES.index(pipe), clock, core, work
    r["first_extent"], r["extents"] = extents
    if source is not None:
        r["source_core"], r["source_pipe"], r["source_clock"] = source[0], twin.PIPES.index(source[1]), source[2]
    return r


def place(rows, cost, extents=(), **memory):
    """Replays hand-made rows: start and end of each, and the total."""
    runs = np.zeros(len(extents), twin.TRACE_EXTENT)
    for i, (tensor, offset, size, use) in enumerate(extents):
        runs[i] = (offset, size, tensor, use)
    out = twin.module().replay(
        np.array(rows, twin.TRACE_ROW).tobytes(), runs.tobytes(), np.array(cost, float).tobytes(), {**MEMORY, **memory}
    )
    times = np.frombuffer(out["rows"]).reshape(-1, 3)
    return [tuple(t[:2]) for t in times], out["launch_cycles"][0], out


def pairs(serial):
    """Four tiles: a copy of 100 cycles, then 100 of arithmetic; serial: the next copy waits for the arithmetic."""
    rows, cost = [], []
    for i in range(4):
        if serial and i:
            rows.append(row("Wait", "MTE2", 10 * i, source=(0, "V", 10 * i - 5)))
            cost.append((0, 0, 0))
        rows += [row("DataCopy", "MTE2", 10 * i + 1), row("Wait", "V", 10 * i + 1, source=(0, "MTE2", 10 * i + 1))]
        rows.append(row("Add", "V", 10 * i + 5))
        cost += [(100, 0, 0), (0, 0, 0), (100, 0, 0)]
    return rows, cost


def test_full_serialisation_takes_the_sum_and_perfect_overlap_the_longer_pipe():
    assert place(*pairs(serial=True))[1] == 800
    assert place(*pairs(serial=False))[1] == 500


def test_the_scalar_unit_issues_in_order_and_waits_hold_it():
    rows = [row("Add", "V", 1), row("Wait", "S", 1, source=(0, "V", 1)), row("DataCopy", "MTE2", 1)]
    times, total, _ = place(rows, [(50, 5, 8), (2, 0, 0), (10, 0, 8)])
    assert times == [(8, 63), (63, 65), (73, 83)]
    assert total == 83


def test_a_barrier_waits_for_effects_and_a_pipe_alone_does_not():
    rows = [row("Mmad", "M", 1), row("Mmad", "M", 2)]
    assert place(rows, [(10, 30, 0)] * 2)[0][1] == (10, 50)
    between = [rows[0], row("PipeBarrier", "M", 2, work=2), row("Mmad", "M", 3)]
    assert place(between, [(10, 30, 0), (4, 0, 0), (10, 30, 0)])[0][2] == (44, 84)
    everything = [rows[0], row("Add", "V", 1), row("PipeBarrier", "S", 1, work=15), row("Add", "V", 2)]
    assert place(everything, [(10, 30, 0), (5, 0, 0), (0, 0, 0), (5, 0, 0)])[0][3] == (40, 45)


def test_cores_share_bandwidth_and_what_was_touched_comes_from_l2():
    far = [(0, 0, 12800, 0), (0, 12800, 12800, 0), (0, 0, 12800, 0)]
    rows = [row("DataCopy", "MTE2", 1, core=core, extents=(i, 1)) for i, core in enumerate((0, 3))]
    times, total, out = place(rows, [(100, 0, 0)] * 2, far)
    assert times == [(0, 200 + 100), (0, 400 + 100)]  # 12800 bytes at 64 a cycle, one after the other, then the latency
    assert out["hbm_bytes"] == 25600
    again = [*rows[:1], row("DataCopy", "MTE2", 2, core=0, extents=(2, 1))]
    times, _, out = place(again, [(100, 0, 0)] * 2, far)
    assert times[1] == (100, 300)  # done by 210 of its own, but copies of a pipe end in order
    assert out["hbm_bytes"] == 12800 and out["l2_bytes"] == 25600


def test_a_pipe_keeps_so_many_copies_under_way():
    runs = [(0, 128 * i, 128, 0) for i in range(4)]
    rows = [row("DataCopy", "MTE2", 1 + i, extents=(i, 1)) for i in range(4)]
    cost = [(1, 0, 0)] * 4
    assert [start for start, _ in place(rows, cost, runs, in_flight=2)[0]] == [0, 1, 102, 104]
    assert [start for start, _ in place(rows, cost, runs, in_flight=16)[0]] == [0, 1, 2, 3]


def test_a_round_of_cores_waits_for_the_last():
    rows = [
        row("CrossCoreSetFlag", "MTE3", 1, core=1), row("Arrive", "MTE3", 1, core=1, work=7),
        row("Await", "S", 1, core=1, work=7), row("Add", "V", 1, core=1),
        row("Add", "V", 1, core=2), row("CrossCoreSetFlag", "V", 2, core=2), row("Arrive", "V", 2, core=2, work=7),
    ]  # fmt: skip
    cost = [(0, 60, 0), (0, 0, 0), (0, 0, 0), (5, 0, 0), (100, 0, 0), (0, 60, 0), (0, 0, 0)]
    assert place(rows, cost)[0][3] == (160, 165)


def test_all_cores_go_on_together_after_syncall():
    """Rows as the twin records them: the barrier takes in every pipe, and its wait has the clock of the arrival."""
    rows = []
    for core in (1, 2):
        rows += [row("Add", "V", 1, core=core), row("SyncAll", "S", 1, core=core, work=15)]
        rows += [row("Arrive", "S", 1, core=core, work=3), row("Await", "S", 1, core=core, work=3)]
        rows.append(row("Add", "V", 2, core=core))
    cost = [(10, 0, 0), (2, 50, 0), (0, 0, 0), (0, 0, 0), (10, 0, 0)] + [(40, 0, 0), (2, 50, 0), *[(0, 0, 0)] * 2, (10, 0, 0)]
    times = place(rows, cost)[0]
    assert times[4] == times[9] == (92, 102)


@pytest.mark.parametrize("which", [0, 1, 4, 5, 6], ids=["SyncAll", "mode-0", "mode-1", "mode-2", "mode-4"])
def test_flags_of_every_mode_can_be_replayed(which):
    stream = twin.module().Stream(soc=DT.soc, cores=4, trace=True)
    x, y = torch.zeros(8, dtype=torch.int32), torch.zeros(4096, dtype=torch.int32)
    kernel = twin.module().bind("probe_sync", "ttiii", ["x", "y", "which", "blocks", "rounds"])
    kernel(x, y, which, 4, 3, stream=stream)
    assert 0.5 < replay(twin.take_trace(stream), DT, 4).cycles / DT.hertz * 1e6 < 100


def test_a_trace_that_waits_for_what_never_comes_is_refused():
    rows = [row("Wait", "V", 1, source=(0, "M", 9)), row("Add", "V", 2), row("Wait", "M", 3, source=(0, "V", 2))]
    with pytest.raises(RuntimeError, match="never ends"):
        place(rows, [(0, 0, 0)] * 3)


def traced(which, *sizes, seed=1, blocks=4):
    """A trace of the probe: 0 a stream of floats, 1 a product."""
    x = torch.ones(1 << 20, dtype=torch.float32 if which == 0 else torch.bfloat16)
    y = torch.zeros(1 << 19)
    stream = twin.module().Stream(soc=DT.soc, cores=4, seed=seed, trace=True)
    names = ["x", "y", "which", "blocks", "a", "b", "c", "d"]
    twin.module().bind("probe_estimate", "ttiiiiii", names)(x, y, which, blocks, *sizes, stream=stream)
    return twin.take_trace(stream), y


def microseconds(*arguments, **more):
    return replay(traced(*arguments, **more)[0], DT, 4).cycles / DT.hertz * 1e6


def test_the_probes_compute_what_they_say():
    assert (traced(0, 65536, 8192, 2, 3)[1][: 4 * 65536] == 2).all()
    assert (traced(1, 128, 1024, 128, 2)[1][: 4 * 128 * 128] == 1024).all()


@pytest.mark.parametrize("passes", [1, 6])
def test_one_buffer_is_slower_than_two_on_a_vector_core(passes):
    assert microseconds(0, 65536, 4096, 1, passes) > 1.2 * microseconds(0, 65536, 4096, 2, passes)


def test_half_a_tile_is_slower_on_a_vector_core():
    times = [microseconds(0, 65536, tile, 2, 4) for tile in (4096, 2048, 1024, 512)]
    assert all(b > 1.03 * a for a, b in zip(times, times[1:], strict=False))


def test_one_buffer_is_slower_than_two_on_a_cube_core():
    assert microseconds(1, 128, 2048, 128, 1) > 1.2 * microseconds(1, 128, 2048, 128, 2)


def test_half_a_tile_is_slower_on_a_cube_core():
    times = [microseconds(1, 128, 2048, tile, 1) for tile in (128, 64, 32)]
    assert all(b > 1.03 * a for a, b in zip(times, times[1:], strict=False))


def test_a_large_product_comes_near_the_peak():
    trace, _ = traced(1, 256, 2048, 64, 2)
    shares = summarise(trace, DT, 4)["busy"]["cube core"]
    peak = 2 * 256 * 256 * 2048 / DT.peak_flops("bf16", 1) * DT.hertz / replay(trace, DT, 4).cycles
    assert 0.5 < peak <= shares["M"] <= 1
    assert summarise(trace, DT, 4)["flops_issued"] == 4 * 2 * 256 * 256 * 2048


def test_estimates_do_not_depend_on_the_seed_and_repeat():
    first = summarise(traced(0, 65536, 4096, 2, 2, blocks=8)[0], DT, 4)
    for seed in (1, 7, 99):
        assert summarise(traced(0, 65536, 4096, 2, 2, blocks=8, seed=seed)[0], DT, 4) == first


def test_chains_of_registers_are_a_bound():
    """A load, an addition and a store of each of 256 pieces do not wait for each other; a long chain would bind."""
    stream = twin.module().Stream(soc=DT.soc, cores=1, trace=True)
    names = ["x", "kind", "rounds", "a", "b", "c", "blocks"]
    twin.module().bind("probe_bench", "tiiiiii", names)(torch.ones(8), 3, 2, 0, 0, 0, 1, stream=stream)
    trace = twin.take_trace(stream)
    functions = trace.rows["op"] == NAMES.index("VectorFunction")
    assert trace.rows["bytes"][functions].tolist() == [9 + 7 + 9] * 2
    assert trace.rows["count"][trace.rows["op"] == NAMES.index("LoadAlign")].sum() == 2 * 2 * 256
    base = replay(trace, DT, 1)
    assert replay(trace, DT, 1, chains=True).cycles == base.cycles
    rows = trace.rows.copy()
    rows["bytes"][functions] = 10_000
    longer = twin.Trace(rows, trace.extents, trace.ops, trace.kernels, trace.files)
    assert replay(longer, DT, 1, chains=True).cycles > base.cycles + 15_000


def test_slower_memory_is_slower_and_no_class_of_costs_makes_it_faster():
    trace, _ = traced(0, 65536, 8192, 2, 1)
    base = replay(trace, DT, 4).cycles
    assert replay(trace, CHIPS["950PR"], 4).cycles > 1.3 * base
    for kind in costs.KINDS:
        assert replay(trace, DT, 4, {kind: 1.25}).cycles >= base >= replay(trace, DT, 4, {kind: 0.75}).cycles


def test_every_cost_has_a_source():
    assert len({entry.name for entry in costs.TABLE}) == len(costs.TABLE)
    for entry in costs.TABLE:
        published = any(mark in entry.source for mark in (costs.ARCH, costs.PTO, costs.PTO_A2, costs.PUBLIC_KERNEL))
        assert published or entry.source.startswith("assumed"), entry


def test_every_instruction_is_priced():
    rows = np.zeros(len(NAMES), twin.TRACE_ROW)
    rows["op"] = np.arange(len(NAMES))
    rows["pipe"] = 1
    rows["work"] = rows["bytes"] = 256
    assert (costs.price(rows, NAMES, costs.values()).sum(1) > 0).all()


def test_named_shapes_are_drawn_and_unknown_ones_named():
    assert [p.shape for p in problems("sparse_attention")][:3] == ["decode", "decode-window", "prefill"]
    with pytest.raises(BadCall, match="no sheet of a chip"):
        from deepinfer_ascend.estimate import find_chip

        find_chip("960")
    with pytest.raises(BadCall, match="grouped_gemm has no shape 'x'; there are 4-tokens"):
        from deepinfer_ascend.estimate import find_problem

        find_problem("grouped_gemm", "x")


def test_the_command_prints_an_estimate_and_stores_it(tmp_path, capsys):
    target = tmp_path / "estimate.json"
    timeline = tmp_path / "timeline.json"
    assert main(["--op", "rms_norm", "--shape", "attn_norm-16", "--json", str(target), "--timeline", str(timeline)]) == 0
    shown = json.loads(timeline.read_text())["traceEvents"]
    assert {event["tid"] for event in shown} >= {"V", "MTE2", "MTE3"} and all(event["dur"] > 0 for event in shown)
    text = capsys.readouterr().out
    assert text.startswith("estimate: rms_norm attn_norm-16") and "sensitivity (estimate)" in text
    (stored,) = json.loads(target.read_text())["estimates"]
    assert stored["what"] == "estimate" and str(target) in stored["command"] and stored["time_us"] > 0
    store(target, [{**stored, "chip": "other"}], "again")
    assert len(json.loads(target.read_text())["estimates"]) == 2
