"""The cube's path: layouts, transposition, accumulation over k, scales, ragged sizes, results for vector cores."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import probes
import pytest
import torch

pytestmark = pytest.mark.skipif(probes.missing() is not None, reason=str(probes.missing()))

KINDS = {"float": 0, "half": 1, "bf16": 2, "bf16_out": 3, "e4m3": 4, "mx_e4m3": 5, "mx_e2m1": 6, "mix": 7}
NUMPY = {"float": np.float32, "half": np.float16, "e4m3": ml_dtypes.float8_e4m3fn, "mx_e4m3": ml_dtypes.float8_e4m3fn}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def product(kind, a, b, m, n, k, *, a_transposed=0, b_transposed=0, steps=1, scales=(None, None), repeats=1):
    out = np.zeros((m, n), ml_dtypes.bfloat16 if kind == "bf16_out" else np.float32)
    c = probes.tensor(out)
    extra = [torch.zeros(0, dtype=torch.uint8) if s is None else probes.tensor(s) for s in scales]
    ints = (KINDS[kind], m, n, k, a_transposed, b_transposed, steps, repeats)
    probes.kernel("probe_cube", 5, 8, 0)(probes.tensor(a), probes.tensor(b), c, *extra, *ints)
    return c.numpy().view(out.dtype).reshape(m, n)


def matrices(kind, m, n, k, seed=0):
    rng = np.random.default_rng(seed)
    dtype = NUMPY.get(kind, ml_dtypes.bfloat16)
    return (rng.standard_normal(shape).astype(np.float32).astype(dtype) for shape in ((m, k), (n, k)))


def in_order(a, b, steps=1):
    """float32 sums over k in order, each product and each sum rounded."""
    a, b = a.astype(np.float32), b.astype(np.float32)
    c = np.zeros((a.shape[0], b.shape[0]), np.float32)
    for i in range(a.shape[1]):
        c = c + a[:, i, None] * b[None, :, i]
    return c


SIZES = [(16, 16, 64), (48, 80, 128), (13, 7, 64), (30, 40, 96), (128, 64, 32)]


@pytest.mark.parametrize(("m", "n", "k"), SIZES)
@pytest.mark.parametrize("kind", ["float", "half", "bf16", "bf16_out", "e4m3"])
def test_product(kind, m, n, k):
    a, b = matrices(kind, m, n, k)
    expected = in_order(a, b)
    got = product(kind, a, b, m, n, k)
    assert np.array_equal(got, expected.astype(ml_dtypes.bfloat16) if kind == "bf16_out" else expected)


def test_parts_of_k_accumulate():
    a, b = matrices("bf16", 48, 32, 256, 1)
    assert np.array_equal(product("bf16", a, b, 48, 32, 256, steps=4), in_order(a, b))


@pytest.mark.parametrize("kind", ["float", "half", "bf16", "e4m3"])
@pytest.mark.parametrize(("m", "n", "k"), [(32, 64, 64), (64, 32, 128)])
def test_transposed_operands(kind, m, n, k):
    a, b = matrices(kind, m, n, k, 2)
    expected = in_order(a, b)
    assert np.array_equal(product(kind, a, b.T, m, n, k, b_transposed=1), expected)
    assert np.array_equal(product(kind, a.T, b, m, n, k, a_transposed=1), expected)


def scales_for(rows, k, seed):
    return np.random.default_rng(seed).integers(120, 134, (rows, k // 32)).astype(np.uint8)


def scaled(x, s):
    return x.astype(np.float32) * np.exp2(s.astype(np.float32) - 127).repeat(32, axis=1)


@pytest.mark.parametrize(("m", "n", "k", "steps"), [(16, 32, 64, 1), (64, 48, 256, 2), (19, 80, 128, 1)])
def test_microscaled_fp8(m, n, k, steps):
    a, b = matrices("mx_e4m3", m, n, k, 3)
    sa, sb = scales_for(m, k, 4), scales_for(n, k, 5)
    got = product("mx_e4m3", a, b, m, n, k, steps=steps, scales=(sa, sb))
    assert np.array_equal(got, in_order(scaled(a, sa), scaled(b, sb)))


@pytest.mark.parametrize(("m", "n", "k"), [(16, 32, 64), (48, 64, 256)])
def test_microscaled_fp4(m, n, k):
    rng = np.random.default_rng(6)
    a, b = (rng.integers(0, 16, shape) for shape in ((m, k), (n, k)))
    packed = [(x[:, ::2] | x[:, 1::2] << 4).astype(np.uint8) for x in (a, b)]
    sa, sb = scales_for(m, k, 7), scales_for(n, k, 8)
    got = product("mx_e2m1", *packed, m, n, k, scales=(sa, sb))
    assert np.array_equal(got, in_order(scaled(E2M1[a], sa), scaled(E2M1[b], sb)))


def test_result_goes_to_both_vector_cores():
    a, b = matrices("bf16", 32, 64, 64, 9)
    assert np.array_equal(product("mix", a, b, 32, 64, 64), 2 * in_order(a, b))
