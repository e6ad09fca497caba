"""Vector instructions against numpy: types, counts, masks, strides, and lanes that must stay as they were."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import probes
import pytest
from deepinfer_hal.errors import BackendError
from probes import TYPES, vector

pytestmark = pytest.mark.skipif(probes.missing() is not None, reason=str(probes.missing()))

FLOATS = ("float", "half", "bfloat16_t")
INTEGERS = ("int32_t", "int16_t", "uint16_t", "uint8_t")


def values(dtype: str, n: int, seed: int = 0, positive: bool = False) -> np.ndarray:
    rng = np.random.default_rng(seed)
    kind = TYPES[dtype][1]
    if dtype in FLOATS:
        x = rng.standard_normal(n).astype(np.float32) * 3
        return (np.abs(x) + 0.1 if positive else x).astype(kind)
    info = np.iinfo(kind)
    return rng.integers(max(info.min, -1000), min(info.max, 1000), n, dtype=np.int64).astype(kind)


def wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32)


BINARY = {
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: a * b,
    "Max": np.maximum,
    "Min": np.minimum,
}


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
@pytest.mark.parametrize("op", BINARY)
def test_binary(op, dtype):
    if op == "Mul" and dtype in ("int8_t", "uint8_t"):
        with pytest.raises(BackendError, match="Mul at .*the device has no such instruction for u?int8_t"):
            vector(op, dtype, values(dtype, 32, 1), values(dtype, 32, 2))
        return
    a, b = values(dtype, 331, 1), values(dtype, 331, 2)
    kind = TYPES[dtype][1]
    expected = BINARY[op](wide(a), wide(b)).astype(kind) if dtype in FLOATS else BINARY[op](a, b)
    got = vector(op, dtype, a, b)
    assert got.tobytes() == expected.astype(kind).tobytes()


@pytest.mark.parametrize("dtype", ["float", "half"])
def test_division_is_correctly_rounded(dtype):
    a, b = values(dtype, 200, 1), values(dtype, 200, 2, positive=True)
    assert vector("Div", dtype, a, b).tobytes() == (wide(a) / wide(b)).astype(TYPES[dtype][1]).tobytes()


@pytest.mark.parametrize("op", ["And", "Or", "Xor", "Not"])
def test_bits(op):
    a, b = values("int16_t", 200, 1), values("int16_t", 200, 2)
    expected = {"And": a & b, "Or": a | b, "Xor": a ^ b, "Not": ~a}[op]
    assert np.array_equal(vector(op, "int16_t", a, b), expected)


UNARY = {  # and how many units in the last place they may be off
    "Exp": (np.exp, 1),
    "Ln": (np.log, 2),
    "Sqrt": (np.sqrt, 0),
    "Reciprocal": (lambda x: 1 / x, 0),
    "Rsqrt": (lambda x: 1 / np.sqrt(x), 1),
    "Abs": (np.abs, 0),
    "Relu": (lambda x: np.maximum(x, 0), 0),
    "Neg": (np.negative, 0),
}


@pytest.mark.parametrize("op", UNARY)
def test_unary(op):
    f, ulps = UNARY[op]
    x = values("float", 4001, 3, positive=op in ("Ln", "Sqrt", "Rsqrt", "Reciprocal")) * np.float32(7)
    exact = f(x.astype(np.float64))
    got = vector(op, "float", x)
    unit = np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)
    assert (np.abs(got - exact) <= (ulps + 0.5001) * unit).all()


def test_exponential_at_the_edges():
    x = np.array([0, -0.0, 88.7, 89, 1000, -87, -88, -103, -104, -1000, np.inf, -np.inf, np.nan], np.float32)
    got = vector("Exp", "float", x)
    with np.errstate(over="ignore"):
        exact = np.exp(x.astype(np.float64)).astype(np.float32)
    exact[np.abs(exact) < np.finfo(np.float32).tiny] = 0
    assert np.allclose(got, exact, rtol=2e-7, atol=0, equal_nan=True)


def test_exponential_is_within_one_unit():
    x = np.linspace(-87.3, 88.7, 16384, dtype=np.float32)
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(vector("Exp", "float", x) - exact) < np.spacing(exact.astype(np.float32))).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", ["Adds", "Muls", "Maxs", "Mins"])
def test_scalars(op, dtype):
    x, kind = values(dtype, 77, 4), TYPES[dtype][1]
    k = np.float32(kind(1.25))
    expected = {
        "Adds": wide(x) + k,
        "Muls": wide(x) * k,
        "Maxs": np.maximum(wide(x), k),
        "Mins": np.minimum(wide(x), k),
    }[op]
    assert vector(op, dtype, x, scalar=1.25).tobytes() == expected.astype(kind).tobytes()


def test_shifts_are_arithmetic_for_signed_types():
    x = values("int32_t", 64, 5)
    assert np.array_equal(vector("ShiftRight", "int32_t", x, scalar=3), x >> 3)
    assert np.array_equal(vector("ShiftRight", "uint32_t", x.view(np.uint32), scalar=3), x.view(np.uint32) >> 3)
    assert np.array_equal(vector("ShiftLeft", "uint32_t", x.view(np.uint32), scalar=3), x.view(np.uint32) << np.uint32(3))
    sign = np.int32(-(2**31))
    wide = np.random.default_rng(6).integers(-(2**31), 2**31, 64).astype(np.int32)
    assert np.array_equal(vector("ShiftLeft", "int32_t", wide, scalar=3), ((wide << 3) & ~sign) | (wide & sign))


@pytest.mark.parametrize(
    ("dtype", "count", "result"),
    [("uint16_t", 1, 0b0101010101010100), ("int16_t", 1, 0b1101010101010100), ("int16_t", 3, 0b1101010101010000)],
)
def test_the_published_examples_of_a_shift_to_the_left(dtype, count, result):
    x = np.full(128, 0b1010101010101010, np.uint16).view(np.dtype(dtype[:-2]))
    assert (vector("ShiftLeft", dtype, x, scalar=count).view(np.uint16) == result).all()


def once(a, b, c):
    """a * b + c rounded once."""
    rows = zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    return np.array([float(Fraction(x) * Fraction(y) + Fraction(z)) for x, y, z in rows]).astype(np.float32)


def test_instructions_that_read_their_destination():
    a, b, y = (values("float", 100, s) for s in (1, 2, 3))
    y[:50] = -(a * b)[:50]
    assert np.array_equal(vector("MulAddDst", "float", a, b, y.copy()), once(a, b, y))
    k = np.full(100, 1.3, np.float32)
    y[:50] = -(a * k)[:50]
    assert np.array_equal(vector("Axpy", "float", a, y=y.copy(), scalar=float(k[0])), once(a, k, y))


def test_shifts_beyond_the_width():
    x = values("int32_t", 64, 5)
    for count in (32, 100):
        assert np.array_equal(vector("ShiftRight", "int32_t", x, scalar=count), np.where(x < 0, -1, 0))
        assert (vector("ShiftLeft", "int32_t", x, scalar=count) == 0).all()
        assert (vector("ShiftRight", "uint32_t", x.view(np.uint32), scalar=count) == 0).all()


def test_signed_zeros():
    a, b = np.array([-0.0, 0.0] * 16, np.float32), np.array([0.0, -0.0] * 16, np.float32)
    assert np.signbit(vector("Min", "float", a, b)).all()
    assert not np.signbit(vector("Max", "float", a, b)).any()


def test_nothing_to_do_is_a_mistake():
    x = values("float", 32, 1)
    with pytest.raises(BackendError, match="Abs at .*a count or repeat of 0 is not promised"):
        vector("Abs", "float", x, count=0)


@pytest.mark.parametrize(
    ("op", "dtype", "lanes", "message"),
    [
        ("Div", "bfloat16_t", None, "no such instruction for bfloat16_t"),
        ("Abs", "bfloat16_t", None, "no such instruction for bfloat16_t"),
        ("Muls", "uint32_t", None, "no such instruction for uint32_t"),
        ("Relu", "int8_t", None, "no such instruction for int8_t"),
        ("Add", "int8_t", 64, "no such instruction for int8_t with a mask and repeats, only by count"),
    ],
)
def test_types_that_the_chip_does_not_take(op, dtype, lanes, message):
    x = values(dtype, 256, 1)
    with pytest.raises(BackendError, match=message):
        vector(op, dtype, x, x, lanes=lanes)


def test_count_leaves_the_tail_alone():
    a, b, y = values("float", 96, 1), values("float", 96, 2), values("float", 96, 3)
    got = vector("Add", "float", a, b, y.copy(), count=37)
    assert np.array_equal(got[:37], (a + b)[:37])
    assert np.array_equal(got[37:], y[37:])


@pytest.mark.parametrize(
    ("dtype", "lanes"), [("float", 64), ("float", 13), ("half", 128), ("half", 77), ("bfloat16_t", 5)]
)
def test_mask_by_lanes(dtype, lanes):
    per_repeat = 256 // np.dtype(TYPES[dtype][1]).itemsize
    a, b, y = (values(dtype, per_repeat * 3, s) for s in (1, 2, 3))
    got = vector("Add", dtype, a, b, y.copy(), lanes=lanes, repeats=3)
    expected = y.copy().reshape(3, -1)
    total = (wide(a) + wide(b)).astype(TYPES[dtype][1]).reshape(3, -1)
    expected[:, :lanes] = total[:, :lanes]
    assert got.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", ["float", "half"])
def test_mask_by_bits(dtype):
    per_repeat = 256 // np.dtype(TYPES[dtype][1]).itemsize
    mask = (0x5A5A_F00F_1234_8001, 0x8000_0000_0000_0003)
    on = np.array([mask[i // 64] >> (i % 64) & 1 for i in range(per_repeat)], bool)
    a, b, y = (values(dtype, per_repeat * 2, s) for s in (1, 2, 3))
    got = vector("Mul", dtype, a, b, y.copy(), mask=mask, repeats=2).reshape(2, -1)
    product = (wide(a) * wide(b)).astype(TYPES[dtype][1]).reshape(2, -1)
    assert got.tobytes() == np.where(on, product, y.reshape(2, -1)).tobytes()


def test_strides():
    """Every second block of the first source, one broadcast block of the second, a gap in the destination."""
    a, b = values("float", 8 * 16 * 2, 1), values("float", 8 * 2, 2)
    y = np.full(8 * 10 * 2, 7.5, np.float32)
    got = vector("Add", "float", a, b, y.copy(), lanes=64, repeats=2, strides=(1, 2, 0, 10, 16, 1)).reshape(2, 10, 8)
    expected = y.reshape(2, 10, 8).copy()
    for repeat in range(2):
        expected[repeat, :8] = a.reshape(2, 16, 8)[repeat, ::2] + b.reshape(2, 8)[repeat]
    assert np.array_equal(got, expected)


@pytest.mark.parametrize("lanes", [64, 128])
@pytest.mark.parametrize(("first", "second"), [((1, 8), (0, 1)), ((1, 0), (1, 8)), ((2, 16), (1, 16)), ((1, 16), (0, 0))])
def test_whole_repeats_with_strides(first, second, lanes):
    """Sources as runs, as one broadcast block, with gaps; all lanes of a half's repeat, or its first half."""
    rng = np.random.default_rng(lanes)
    a, b, y = (rng.standard_normal(16 * 16 * 3).astype(np.float16) for _ in range(3))
    strides = (1, first[0], second[0], 9, first[1], second[1])
    got = vector("Mul", "half", a, b, y.copy(), lanes=lanes, repeats=3, strides=strides).reshape(-1, 16)
    expected = y.reshape(-1, 16).copy()
    for repeat in range(3):
        for block in range(lanes // 16):
            x = a.reshape(-1, 16)[repeat * first[1] + block * first[0]]
            expected[9 * repeat + block] = x * b.reshape(-1, 16)[repeat * second[1] + block * second[0]]
    assert got.tobytes() == expected.tobytes()


def test_duplicate():
    assert np.array_equal(
        vector("Duplicate", "half", np.zeros(100, np.float16), scalar=2.5), np.full(100, 2.5, np.float16)
    )


def test_types_that_the_device_lacks_are_refused():
    with pytest.raises(BackendError, match="no such instruction for int32_t"):
        vector("Exp", "int32_t", values("int32_t", 64))


@pytest.mark.parametrize("level", ["avx2", "base"])
def test_every_instruction_level_gives_the_same_bits(level):
    module = probes.twin.module()
    best = module.level()
    x = values("float", 999, 6, positive=True)
    steps = np.linspace(-110, 95, 4096, dtype=np.float32)

    def bits():
        some = [vector(op, "float", x, x, x.copy()).tobytes() for op in ("Exp", "Ln", "Rsqrt", "Mul", "Div", "MulAddDst")]
        return [*some, vector("Exp", "float", steps).tobytes(), vector("Axpy", "float", x, y=-x, scalar=1.1).tobytes()]

    first = bits()
    try:
        module.set_level(level)
        assert first == bits()
    finally:
        module.set_level(best)
