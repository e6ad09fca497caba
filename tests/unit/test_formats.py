"""The quantised formats, exhaustively: every code, every exponent edge and one ulp around it, zeros, NaN and infinity.

The oracle is ml_dtypes on numpy arrays with the scale rule written out in exact arithmetic. ml_dtypes turns what is
past e4m3's 448 into NaN, so values are clamped before its casts.
"""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from deepinfer_hal import formats
from deepinfer_hal.card import get_card
from hypothesis import given, settings
from hypothesis import strategies as st

E4M3, E2M1, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e8m0fnu
F32_MAX = float(np.finfo(np.float32).max)
ROW_FORMATS = ("fp8_32", "fp4_16", "mxfp4_32")


def decoded(dtype, codes):
    return np.arange(codes, dtype=np.uint8).view(dtype).astype(np.float32)


def neighbours(values):
    """The values, one float32 ulp to either side, and all of it with both signs."""
    values = np.asarray(values, dtype=np.float32)
    with np.errstate(over="ignore"):
        near = [values, np.nextafter(values, np.float32(np.inf)), np.nextafter(values, np.float32(-np.inf))]
    both = np.concatenate(near)
    both = both[np.isfinite(both)]
    return np.concatenate([both, -both, np.array([0.0, -0.0], dtype=np.float32)])


def exponent_edges():
    """Every power of two of float32, subnormal ones too, with its neighbours."""
    return neighbours(np.ldexp(np.float32(1), np.arange(-149, 128)).astype(np.float32))


def grid_edges(values):
    """Every value of a small float and every midpoint between two, with their neighbours."""
    grid = np.unique(values[np.isfinite(values)])
    return neighbours(np.concatenate([grid, (grid[1:] + grid[:-1]) / 2]))


def codes_by_ml_dtypes(x, dtype, largest):
    return np.clip(x, -largest, largest).astype(dtype).view(np.uint8)


# ------------------------------------------------------------------------------------------- single values


