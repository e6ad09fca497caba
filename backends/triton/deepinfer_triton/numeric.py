"""Codes and scales on bits, for kernels: the device half of `deepinfer_hal.formats`, and the only place with this
arithmetic.

Everything is integer arithmetic and exact float32 products, so a target needs no FP8 type. Codes are read as uint8
and made as int32, which the caller stores as bytes. No float32 subnormal is made on the way, but for the value of
ue8m0 code 0.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl
from triton.backends import backends

MAGNITUDE = tl.constexpr(0x7FFFFFFF)
NAN_BITS = tl.constexpr(0x7FC00000)
ROUND_MAGIC = tl.constexpr(8388608.0)
"""2^23: adding and taking it away rounds a float32 in 0..2^22 to an integer, ties to even."""

INTERPRETING = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
NATIVE_FP8 = tl.constexpr(not INTERPRETING.value and "nvidia" in backends and "ascend" not in backends)
"""Whether codes are made and read by the chip's own e4m3 conversion, which is exact and needs far fewer instructions."""


@triton.jit
def as_float(bits):
    """int32 bits as float32."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def as_bits(x):
    """float32 as int32 bits."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """float32 x in dtype, to nearest even. Triton's interpreter truncates to BF16, so there the bits are rounded
    first.
    """
    if INTERPRETING and dtype == tl.bfloat16:
        bits = as_bits(x)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        x = as_float(tl.where(x == x, rounded, bits))
    return x.to(dtype)


@triton.jit
def valid_rows(count, rows):
    """Rows that may be read and written: the device count, if there is one, but at most `rows`."""
    n = rows
    if count is not None:
        n = tl.minimum(tl.load(count), rows)
    return n


@triton.jit
def log1p_of_fraction(e):
    """log(1 + e) for -1/2 <= e <= 1 to float32's precision: 2 atanh(s) with |s| = |e / (2 + e)| <= 1/3, by its odd series."""
    s = e / (2.0 + e)
    q = s * s
    series = 1.0 + q * (1.0 / 3 + q * (1.0 / 5 + q * (1.0 / 7 + q * (1.0 / 9 + q * (1.0 / 11 + q * (1.0 / 13))))))
    return 2.0 * s * series


# ------------------------------------------------------------------------------------------------------ codes to values


@triton.jit
def decode_e4m3(code):
    """uint8 codes to float32; 0x7F and 0xFF are NaN."""
    if NATIVE_FP8:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        code = code.to(tl.int32)
        magnitude = code & 0x7F
        normal = as_float((magnitude << 20) + (120 << 23))
        value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
        bits = as_bits(value) | ((code & 0x80) << 24)
        return as_float(tl.where(magnitude == 0x7F, NAN_BITS, bits))


@triton.jit
def decode_e2m1(code):
    """uint8 codes 0..15 to float32."""
    if NATIVE_FP8:
        # magnitude << 2 is the e4m3 code of 2^-6 times the value
        return (((code & 7) << 2) | ((code & 8) << 4)).to(tl.float8e4nv, bitcast=True).to(tl.float32) * 64.0
    else:
        code = code.to(tl.int32)
        magnitude = code & 7
        normal = as_float((magnitude << 22) + (126 << 23))
        value = tl.where(magnitude < 2, magnitude.to(tl.float32) * 0.5, normal)
        return as_float(as_bits(value) | ((code & 8) << 28))


@triton.jit
def decode_ue8m0(code):
    """uint8 codes to the float32 2^(code - 127); 255 is NaN."""
    code = code.to(tl.int32)
    return as_float(tl.where(code == 255, NAN_BITS, tl.where(code == 0, 0x00400000, code << 23)))


@triton.jit
def decode_scale(code, FORMAT: tl.constexpr):
    """Scale codes of a row format to float32."""
    if FORMAT == "fp4_16":
        return decode_e4m3(code)
    else:
        return decode_ue8m0(code)


