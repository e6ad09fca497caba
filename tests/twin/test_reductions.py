"""Reductions, comparisons, selections and gathers: the published examples, and numpy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import probes
import pytest
from deepinfer_hal.errors import BackendError
from probes import other

pytestmark = pytest.mark.skipif(probes.missing() is not None, reason=str(probes.missing()))


def floats(n, seed=0, kind=np.float32):
    return (np.random.default_rng(seed).standard_normal(n) * 4).astype(kind)


def tree(x: np.ndarray) -> np.ndarray:
    """Sums of neighbours, then sums of those, each rounded to the type."""
    while x.shape[-1] > 1:
        x = (x[..., ::2].astype(np.float32) + x[..., 1::2].astype(np.float32)).astype(x.dtype)
    return x[..., 0]


def padded(x: np.ndarray, to: int) -> np.ndarray:
    return np.concatenate([x, np.zeros(-len(x) % to, x.dtype)])


@pytest.mark.parametrize("n", [1, 5, 64, 100, 1000, 4096])
def test_sum_of_a_row_is_a_tree_within_and_over_repeats(n):
    x = floats(n)
    per_repeat = tree(padded(x, 64).reshape(-1, 64))
    width = 1 << (len(per_repeat) - 1).bit_length()
    expected = tree(np.concatenate([per_repeat, np.zeros(width - len(per_repeat), np.float32)]))
    assert other("ReduceSum", "float", x, x, np.zeros(8, np.float32), count=n)[0] == expected


@pytest.mark.parametrize("count", [8320, 288])
def test_published_sums_of_ones(count):
    x = np.ones(count, np.float16)
    assert other("ReduceSum", "half", x, x, np.zeros(16, np.float16), count=count)[0] == count


@pytest.mark.parametrize(("op", "best"), [("ReduceMax", np.argmax), ("ReduceMin", np.argmin)])
def test_extreme_of_a_row_with_its_first_index(op, best):
    x = np.round(floats(777, 3))
    got = other(op, "float", x, x, np.zeros(8, np.float32), mode=1, count=777)
    assert got[0] == x[best(x)]
    assert got.view(np.uint32)[1] == best(x)


ORDERS = {0: ("value", "index"), 1: ("index", "value"), 2: ("value",), 3: ("index",)}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("op", "best"), [("RepeatMax", np.argmax), ("RepeatMin", np.argmin)])
def test_extremes_of_repeats(op, best, order):
    x = np.round(floats(64 * 5, 4)).reshape(5, 64)
    lanes = 50
    got = other(
        op,
        "float",
        x.reshape(-1),
        y=np.zeros(16, np.float32),
        mode=order,
        lanes=lanes,
        repeats=5,
        strides=(1, 1, 1, 1, 8, 8),
    )
    index = best(x[:, :lanes], axis=1)
    columns = {"value": x[np.arange(5), index].view(np.uint32), "index": index.astype(np.uint32)}
    expected = np.stack([columns[name] for name in ORDERS[order]], 1).reshape(-1)
    assert np.array_equal(got.view(np.uint32)[: len(expected)], expected)


def test_published_extreme_of_repeats():
    """11 at place 52, 12 at 100, 13 at 19, as halves whose bits are the index."""
    x = np.repeat(np.array([1, 2, 3], np.float16), 128).reshape(3, 128)
    x[0, 52], x[1, 100], x[2, 19] = 11, 12, 13
    got = other(
        "RepeatMax", "half", x.reshape(-1), y=np.zeros(16, np.float16), lanes=128, repeats=3, strides=(1, 1, 1, 1, 8, 8)
    )
    assert got[:6:2].tolist() == [11, 12, 13]
    assert got.view(np.uint16)[1:6:2].tolist() == [52, 100, 19]


def test_sums_of_repeats_and_blocks():
    x = floats(64 * 3, 5)
    strides = (1, 1, 1, 1, 8, 8)
    got = other("RepeatSum", "float", x, y=np.zeros(8, np.float32), lanes=64, repeats=3, strides=strides)
    assert np.array_equal(got[:3], tree(x.reshape(3, 64)))
    got = other("BlockSum", "float", x, y=np.zeros(24, np.float32), lanes=64, repeats=3, strides=strides)
    assert np.array_equal(got, tree(x.reshape(24, 8)))


def test_published_blocks():
    x = np.ones((8, 16), np.float16)
    x[0, 10], x[1, 13], x[7, 3] = 2, 3, 4
    got = other("BlockMax", "half", x.reshape(-1), y=np.zeros(16, np.float16), lanes=128, strides=(1, 1, 1, 1, 8, 8))
    assert got[:8].tolist() == [2, 3, 1, 1, 1, 1, 1, 4]
    ramp = np.repeat(np.arange(1, 9), 16).astype(np.float16)
    got = other("BlockSum", "half", ramp, y=np.zeros(16, np.float16), lanes=128, strides=(1, 1, 1, 1, 8, 8))
    assert got[:8].tolist() == [16 * i for i in range(1, 9)]


def test_brcb_spreads_eight_elements_over_eight_blocks():
    x = floats(16, 6)
    got = other("Brcb", "float", x, y=np.zeros(128, np.float32), repeats=2)
    assert np.array_equal(got, np.repeat(x, 8))
    x = np.arange(1, 17, dtype=np.float16)  # the page's example
    assert np.array_equal(other("Brcb", "half", x, y=np.zeros(256, np.float16), repeats=2), np.repeat(x, 16))


MODES = [np.less, np.greater, np.equal, np.less_equal, np.greater_equal, np.not_equal]


@pytest.mark.parametrize("mode", range(6), ids=[f.__name__ for f in MODES])
@pytest.mark.parametrize("dtype", ["float", "half", "int32_t", "bfloat16_t"])
def test_compare(dtype, mode):
    kind = probes.TYPES[dtype][1]
    a, b = (np.round(floats(256, s)).astype(kind) for s in (7, 8))
    got = other("Compare", dtype, a, b, np.zeros(32, np.uint8), mode=mode, count=256)
    assert np.array_equal(got, np.packbits(MODES[mode](a.astype(np.float32), b.astype(np.float32)), bitorder="little"))
    got = other("Compares", dtype, a, y=np.zeros(32, np.uint8), mode=mode, count=256, scalar=1)
    assert np.array_equal(got, np.packbits(MODES[mode](a.astype(np.float32), 1), bitorder="little"))


def test_published_comparison():
    a = np.tile(np.array([2, 3, 5, 7, 11, 13, 17, 19], np.float32), 8)
    b = np.tile(np.array([2, 4, 6, 8, 10, 12, 14, 16], np.float32), 8)
    results = {"greater": 240, "greater_equal": 241, "less_equal": 15, "equal": 1}
    for mode, f in enumerate(MODES):
        if f.__name__ in results:
            assert (
                other("Compare", "float", a, b, np.zeros(32, np.uint8), mode=mode, count=64)[0] == results[f.__name__]
            )


def test_masked_comparison_gives_zero_elsewhere():
    a, b = np.zeros(64, np.float32), np.ones(64, np.float32)
    got = other("Compare", "float", a, b, np.zeros(8, np.uint8), mode=0, lanes=28, strides=(1, 1, 1, 1, 8, 8))
    assert got.tolist() == [255, 255, 255, 15, 0, 0, 0, 0]


def test_comparison_takes_whole_repeats():
    with pytest.raises(BackendError, match="whole repeats of 256 bytes"):
        other("Compare", "float", floats(60), floats(60), np.zeros(32, np.uint8), count=60)


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_select(mode):
    bits = np.random.default_rng(9).integers(0, 256, 32).astype(np.uint8)
    a, b = floats(200, 10), floats(200, 11)
    x0 = np.zeros(32768 + 32, np.uint8)
    x0[:800], x0[32768:] = a.view(np.uint8), bits
    got = other("Select", "float", x0, b, np.zeros(200, np.float32), mode=mode, count=200, scalar=-1.5)
    chosen = np.unpackbits(bits, bitorder="little").astype(bool)
    chosen = np.tile(chosen[:64], 4)[:200] if mode == 0 else chosen[:200]
    assert np.array_equal(got, np.where(chosen, a, np.float32(-1.5) if mode == 1 else b))


def test_published_gather():
    x = np.arange(128).astype(np.float16)
    offsets = np.arange(254, -1, -2).astype(np.uint32)
    assert np.array_equal(other("Gather", "half", x, offsets, np.zeros(128, np.float16), count=128), x[::-1])


def test_gather_refuses_offsets_between_elements():
    with pytest.raises(BackendError, match="no multiple of 4"):
        other("Gather", "float", floats(64), np.full(8, 6, np.uint32), np.zeros(8, np.float32), count=8)


def test_published_gather_mask():
    x = np.arange(1, 257).astype(np.int32)
    got = other("GatherMask", "int32_t", x, y=np.zeros(128, np.int32), mode=2, repeats=4)
    assert np.array_equal(got, x[1::2])


def test_gather_mask_by_a_pattern():
    x = np.arange(140).astype(np.int16)
    pattern = np.full(16, 0x9999, np.uint16)
    source = np.zeros(200, np.int16)
    source[:64], source[64:128] = x[:64], x[64:128]
    got = other(
        "GatherMask",
        "int16_t",
        source,
        pattern,
        np.zeros(70, np.int16),
        lanes=70,
        repeats=2,
        strides=(1, 1, 1, 1, 4, 0),
    )
    keep = [i for i in range(70) if i % 4 in (0, 3)]
    assert np.array_equal(got[: 2 * len(keep)], np.concatenate([source[keep], source[[64 + i for i in keep]]]))


def test_index_vector():
    assert np.array_equal(
        other("Index", "int16_t", np.zeros(2, np.int16), y=np.zeros(128, np.int16), count=128), np.arange(128)
    )
    assert np.array_equal(
        other("Index", "float", np.zeros(2, np.float32), y=np.zeros(99, np.float32), count=99, scalar=5),
        5 + np.arange(99),
    )


def test_interleave_and_back():
    a, b = (floats(64, s, ml_dtypes.bfloat16) for s in (12, 13))
    mixed = other("Interleave", "bfloat16_t", a, b, np.zeros(128, ml_dtypes.bfloat16), count=64)
    assert np.array_equal(mixed, np.stack([a, b], 1).reshape(-1))
    assert np.array_equal(
        other("DeInterleave", "bfloat16_t", mixed[:64], mixed[64:], mixed.copy(), count=64), np.concatenate([a, b])
    )