def test_every_code_decodes_to_its_value():
    assert np.array_equal(formats.E4M3_VALUES().numpy(), decoded(E4M3, 256), equal_nan=True)
    assert np.array_equal(formats.E2M1_VALUES().numpy(), decoded(E2M1, 16))
    assert np.array_equal(formats.E8M0_VALUES().numpy(), decoded(E8M0, 256), equal_nan=True)
    for table in (formats.E4M3_VALUES(), formats.E2M1_VALUES()):
        assert table[len(table) // 2] == 0 and table[len(table) // 2].signbit(), "the code of -0 keeps its sign"


@pytest.mark.parametrize(
    ("encode", "dtype", "codes", "largest"),
    [(formats.encode_e4m3, E4M3, 256, 448.0), (formats.encode_e2m1, E2M1, 16, 6.0)],
    ids=["e4m3", "e2m1"],
)
class TestEncode:
    def test_every_value_encodes_to_its_code(self, encode, dtype, codes, largest):
        values = decoded(dtype, codes)
        finite = np.isfinite(values)
        assert np.array_equal(encode(torch.from_numpy(values)).numpy()[finite], np.arange(codes)[finite])

    def test_midpoints_exponent_edges_and_one_ulp_around(self, encode, dtype, codes, largest):
        x = np.concatenate([grid_edges(decoded(dtype, codes)), exponent_edges()])
        assert np.array_equal(encode(torch.from_numpy(x)).numpy(), codes_by_ml_dtypes(x, dtype, largest))

    def test_every_bfloat16(self, encode, dtype, codes, largest):
        x = np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
        x = x[~np.isnan(x)]
        assert np.array_equal(encode(torch.from_numpy(x)).numpy(), codes_by_ml_dtypes(x, dtype, largest))

    def test_what_is_too_large_saturates(self, encode, dtype, codes, largest):
        x = neighbours([largest, largest * 1.0625, largest * 2, F32_MAX])
        x = np.concatenate([x, [np.inf, -np.inf]]).astype(np.float32)
        x = x[np.abs(x) >= largest]
        got = decoded(dtype, codes)[encode(torch.from_numpy(x)).numpy()]
        assert np.array_equal(got, np.copysign(largest, x))

    def test_zeros_and_what_rounds_to_zero_keep_their_sign(self, encode, dtype, codes, largest):
        x = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 1e-45, -1e-45])
        assert encode(x).tolist() == [0, codes // 2] * 3


def test_nan_encodes_to_the_e4m3_nan():
    assert formats.encode_e4m3(torch.tensor([float("nan"), -float("nan"), 1.0])).tolist() == [0x7F, 0x7F, 0x38]


def exact_scale_code(amax, floor, largest):
    """ceil(log2(v)) + 127 of v = fl32(max(amax, floor) / largest) with frexp, which has no rounding."""
    v = np.float32(max(np.float32(amax), np.float32(floor))) / np.float32(largest)
    mantissa, exponent = math.frexp(float(v))
    return (exponent - 1 if mantissa == 0.5 else exponent) + 127


@pytest.mark.parametrize(
    ("floor", "largest"),
    [(formats.FP8_AMAX_FLOOR, 448.0), (formats.MXFP4_AMAX_FLOOR, 6.0)],
    ids=["fp8", "mxfp4"],
)
def test_scale_is_the_smallest_power_of_two_at_every_exponent_edge(floor, largest):
    powers = np.ldexp(1.0, np.arange(-149, 128))
    edges = powers[:, None] * np.array([1.0, largest, 1.5])[None]
    amax = neighbours(edges[edges <= F32_MAX].astype(np.float32))
    amax = np.abs(amax[np.isfinite(amax)])
    got = formats.ue8m0_scale(torch.from_numpy(amax), floor, largest).tolist()
    assert got == [exact_scale_code(a, floor, largest) for a in amax]


def test_scale_of_nan_or_infinity_is_the_nan_code():
    amax = torch.tensor([float("inf"), float("nan")])
    assert formats.ue8m0_scale(amax, 1e-4, 448.0).tolist() == [255, 255]


def test_scale_of_nothing_is_that_of_the_floor():
    codes, scales = formats.quantise(torch.zeros(1, 32), "fp8_32")
    assert scales.tolist() == [[105]] and codes.sum() == 0  # 1e-4 / 448 rounds up to 2^-22
    assert formats.quantise(torch.zeros(1, 32), "mxfp4_32")[1].tolist() == [[1]]
    assert formats.quantise(torch.zeros(1, 16), "fp4_16")[1].tolist() == [[1]]


# ------------------------------------------------------------------------------------------- rows


def rows_by_ml_dtypes(x, fmt):
    """(codes, scales) of finite float32 rows, group by group, with ml_dtypes casts and exact scales."""
    group = formats.GROUP_SIZE[fmt]
    grouped = x.reshape(*x.shape[:-1], -1, group)
    amax = np.abs(grouped).max(-1)
    if fmt == "fp4_16":
        raised = np.maximum(amax, np.float32(formats.FP4_16_AMAX_FLOOR)) / np.float32(6)
        scales = codes_by_ml_dtypes(raised, E4M3, 448.0)
        scaled = grouped / decoded(E4M3, 256)[scales][..., None]
    else:
        floor, largest = (1e-4, 448.0) if fmt == "fp8_32" else (formats.MXFP4_AMAX_FLOOR, 6.0)
        flat = [exact_scale_code(a, floor, largest) for a in amax.ravel()]
        scales = np.array(flat, dtype=np.uint8).reshape(amax.shape)
        scaled = (grouped.astype(np.float64) / np.ldexp(1.0, scales.astype(int) - 127)[..., None]).astype(np.float32)
    if fmt == "fp8_32":
        return codes_by_ml_dtypes(scaled, E4M3, 448.0).reshape(x.shape), scales
    nibbles = codes_by_ml_dtypes(scaled, E2M1, 6.0).reshape(x.shape)
    return nibbles[..., 0::2] | nibbles[..., 1::2] << 4, scales


def assert_rows_equal(x, fmt):
    codes, scales = formats.quantise(torch.from_numpy(x), fmt)
    expected_codes, expected_scales = rows_by_ml_dtypes(x, fmt)
    assert np.array_equal(scales.numpy(), expected_scales)
    assert np.array_equal(codes.numpy(), expected_codes)


def edge_rows(fmt):
    """Groups whose largest value is every exponent edge (times 1, 448 and 6) and its neighbours, others below it."""
    rng = np.random.default_rng(7)
    powers = np.ldexp(1.0, np.arange(-149, 128))
    edges = (powers[:, None] * np.array([1.0, 448.0, 6.0])).ravel()
    amax = neighbours(edges[edges <= F32_MAX].astype(np.float32))
    below = rng.uniform(-1, 1, (amax.size, formats.GROUP_SIZE[fmt])).astype(np.float32)
    rows = below * np.abs(amax)[:, None]
    rows[:, 5] = amax
    return rows


@pytest.mark.parametrize("fmt", ROW_FORMATS)
def test_rows_at_every_exponent_edge(fmt):
    assert_rows_equal(edge_rows(fmt), fmt)


@pytest.mark.parametrize("fmt", ROW_FORMATS)
def test_rows_whose_values_are_the_code_midpoints(fmt):
    """With the largest value at the top of the grid the scale is 1 (times a power), so midpoints stay midpoints."""
    group = formats.GROUP_SIZE[fmt]
    table, top = (decoded(E4M3, 256), 448.0) if fmt == "fp8_32" else (decoded(E2M1, 16), 6.0)
    points = grid_edges(table)
    points = points[np.abs(points) <= top]
    points = np.resize(points, (-(-points.size // (group - 1)), group - 1))
    rows = np.concatenate([np.full((len(points), 1), top, dtype=np.float32), points], axis=1)
    for scale in (1.0, 2.0**-7, 2.0**5):
        assert_rows_equal(rows * np.float32(scale), fmt)


@pytest.mark.parametrize("fmt", ROW_FORMATS)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(exponent=st.integers(-40, 38), seed=st.integers(0, 2**32 - 1), spread=st.integers(0, 6))
def test_rows_of_any_magnitude(fmt, exponent, seed, spread):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((4, 96)) * 10.0**exponent * 10.0 ** rng.integers(-spread, 1, (4, 96))
    x = np.clip(x, -F32_MAX, F32_MAX).astype(np.float32)
    assert_rows_equal(x, fmt)


@pytest.mark.parametrize("fmt", ROW_FORMATS)
def test_every_code_under_every_scale(fmt):
    scales = np.arange(256, dtype=np.uint8)
    group = formats.GROUP_SIZE[fmt]
    codes = np.arange(256, dtype=np.uint8)
    width = 256 if fmt == "fp8_32" else 512
    table = decoded(E4M3, 256) if fmt == "fp4_16" else decoded(E8M0, 256)
    nibbles = np.stack([codes & 15, codes >> 4], -1).ravel()
    values = decoded(E4M3, 256) if fmt == "fp8_32" else decoded(E2M1, 16)[nibbles]
    with np.errstate(over="ignore"):
        expected = (values.astype(np.float64)[None] * table.astype(np.float64)[:, None]).astype(np.float32)
    rows = torch.from_numpy(np.tile(codes, (256, 1)))
    got = formats.dequantise(rows, torch.from_numpy(np.repeat(scales[:, None], width // group, 1)), fmt).numpy()
    assert np.array_equal(got, expected, equal_nan=True)
    zeros = expected == 0
    assert np.array_equal(np.signbit(got[zeros]), np.signbit(expected[zeros]))


@pytest.mark.parametrize("fmt", ROW_FORMATS)
def test_quantising_again_changes_nothing(fmt):
    """Of what stays finite: next to float32's largest value a group may round up to infinity."""
    x = torch.from_numpy(edge_rows(fmt))
    codes, scales = formats.quantise(x, fmt)
    once = formats.dequantise(codes, scales, fmt)
    kept = once.isfinite().all(-1)
    if fmt == "fp4_16":  # its scale is rounded to nearest: it is found again where the largest value is 6 scales
        kept &= once.abs().amax(-1) == 6 * formats.E4M3_VALUES()[scales[:, 0].long()]
    assert kept.float().mean() > 0.4
    assert torch.equal(formats.dequantise(*formats.quantise(once[kept], fmt), fmt), once[kept])


@pytest.mark.parametrize("fmt", ROW_FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_value_poisons_its_group_alone_and_flags_its_row_alone(fmt, bad):
    group = formats.GROUP_SIZE[fmt]
    x = torch.randn(3, 4 * group, generator=torch.Generator().manual_seed(1))
    clean = formats.dequantise(*formats.quantise(x, fmt), fmt)
    x[1, group + 3] = bad
    codes, scales = (torch.empty_like(part) for part in formats.quantise(x, fmt))
    flags = torch.tensor([0, 2, 0], dtype=torch.uint8)
    get_card("quantise").reference(x, fmt, None, codes, scales, flags)
    got = formats.dequantise(codes, scales, fmt)
    hit = torch.zeros_like(x, dtype=torch.bool)
    hit[1, group : 2 * group] = True
    assert torch.equal(got.isnan(), hit)
    assert torch.equal(got[~hit], clean[~hit])
    assert flags.tolist() == [0, 3, 0]


@pytest.mark.parametrize("fmt", ROW_FORMATS)
def test_negative_zero_survives_the_round_trip(fmt):
    x = torch.ones(1, 32)
    x[0, 1::2] = -0.0
    got = formats.dequantise(*formats.quantise(x, fmt), fmt)
    assert torch.equal(got == 0, x == 0) and torch.equal(got.signbit(), x.signbit())


@pytest.mark.parametrize("fmt", ROW_FORMATS)
def test_input_dtype_does_not_matter_and_empty_rows_are_allowed(fmt):
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    for other in (x.float(), x.double()):
        for a, b in zip(formats.quantise(x, fmt), formats.quantise(other, fmt), strict=True):
            assert torch.equal(a, b)
    codes, scales = formats.quantise(x[:0], fmt)
    assert formats.dequantise(codes, scales, fmt).shape == (0, 64)


@pytest.mark.parametrize("fmt", ROW_FORMATS)
def test_fake_quantise_is_the_round_trip(fmt):
    x = torch.from_numpy(edge_rows(fmt))
    got, expected = formats.fake_quantise(x, fmt), formats.dequantise(*formats.quantise(x, fmt), fmt)
    assert torch.equal(got, expected) and torch.equal(got.signbit(), expected.signbit())


def test_even_index_is_the_low_nibble():
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 1], x[0, 2] = 6.0, -1.5, 0.5
    codes, _ = formats.quantise(x, "mxfp4_32")
    assert codes[0, :2].tolist() == [0x7 | 0xB << 4, 0x1]
    every = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(formats.pack_nibbles(formats.unpack_nibbles(every)), every)


def test_row_sizes_and_refused_widths():
    sizes = [formats.row_bytes(*row) for row in (("fp8_32", 512), ("fp4_16", 512), ("mxfp4_32", 128), ("f32", 512))]
    assert sizes == [528, 288, 68, 2048]
    for fmt, width in (("fp8_32", 33), ("fp4_16", 24), ("mxfp4_32", 16), ("fp8_32", 0), ("fp5", 32)):
        with pytest.raises(ValueError, match=fmt):
            formats.quantise(torch.ones(1, width), fmt)
    with pytest.raises(ValueError, match="2 scales a row, got 1"):
        formats.dequantise(torch.zeros(1, 64, dtype=torch.uint8), torch.zeros(1, 1, dtype=torch.uint8), "fp8_32")


# ------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("shape", [(32, 32), (64, 96), (70, 100), (1, 31), (33, 1)])
def test_fp8_weight_blocks_equal_loops_also_at_partial_edges(shape):
    rng = np.random.default_rng(3)
    w = (rng.standard_normal(shape) * 10.0 ** rng.integers(-6, 4, shape)).astype(np.float32)
    codes, scales = formats.quantise_weight_fp8(torch.from_numpy(w))
    decoded_weight = formats.dequantise_weight_fp8(codes, scales).numpy()
    for i in range(-(-shape[0] // 32)):
        for j in range(-(-shape[1] // 32)):
            where = (slice(32 * i, 32 * i + 32), slice(32 * j, 32 * j + 32))
            code = exact_scale_code(np.abs(w[where]).max(), 1e-4, 448.0)
            scale = 2.0 ** (code - 127)
            expected = codes_by_ml_dtypes((w[where] / scale).astype(np.float32), E4M3, 448.0)
            assert scales[i, j] == code and np.array_equal(codes.numpy()[where], expected)
            assert np.array_equal(decoded_weight[where], decoded(E4M3, 256)[expected] * np.float32(scale))


def test_fp8_weight_every_code_under_every_block_scale():
    codes = torch.arange(256, dtype=torch.uint8).repeat(32, 1)
    for scale in (0, 1, 100, 127, 150, 254, 255):
        got = formats.dequantise_weight_fp8(codes, torch.full((1, 8), scale, dtype=torch.uint8)).numpy()
        with np.errstate(over="ignore"):
            exact = decoded(E4M3, 256).astype(np.float64) * np.float64(decoded(E8M0, 256)[scale])
            expected = exact.astype(np.float32)
        assert np.array_equal(got, np.tile(expected, (32, 1)), equal_nan=True)
    with pytest.raises(ValueError, match="needs scales"):
        formats.dequantise_weight_fp8(codes, torch.zeros(2, 8, dtype=torch.uint8))


def test_fp4_weight_rows_read_stored_bytes_of_either_sign():
    packed = torch.arange(256, dtype=torch.uint8).reshape(8, 32)
    scales = torch.arange(120, 136, dtype=torch.uint8).reshape(8, 2)
    got = formats.dequantise_weight_fp4(packed.view(torch.int8), scales)
    for row in range(8):
        for column in range(64):
            byte = int(packed[row, column // 2])
            nibble = byte & 15 if column % 2 == 0 else byte >> 4
            assert got[row, column] == decoded(E2M1, 16)[nibble] * 2.0 ** (int(scales[row, column // 32]) - 127)
    assert torch.equal(formats.dequantise_weight_fp4(*formats.quantise_weight_fp4(got)), got)
