"""Cores together: flags in every mode, barriers, atomics, padded copies, seeds, and what a trace holds."""

from __future__ import annotations

import numpy as np
import probes
import pytest
import torch
from deepinfer_ascend import twin
from deepinfer_hal.errors import BackendError

pytestmark = pytest.mark.skipif(probes.missing() is not None, reason=str(probes.missing()))


def run(which, blocks, rounds=0, items=4096, x=None, **stream):
    y = torch.zeros(items, dtype=torch.int32)
    kernel = twin.module().bind("probe_sync", "ttiii", ["x", "y", "which", "blocks", "rounds"])
    kernel(
        x if x is not None else torch.zeros(8, dtype=torch.int32), y, which, blocks, rounds, stream=stream_of(stream)
    )
    return y.numpy()


def stream_of(settings):
    return twin.module().Stream(**settings) if "stream" not in settings else settings["stream"]


@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("which", [0, 1], ids=["SyncAll", "mode-0"])
def test_a_ring_of_cores(which, seed):
    for blocks in (1, 2, 7, 72):
        y = run(which, blocks, rounds=5, seed=seed).reshape(-1, 8)
        assert np.array_equal(y[2 * blocks : 3 * blocks, 0], (np.arange(blocks) + 5) % blocks)


def test_more_blocks_than_cores_cannot_wait_for_each_other():
    with pytest.raises(BackendError, match="SyncAll at .*the launch has more blocks than cores"):
        run(0, 80, rounds=1)


@pytest.mark.parametrize("cores", [1, 3, 36])
def test_integer_atomics(cores):
    assert (run(2, 50, seed=cores, cores=cores)[:8] == 50 * 51 // 2).all()
    assert (run(3, 50, seed=cores, cores=cores)[:8] == 50).all()


@pytest.mark.parametrize("seed", range(1, 6))
def test_flags_inside_a_group(seed):
    for blocks in (1, 36):
        n = 2 * blocks
        for which, other in ((4, np.arange(n) ^ 1), (5, np.arange(n)), (6, (np.arange(n) + 3) % n)):
            y = run(which, blocks, seed=seed).reshape(-1, 8)
            assert np.array_equal(y[n : 2 * n, 0], other)


@pytest.mark.parametrize("rows", [1, 3, 50])
def test_padded_copies(rows):
    x = np.random.default_rng(rows).integers(0, 1000, rows * 7).astype(np.int32)
    y = run(7, 1, rounds=rows, x=torch.from_numpy(x))
    row = np.full((rows, 8), -9, np.int32)
    row[:, 1:6] = x.reshape(rows, 7)[:, :5]
    assert np.array_equal(y[: rows * 8].reshape(rows, 8), row)
    back = y[rows * 8 : rows * 15].reshape(rows, 7)
    assert np.array_equal(back[:, :6], row[:, :6])
    assert (back[:, 6] == 0).all()


def test_trace():
    stream = twin.module().Stream(seed=4, trace=True)
    run(0, 4, rounds=1, stream=stream)
    run(2, 2, stream=stream)
    trace = twin.take_trace(stream)
    rows, ops = trace.rows, trace.ops
    assert trace.kernels == ["ring_kernel", "atomic_kernel"]
    assert set(rows["launch"]) == {0, 1}
    copies = rows[(rows["op"] == ops.index("DataCopy")) & (rows["launch"] == 0)]
    assert sorted(set(copies["core"])) == [1, 2, 4, 5]
    assert {twin.PIPES[p] for p in copies["pipe"]} == {"MTE2", "MTE3"}
    assert (copies["bytes"] == 32).all()
    waits = rows[rows["op"] == ops.index("Await")]
    arrivals = rows[rows["op"] == ops.index("Arrive")]
    assert len(waits) and set(waits["work"]) == set(arrivals["work"])
    assert {name.rsplit("/", 1)[-1] for name in trace.files} >= {"probe_sync.asc"}
    for core in range(108):
        for pipe in range(7):
            clocks = rows["clock"][(rows["core"] == core) & (rows["pipe"] == pipe)].astype(int)
            assert (np.diff(clocks) >= 0).all()
    assert len(twin.take_trace(stream).rows) == 0