@triton.jit
def unpack(packed, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """uint8 bytes [ROWS, WIDTH / 2] to e2m1 codes [ROWS, WIDTH]; the even column is the low nibble."""
    return tl.reshape(tl.join(packed & 15, packed >> 4), (ROWS, WIDTH))


@triton.jit
def scale_groups(values, scale, ROWS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr):
    """values [ROWS, WIDTH] times scale [ROWS, WIDTH / GROUP], one scale per GROUP columns."""
    grouped = tl.reshape(values, (ROWS, WIDTH // GROUP, GROUP)) * scale[:, :, None]
    return tl.reshape(grouped, (ROWS, WIDTH))


# ------------------------------------------------------------------------------------------------------ values to codes


@triton.jit
def _encode(magnitude, MANTISSA: tl.constexpr, LEAST: tl.constexpr):
    """Non-negative float32 within the range of a small float to its codes without sign; LEAST is its least exponent."""
    exponent = tl.maximum(as_bits(magnitude) >> 23, LEAST + 127)
    steps = magnitude * as_float((254 - exponent) << 23) * (1 << MANTISSA)
    whole = ((steps + ROUND_MAGIC) - ROUND_MAGIC).to(tl.int32)
    return ((exponent - (127 + LEAST)) << MANTISSA) + whole


@triton.jit
def encode_e4m3_magnitude(magnitude):
    """float32 >= 0, not NaN, to codes 0..0x7E: saturates at 448, ties to even."""
    return _encode(tl.minimum(magnitude, 448.0), 3, -6)


@triton.jit
def encode_e2m1_magnitude(magnitude):
    """float32 >= 0, not NaN, to codes 0..7: saturates at 6, ties to even."""
    return _encode(tl.minimum(magnitude, 6.0), 1, 0)


@triton.jit
def _ue8m0_scale(amax_bits, FLOOR_BITS: tl.constexpr, LARGEST_EXPONENT: tl.constexpr, LARGEST_MANTISSA: tl.constexpr):
    """Scale codes from the bits of the largest magnitude of each group; 255 if that is not finite.

    The exponent of fl32(amax / largest), plus one unless its mantissa is zero. With largest = m * 2^e and m = 1.5 or
    1.75 that is exponent(amax) - e, plus one when the mantissa of amax exceeds m: no quotient rounds to a power of two
    unless it is one.
    """
    floored = tl.maximum(amax_bits, FLOOR_BITS)
    above = (floored & 0x7FFFFF) > LARGEST_MANTISSA
    code = (floored >> 23) - LARGEST_EXPONENT + above.to(tl.int32)
    return tl.where(amax_bits >= 0x7F800000, 255, code)


@triton.jit
def quantise_groups(x, FORMAT: tl.constexpr):
    """float32 groups [G, group] to (codes int32 [G, group], scale codes int32 [G]); codes are not packed.

    A group with NaN or infinity gets a NaN scale and zero codes.
    """
    bits = as_bits(x)
    magnitude_bits = bits & MAGNITUDE
    amax_bits = tl.max(magnitude_bits, axis=1)  # integers order as floats do, and NaN comes out on top
    finite = (amax_bits < 0x7F800000)[:, None]
    magnitude = as_float(tl.where(finite, magnitude_bits, 0))
    sign = tl.where(finite, (bits >> 31) & 1, 0)
    if FORMAT == "fp8_32":
        scale = _ue8m0_scale(amax_bits, 0x38D1B717, 8, 0x600000)
        inverse = as_float(tl.maximum(254 - scale, 0) << 23)[:, None]
        if NATIVE_FP8:
            scaled = tl.where(finite, x, 0.0) * inverse
            codes = scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
        else:
            codes = encode_e4m3_magnitude(magnitude * inverse) | (sign << 7)
    else:
        if FORMAT == "mxfp4_32":
            scale = _ue8m0_scale(amax_bits, 0x01C00000, 2, 0x400000)
            scaled = magnitude * as_float(tl.maximum(254 - scale, 0) << 23)[:, None]
        else:
            largest = as_float(tl.where(amax_bits < 0x7F800000, tl.maximum(amax_bits, 0x3C400000), 0x3F800000))
            code = encode_e4m3_magnitude(tl.div_rn(largest, tl.full(largest.shape, 6.0, tl.float32)))
            scale = tl.where(amax_bits < 0x7F800000, code, 0x7F)
            divisor = tl.broadcast_to(decode_e4m3(code.to(tl.uint8))[:, None], magnitude.shape)
            scaled = tl.div_rn(magnitude, divisor)
        codes = encode_e2m1_magnitude(scaled) | (sign << 3)
    return codes, scale


@triton.jit
def pack(codes, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """e2m1 codes [GROUPS, GROUP] to bytes [GROUPS, GROUP / 2]; the even column goes to the low nibble."""
    low, high = tl.split(tl.reshape(codes, (GROUPS, GROUP // 2, 2)))
    return low | (high << 4)
