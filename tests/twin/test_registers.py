"""Register functions of the twin against numpy: how they load and store, masks, casts, reductions, rearrangements."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import probes
import pytest
from deepinfer_hal.errors import BackendError

pytestmark = pytest.mark.skipif(probes.missing() is not None, reason=str(probes.missing()))

RNG = np.random.default_rng(3)
BYTES = {1: np.uint8, 2: np.uint16, 4: np.float32}


def run(which, x0, x1=probes.EMPTY, y=None, count=0, dtype=None):
    """What y holds after register function number `which`."""
    y = np.full(4096, 0x5A, np.uint8) if y is None else y
    out = probes.tensor(y)
    kernel = probes.kernel("probe_reg", 3, 2, 0)
    kernel(probes.tensor(x0), probes.tensor(x1), out, which, count)
    return out.numpy().view(dtype or y.dtype)


def ramp(unit, n):
    """n items of `unit` bytes, none equal to its neighbours."""
    values = RNG.integers(1, 120, n * unit).astype(np.uint8)
    return values.view(BYTES[unit]) if unit != 4 else RNG.standard_normal(n).astype(np.float32)


def spread(x, step):
    """x with step - 1 zeros behind each item."""
    out = np.zeros(len(x) * step, x.dtype)
    out[::step] = x
    return out


LOADS = {
    0: (1, lambda x: x[:256]),
    1: (1, lambda x: np.repeat(x[:1], 256)),
    2: (2, lambda x: np.repeat(x[:1], 128)),
    3: (4, lambda x: np.repeat(x[:1], 64)),
    4: (1, lambda x: np.repeat(x[:128], 2)),
    5: (2, lambda x: np.repeat(x[:64], 2)),
    6: (1, lambda x: x[:512:2]),
    7: (2, lambda x: x[:256:2]),
    8: (1, lambda x: spread(x[:128], 2)),
    9: (2, lambda x: spread(x[:64], 2)),
    10: (4, lambda x: spread(x[:32], 2)),
    11: (1, lambda x: spread(x[:64], 4)),
    12: (4, lambda x: np.tile(x[:8], 8)),
    13: (2, lambda x: np.repeat(x[:8], 16)),
    14: (4, lambda x: np.repeat(x[:8], 8)),
}


@pytest.mark.parametrize("which", LOADS)
def test_loads(which):
    unit, expected = LOADS[which]
    x = ramp(unit, 512)
    assert np.array_equal(run(which, x, dtype=x.dtype)[: 256 // unit], expected(x))


STORES = {
    20: (4, lambda x, n: x[:n]),
    21: (1, lambda x, n: x[:n]),
    22: (2, lambda x, n: x[:1]),
    23: (2, lambda x, n: (x[:n] & 0xFF).astype(np.uint8)),
    24: (4, lambda x, n: x[:n].view(np.uint16)[::2]),
    25: (4, lambda x, n: x[:n].view(np.uint8)[::4]),
}


@pytest.mark.parametrize("count", [1, 7, 37, 64])
@pytest.mark.parametrize("which", STORES)
def test_stores(which, count):
    unit, expected = STORES[which]
    x = ramp(unit, 256 // unit)
    wanted = np.ascontiguousarray(expected(x, count)).view(np.uint8)
    y = run(which, x, count=count)
    assert np.array_equal(y[: len(wanted)], wanted)
    assert (y[len(wanted) :] == 0x5A).all()


@pytest.mark.parametrize("count", [1, 20, 64])
@pytest.mark.parametrize(("which", "unit"), [(26, 4), (27, 2)])
def test_stores_of_blocks_that_lie_apart(which, unit, count):
    x = ramp(unit, 256 // unit)
    image = np.full(256, 0x5A, np.uint8)
    image[: count * unit] = x[:count].view(np.uint8)
    y = run(which, x, count=count).reshape(-1, 32)
    assert np.array_equal(y[0:16:2], image.reshape(8, 32))
    assert (y[1:16:2] == 0x5A).all()
    assert np.array_equal(y[16:32:2], image.reshape(8, 32))
    assert np.array_equal(y[17:33:2], image.reshape(8, 32))
    assert (y[33:] == 0x5A).all()


@pytest.mark.parametrize(("which", "unit"), [(30, 1), (31, 2), (32, 4)])
def test_pairs(which, unit):
    n = 256 // unit
    x = ramp(unit, 2 * n)
    y = run(which, x, dtype=x.dtype)
    assert np.array_equal(y[:n], x[::2])
    assert np.array_equal(y[n : 2 * n], x[1::2])
    assert np.array_equal(y[2 * n : 4 * n], x.reshape(-1, 2)[:, ::-1].reshape(-1))


@pytest.mark.parametrize("count", [0, 1, 33, 64])
@pytest.mark.parametrize(("which", "dtype"), [(40, "f4"), (41, "u2"), (42, "f2")])
def test_masks_of_arithmetic(which, dtype, count):
    n = 256 // np.dtype(dtype).itemsize
    a, b, y = (RNG.integers(0, 15, k).astype(dtype) for k in (n, n, 4 * n))
    got, old = run(which, a, b, y, count).reshape(4, n), y.reshape(4, n)
    full = (a + b, a * 3, np.maximum(a, b), a * b + old[3])
    rest = (0 * a, 0 * a, old[2], 0 * a)
    for row, active, inactive in zip(got, full, rest, strict=True):
        assert np.array_equal(row[:count], active[:count])
        assert np.array_equal(row[count:], inactive[count:])


@pytest.mark.parametrize(("which", "dtype"), [(40, np.float32), (42, np.float16)])
def test_products_are_added_unrounded(which, dtype):
    n = 256 // np.dtype(dtype).itemsize
    a, b = RNG.standard_normal((2, n)).astype(dtype)
    c = (-(a.astype(np.float64) * b)).astype(dtype)  # what remains is the product's rounding
    c[::2] = RNG.standard_normal(n // 2).astype(dtype)
    y = np.zeros((4, n), dtype)
    y[3] = c
    got = run(which, a, b, y.reshape(-1), n).reshape(4, n)[3]
    exact = [
        float(Fraction(float(p)) * Fraction(float(q)) + Fraction(float(r))) for p, q, r in zip(a, b, c, strict=True)
    ]
    assert np.array_equal(got, np.array(exact, np.float64).astype(dtype))


def test_subnormal_values_by_the_published_table():
    a, b = np.ones((2, 64), np.float32)
    a[:4] = [1, 1.8611191411098982e-39, -87.3365478515625, -103.2789306640625]
    b[:4] = [-5.01923249665106e-39, 7.70406850625423e-39, 1.0965174496326337e-38, 2**127]
    y = run(43, a, b, dtype=np.float32)[:384].reshape(6, 64)
    assert y[0, 0] == -np.inf and np.isnan(y[0, 1])
    assert y[1, 0] == np.float32(-1.9923364304124947e38) and y[1, 1] == np.float32(0.24157613515853882)
    assert (y[2, 2:4] == 0).all()
    # The table's own exponential is 25 of the smallest steps off the exact one, so the comparison is a loose one.
    assert abs(y[3, 2] / np.float32(1.1754942107e-38) - 1) < 4e-6 and y[3, 3] == np.float32(1.401298464324817e-45)
    assert y[4, 2] == 0 and y[4, 3] == np.sqrt(np.float32(2**127))
    assert y[5, 2] == np.float32(1.0471472598529991e-19) and y[5, 3] == 0


def test_casts():
    x = RNG.standard_normal(64).astype(np.float32)
    rounded = x.astype(ml_dtypes.bfloat16)
    for which, half in ((50, 0), (51, 1)):
        pairs = run(which, x, dtype=ml_dtypes.bfloat16)[:128].reshape(64, 2)
        assert np.array_equal(pairs[:, half], rounded)
        assert (pairs[:, 1 - half] == 0).all()
    narrow = RNG.standard_normal(128).astype(ml_dtypes.bfloat16)
    for which, half in ((52, 0), (53, 1)):
        wide = run(which, narrow, dtype=np.float32)[:64]
        assert np.array_equal(wide, narrow[half::2].astype(np.float32))


@pytest.mark.parametrize("count", [1, 50, 64])
def test_narrowing_and_widening_as_kernels_do_it(count):
    x = RNG.standard_normal(64).astype(np.float32)
    rounded = x.astype(ml_dtypes.bfloat16)
    y = run(54, x, count=count)
    assert np.array_equal(y[: 2 * count].view(ml_dtypes.bfloat16), rounded[:count])
    assert (y[2 * count :] == 0x5A).all()
    assert np.array_equal(run(55, rounded, dtype=np.float32)[:64], rounded.astype(np.float32))


def tree(x):
    """The sum of a power of two of values, neighbours first."""
    while x.shape[-1] > 1:
        x = x[..., ::2] + x[..., 1::2]
    return x[..., 0]


@pytest.mark.parametrize("count", [1, 9, 64])
def test_reductions(count):
    x = RNG.standard_normal(64).astype(np.float32)
    masked = np.where(np.arange(64) < count, x, np.float32(0))
    blocks = x.reshape(8, 8)
    for which, all_of, of_blocks in (
        (60, tree(masked), tree(blocks)),
        (61, x[:count].max(), blocks.max(1)),
        (62, x[:count].min(), blocks.min(1)),
    ):
        y = run(which, x, count=count, dtype=np.float32)
        assert y[0] == all_of
        assert np.array_equal(y[64:72], of_blocks)


@pytest.mark.parametrize(("which", "unit"), [(70, 4), (71, 2), (72, 1)])
def test_interleave(which, unit):
    n = 256 // unit
    a, b = ramp(unit, n), ramp(unit, n)
    y = run(which, a, b, dtype=a.dtype)[: 4 * n]
    assert np.array_equal(y[: 2 * n], np.stack([a, b], 1).reshape(-1))
    both = np.concatenate([a, b])
    assert np.array_equal(y[2 * n :], np.concatenate([both[::2], both[1::2]]))


def test_compare_select_squeeze_gather_fill():
    a, b = RNG.standard_normal((2, 64)).astype(np.float32)
    index = RNG.integers(0, 64, 64).astype(np.uint32)
    y = run(80, a, np.concatenate([b, index.view(np.float32)]), dtype=np.float32)[:320].reshape(5, 64)
    less = a < b
    assert np.array_equal(y[0], np.maximum(a, b))
    assert np.array_equal(y[1], np.concatenate([a[less], np.zeros((~less).sum(), np.float32)]))
    assert np.array_equal(y[2], a[index])
    assert np.array_equal(y[3], np.where(a >= 0, -7.0, 7.0))
    assert np.array_equal(y[4].view(np.int32), np.arange(5, 69))


@pytest.mark.parametrize("count", [1, 13, 64])
def test_unaligned(count):
    x = RNG.standard_normal(128).astype(np.float32)
    y = run(81, x, count=count)
    assert np.array_equal(y[20 : 20 + 8 * count].view(np.float32), np.tile(x[3 : 3 + count], 2))
    assert (y[:20] == 0x5A).all() and (y[20 + 8 * count :] == 0x5A).all()


def test_barrier_between_store_and_load():
    x = RNG.standard_normal(256).astype(np.float32)
    assert np.array_equal(run(90, x, count=4, dtype=np.float32)[:256], (x + 1) * 2)


def test_loads_may_read_past_the_data_but_its_lanes_may_not_be_stored():
    x = RNG.standard_normal(40).astype(np.float32)
    assert np.array_equal(run(20, x, count=40)[:160].view(np.float32), x)
    with pytest.raises(BackendError, match=r"StoreAlign at .*register lanes that hold nothing written"):
        run(20, x, count=41)
