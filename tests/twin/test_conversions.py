"""Casts by the published examples and, value by value, against numpy's conversions."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import probes
import pytest
from deepinfer_hal.errors import BackendError
from probes import ROUND, TYPES, other

pytestmark = pytest.mark.skipif(probes.missing() is not None, reason=str(probes.missing()))

DIRECTED = ("RINT", "FLOOR", "CEIL", "ROUND", "TRUNC")


def cast(values, source, to, mode, **options):
    x = np.asarray(values, TYPES[source][1])
    y = np.zeros(len(x), TYPES[to][1])
    return other("Cast", to, x, y=y, source=source, mode=ROUND[mode], count=options.pop("count", len(x)), **options)


# Inputs and outputs that the page on conversions publishes, for each of the five rounding modes.
PUBLISHED = [
    ("half", "int32_t", -1.5, (-2, -2, -1, -2, -1)),
    ("half", "uint8_t", 1.75, (2, 1, 2, 2, 1)),
    ("half", "int8_t", 127.5, (127, 127, 127, 127, 127)),
    ("half", "int16_t", 127.5, (128, 127, 128, 128, 127)),
    ("int16_t", "half", 4098, (4096, 4096, 4100, 4100, 4096)),
    ("bfloat16_t", "int32_t", 64.5, (64, 64, 65, 65, 64)),
    ("int32_t", "float", 2**25 + 3, (2**25 + 4, 2**25, 2**25 + 4, 2**25 + 4, 2**25)),
    ("float", "int32_t", 2**22 + 0.5, (2**22, 2**22, 2**22 + 1, 2**22 + 1, 2**22)),
    ("float", "int64_t", 2**22 + 0.5, (2**22, 2**22, 2**22 + 1, 2**22 + 1, 2**22)),
    ("float", "int16_t", 2**22 + 0.5, (32767,) * 5),
    ("float", "float", 0.5, (0.0, 0.0, 1.0, 1.0, 0.0)),
    ("float", "half", 0.5 + 2**-12, (0.5, 0.5, 0.5 + 2**-11, 0.5 + 2**-11, 0.5)),
    ("float", "bfloat16_t", 0.5 + 2**-9 + 2**-11, (0.5 + 2**-8, 0.5, 0.5 + 2**-8, 0.5 + 2**-8, 0.5)),
    (
        "int64_t",
        "float",
        2**35 + 2**12 + 2**11,
        (2**35 + 2**13, 2**35 + 2**12, 2**35 + 2**13, 2**35 + 2**13, 2**35 + 2**12),
    ),
]


@pytest.mark.parametrize(("source", "to", "value", "results"), PUBLISHED, ids=lambda v: v if isinstance(v, str) else "")
def test_published_examples(source, to, value, results):
    for mode, expected in zip(DIRECTED, results, strict=True):
        got = cast([value, value], source, to, mode)
        assert got[0] == TYPES[to][1](expected), f"{mode}: {got[0]}, the page says {expected}"


def test_odd_rounding_and_the_page_on_cast():
    assert cast([0.5 + 2**-12], "float", "half", "ODD")[0] == np.float16(0.5 + 2**-11)
    ceil = cast([1.4, 1.5, 1.6, 2.4, 2.5, 2.6], "half", "int32_t", "CEIL")
    assert ceil.tolist() == [2, 2, 2, 3, 3, 3]


@pytest.mark.parametrize(
    ("source", "to", "value", "expected"),
    [
        ("int16_t", "uint8_t", 2**15 - 1, 255),
        ("uint16_t", "uint8_t", 2**16 - 1, 255),
        ("int32_t", "int16_t", 2**31 - 1, 2**15 - 1),
        ("int32_t", "uint16_t", 2**31 - 1, 2**16 - 1),
        ("uint32_t", "int16_t", 2**32 - 1, 2**15 - 1),
        ("int64_t", "int32_t", 2**31, 2**31 - 1),
        ("int16_t", "uint32_t", -5, 0),
        ("int8_t", "int32_t", -128, -128),
        ("uint8_t", "half", 255, 255),
    ],
)
def test_integers_saturate(source, to, value, expected):
    assert cast([value, value], source, to, "NONE")[0] == expected


def interesting_floats() -> np.ndarray:
    rng = np.random.default_rng(1)
    x = (rng.standard_normal(4000) * np.exp2(rng.integers(-30, 20, 4000))).astype(np.float32)
    special = [
        0.0,
        -0.0,
        448,
        449,
        464,
        480,
        1e9,
        -1e9,
        2**-9,
        2**-10,
        1.5 * 2**-10,
        0.001953125,
        57344,
        61440,
        65504,
        65520,
    ]
    return np.concatenate([x, np.array(special, np.float32)])


@pytest.mark.parametrize("to", ["bfloat16_t", "half", "fp8_e4m3fn_t", "fp8_e5m2_t"])
def test_float_to_smaller_floats_rounds_to_nearest_even_and_saturates(to):
    x, kind = interesting_floats(), TYPES[to][1]
    largest = float(ml_dtypes.finfo(kind).max) if to != "half" else 65504.0
    with np.errstate(over="ignore"):
        expected = np.clip(x, -largest, largest).astype(kind)
    assert cast(x, "float", to, "RINT").tobytes() == expected.tobytes()


@pytest.mark.parametrize("source", ["fp8_e4m3fn_t", "fp8_e5m2_t", "half", "bfloat16_t"])
def test_every_code_widens_exactly(source):
    kind = TYPES[source][1]
    codes = np.arange(2 ** (8 * np.dtype(kind).itemsize)).astype(
        np.uint8 if np.dtype(kind).itemsize == 1 else np.uint16
    )
    codes = codes[:: max(1, len(codes) // 8192)]
    x = codes.view(kind)
    expected = x.astype(np.float32)
    got = cast(x, source, "float", "NONE")
    assert np.array_equal(got, expected, equal_nan=True)


def test_pairs_of_4_bit_values():
    codes = np.arange(256, dtype=np.uint8)
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    values = np.stack([table[codes & 15], table[codes >> 4]], 1).reshape(-1)
    y = np.zeros(512, ml_dtypes.bfloat16)
    assert np.array_equal(other("Cast", "bfloat16_t", codes, y=y, source="fp4x2_e2m1_t", count=512), values)
    back = other(
        "Cast",
        "fp4x2_e2m1_t",
        values.astype(ml_dtypes.bfloat16),
        y=np.zeros(256, np.uint8),
        source="bfloat16_t",
        mode=1,
        count=512,
    )
    assert np.array_equal(back, codes)
    halves = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 7, -2.5, 100, -100, 0.24], ml_dtypes.bfloat16)
    rounded = other("Cast", "fp4x2_e2m1_t", halves, y=np.zeros(6, np.uint8), source="bfloat16_t", mode=1, count=12)
    assert np.stack([table[rounded & 15], table[rounded >> 4]], 1).reshape(-1).tolist() == [
        0,
        1,
        1,
        2,
        2,
        4,
        4,
        6,
        -2,
        6,
        -6,
        0,
    ]


def test_sliced_form_counts_by_the_wider_type():
    x = np.random.default_rng(2).standard_normal(128).astype(np.float16)
    y = np.full(128, -7, np.int32)
    got = other(
        "Cast", "int32_t", x, y=y, source="half", mode=ROUND["FLOOR"], lanes=50, repeats=2, strides=(1, 1, 1, 8, 4, 8)
    )
    expected = y.reshape(2, 64).copy()
    expected[:, :50] = np.floor(x.astype(np.float32)).reshape(2, 64)[:, :50]
    assert np.array_equal(got.reshape(2, 64), expected)


@pytest.mark.parametrize(
    ("source", "to", "mode", "message"),
    [
        ("float", "fp8_e4m3fn_t", "FLOOR", "does not take this rounding mode"),
        ("float", "int8_t", "RINT", "is not among the conversions"),
        ("fp8_e4m3fn_t", "bfloat16_t", "NONE", "is not among the conversions"),
    ],
)
def test_what_the_device_cannot_convert_is_refused(source, to, mode, message):
    with pytest.raises(BackendError, match=message):
        cast(np.ones(64), source, to, mode)
