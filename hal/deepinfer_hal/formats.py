"""Quantised row formats, defined on bits: the one place that knows how codes and scales are made and read.

Everything here is plain integer and float32 arithmetic on any torch device; no float8 dtype, no log2, no exp2. Codes
and scales are uint8 tensors.

| format      | codes per row           | scales per row          | bytes per row |
|-------------|-------------------------|-------------------------|---------------|
| `fp8_32`    | D e4m3                  | D/32 ue8m0              | D + D/32      |
| `fp4_16`    | D/2 bytes of two e2m1   | D/16 e4m3               | D/2 + D/16    |
| `mxfp4_32`  | D/2 bytes of two e2m1   | D/32 ue8m0              | D/2 + D/32    |
| `f32`       | D float32 (tests)       | none                    | 4 D           |
| `bf16`      | D bfloat16              | none                    | 2 D           |

Two e2m1 codes share a byte: the even index is the low nibble. A row with NaN or infinity gets a NaN scale (ue8m0 255 or
e4m3 0x7F) for the group that holds it, so it reads back as NaN and never as a plausible number.
"""

import functools

import torch

from deepinfer_hal.errors import BadCall

FP8_MAX = 448.0
FP4_MAX = 6.0
FP8_AMAX_FLOOR = 1e-4
MXFP4_AMAX_FLOOR = 6.0 * 2.0**-126
FP4_16_AMAX_FLOOR = 6.0 * 2.0**-9
WEIGHT_BLOCK = 32

GROUP_SIZE = {"fp8_32": 32, "fp4_16": 16, "mxfp4_32": 32}
"""Values that share one scale, per quantised format."""

_EXPONENT_MASK = 0x7F800000
_MANTISSA_MASK = 0x007FFFFF
_E4M3_NAN = 0x7F
_E8M0_NAN = 0xFF


def _decode_float(codes: range, mantissa_bits: int, bias: int) -> list[float]:
    sign_shift = len(codes) // 2
    values = []
    for code in codes:
        exponent, mantissa = divmod(code % sign_shift, 1 << mantissa_bits)
        fraction = mantissa / (1 << mantissa_bits)
        magnitude = fraction * 2.0 ** (1 - bias) if exponent == 0 else (1 + fraction) * 2.0 ** (exponent - bias)
        values.append(-magnitude if code >= sign_shift else magnitude)
    return values


@functools.cache
def E4M3_VALUES(device: torch.device | str = "cpu") -> torch.Tensor:
    """[256] float32: the value of every e4m3 code (0x7F and 0xFF are NaN, no infinity). Shared: do not write."""
    values = _decode_float(range(256), mantissa_bits=3, bias=7)
    values[_E4M3_NAN] = values[_E4M3_NAN | 0x80] = float("nan")
    return torch.tensor(values, dtype=torch.float32, device=device)


@functools.cache
def E2M1_VALUES(device: torch.device | str = "cpu") -> torch.Tensor:
    """[16] float32: 0, 0.5, 1, 1.5, 2, 3, 4, 6, then the negatives. Shared: do not write."""
    return torch.tensor(_decode_float(range(16), mantissa_bits=1, bias=1), dtype=torch.float32, device=device)


@functools.cache
def E8M0_VALUES(device: torch.device | str = "cpu") -> torch.Tensor:
    """[256] float32: 2^(code - 127); code 255 is NaN. Shared: do not write."""
    values = [2.0 ** (code - 127) for code in range(255)] + [float("nan")]
    return torch.tensor(values, dtype=torch.float32, device=device)


@functools.cache
def _constant(value: float, device: torch.device) -> torch.Tensor:
    """A divisor that lives on the device: dividing by a Python number may become a multiplication by its reciprocal."""
    return torch.tensor(value, dtype=torch.float32, device=device)


def row_bytes(fmt: str, width: int) -> int:
    """Bytes of one stored row of `width` values, scales included. BadCall for a width the groups do not divide."""
    if fmt in ("f32", "bf16"):
        return (4 if fmt == "f32" else 2) * width
    group = _check_format(fmt, width)
    return (width if fmt == "fp8_32" else width // 2) + width // group


def ue8m0_scale(amax: torch.Tensor, floor: float, largest: float) -> torch.Tensor:
    """Smallest power of two s with max(amax, floor) / largest <= s, as an int32 ue8m0 code.

    The exponent of v = fl32(max(amax, floor) / largest), plus one when its mantissa is not zero; 255 if not finite.
    """
    v = amax.float().clamp_min(floor) / _constant(largest, amax.device)
    bits = v.view(torch.int32)
    exponent = (bits >> 23) & 0xFF
    return (exponent + ((bits & _MANTISSA_MASK) != 0).to(torch.int32)).clamp_max_(_E8M0_NAN)


def _reciprocal_of_ue8m0(scale: torch.Tensor) -> torch.Tensor:
    """2^(127 - code) for int32 codes 1..254; the NaN code gives 0, so that a finite neighbour of a NaN stays finite."""
    return ((254 - scale).clamp_min_(0) << 23).view(torch.float32)


def _binade(x: torch.Tensor, min_exponent: int) -> torch.Tensor:
    """2^max(exponent(x), min_exponent) for float32 x, elementwise."""
    return (x.view(torch.int32) & _EXPONENT_MASK).clamp_min_((min_exponent + 127) << 23).view(torch.float32)


def _round_to_grid(x: torch.Tensor, mantissa_bits: int, min_exponent: int, largest: float) -> torch.Tensor:
    """float32 x to the nearest value of a small float: ties to even, saturating, sign of zero kept."""
    x = x.clamp(-largest, largest)
    step = _binade(x, min_exponent).mul_(2.0**-mantissa_bits)
    return x.div_(step).round_().mul_(step)


def _encode(x: torch.Tensor, mantissa_bits: int, min_exponent: int, largest: float) -> torch.Tensor:
    """float32 x to the int32 codes of a small float (sign bit on top). NaN must have been replaced by the caller."""
    magnitude = x.abs().clamp_max_(largest)
    binade = _binade(magnitude, min_exponent)
    steps = magnitude.div_(binade).mul_(2.0**mantissa_bits).round_().to(torch.int32)
    exponent_field = (binade.view(torch.int32) >> 23) - (127 + min_exponent - 1)
    code = ((exponent_field - 1) << mantissa_bits) + steps
    exponent_bits = 4 if mantissa_bits == 3 else 2
    sign = (x.view(torch.int32) >> 31) & 1
    return code | (sign << (mantissa_bits + exponent_bits))


def encode_e4m3(x: torch.Tensor) -> torch.Tensor:
    """float32 to uint8 e4m3 codes: clamp to +-448, nearest even, sign of zero kept; NaN becomes 0x7F."""
    x = x.float()
    code = _encode(torch.nan_to_num(x, nan=0.0, posinf=FP8_MAX, neginf=-FP8_MAX), 3, -6, FP8_MAX)
    return torch.where(x.isnan(), _E4M3_NAN, code).to(torch.uint8)


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """float32 to uint8 e2m1 codes 0..15: saturate at +-6, nearest even, sign of zero kept; NaN becomes 0."""
    return _encode(torch.nan_to_num(x.float(), nan=0.0, posinf=FP4_MAX, neginf=-FP4_MAX), 1, 0, FP4_MAX).to(torch.uint8)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes [..., D] below 16 to bytes [..., D/2]; the even index goes to the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8 or int8 bytes [..., D/2] to uint8 codes [..., D]."""
    packed = packed.view(torch.uint8)
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def quantise(x: torch.Tensor, fmt: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of the rows of x over its last axis.

    x: [..., D] any float dtype, D a multiple of the format's group (and even). Returns uint8 codes [..., D] or, packed,
    [..., D/2], and uint8 scales [..., D/group]. Raises BadCall for an unknown format or a width it cannot hold.
    """
    group = _check_format(fmt, x.shape[-1])
    grouped = x.detach().float().unflatten(-1, (-1, group))
    amax = grouped.abs().amax(-1, keepdim=True)
    scale_code, scaled = _scale_groups(grouped, amax, fmt)
    scaled = torch.where(amax.isfinite(), scaled, 0.0)
    encode = encode_e4m3 if fmt == "fp8_32" else encode_e2m1
    codes = encode(scaled).flatten(-2)
    return codes if fmt == "fp8_32" else pack_nibbles(codes), scale_code.squeeze(-1).to(torch.uint8)


def _scale_groups(grouped: torch.Tensor, amax: torch.Tensor, fmt: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale codes and the groups divided by their scales, before rounding."""
    if fmt == "fp4_16":
        code = encode_e4m3(amax.clamp_min(FP4_16_AMAX_FLOOR) / _constant(FP4_MAX, amax.device))
        code = torch.where(amax.isfinite(), code, _E4M3_NAN)
        return code, grouped / E4M3_VALUES(grouped.device)[code.long()]
    floor, largest = (FP8_AMAX_FLOOR, FP8_MAX) if fmt == "fp8_32" else (MXFP4_AMAX_FLOOR, FP4_MAX)
    code = ue8m0_scale(amax, floor, largest)
    return code, grouped * _reciprocal_of_ue8m0(code)


def dequantise(codes: torch.Tensor, scales: torch.Tensor, fmt: str) -> torch.Tensor:
    """float32 rows [..., D] from `quantise`'s codes and scales."""
    width = codes.shape[-1] if fmt == "fp8_32" else 2 * codes.shape[-1]
    group = _check_format(fmt, width)
    if scales.shape[-1] * group != width:
        raise BadCall(f"{fmt}: {width} values need {width // group} scales a row, got {scales.shape[-1]}")
    if fmt == "fp8_32":
        values = E4M3_VALUES(codes.device)[codes.long()]
    else:
        values = E2M1_VALUES(codes.device)[unpack_nibbles(codes).long()]
    table = E4M3_VALUES(codes.device) if fmt == "fp4_16" else E8M0_VALUES(codes.device)
    scale = table[scales.view(torch.uint8).long()]
    return (values.unflatten(-1, (-1, group)) * scale[..., None]).flatten(-2)


def fake_quantise(x: torch.Tensor, fmt: str) -> torch.Tensor:
    """dequantise(quantise(x)) in x's dtype, without making codes: a dozen elementwise passes on any device."""
    group = _check_format(fmt, x.shape[-1])
    grouped = x.detach().float().unflatten(-1, (-1, group))
    amax = grouped.abs().amax(-1, keepdim=True)
    code, scaled = _scale_groups(grouped, amax, fmt)
    if fmt == "fp8_32":
        values = _round_to_grid(scaled, 3, -6, FP8_MAX)
    else:
        values = _round_to_grid(scaled, 1, 0, FP4_MAX)
    table = E4M3_VALUES(x.device) if fmt == "fp4_16" else E8M0_VALUES(x.device)
    return values.mul_(table[code.long()]).flatten(-2).to(x.dtype)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fmt):
        return fake_quantise(x, fmt)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def fake_quantise_ste(x: torch.Tensor, fmt: str) -> torch.Tensor:
    """`fake_quantise` whose gradient is the identity (straight-through), for training through the rounding."""
    return _StraightThrough.apply(x, fmt)


def dequantise_weight_fp8(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 [o, i] from e4m3 codes [o, i] and one ue8m0 scale per 32 x 32 block [ceil(o/32), ceil(i/32)]."""
    rows, columns = codes.shape
    expected = (-(-rows // WEIGHT_BLOCK), -(-columns // WEIGHT_BLOCK))
    if tuple(scales.shape) != expected:
        raise BadCall(f"FP8 weight [{rows}, {columns}] needs scales {list(expected)}, got {list(scales.shape)}")
    values = E4M3_VALUES(codes.device)[codes.view(torch.uint8).long()]
    return values * _spread_blocks(E8M0_VALUES(codes.device)[scales.view(torch.uint8).long()], rows, columns)


def dequantise_weight_fp4(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 [o, i] from e2m1 pairs [o, i/2] (int8 or uint8, even column low) and ue8m0 scales [o, i/32]."""
    return dequantise(packed.view(torch.uint8), scales.view(torch.uint8), "mxfp4_32")


def quantise_weight_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 codes [o, i] and ue8m0 scales [ceil(o/32), ceil(i/32)] of a float weight; edge blocks may be partial."""
    rows, columns = weight.shape
    weight = weight.detach().float()
    padded = torch.nn.functional.pad(weight, (0, -columns % WEIGHT_BLOCK, 0, -rows % WEIGHT_BLOCK))
    blocks = padded.unflatten(1, (-1, WEIGHT_BLOCK)).unflatten(0, (-1, WEIGHT_BLOCK))
    scales = ue8m0_scale(blocks.abs().amax(dim=(1, 3)), FP8_AMAX_FLOOR, FP8_MAX)
    codes = encode_e4m3(weight * _spread_blocks(_reciprocal_of_ue8m0(scales), rows, columns))
    return codes, scales.to(torch.uint8)


def quantise_weight_fp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e2m1 pairs uint8 [o, i/2] and ue8m0 scales [o, i/32] of a float weight [o, i]."""
    return quantise(weight, "mxfp4_32")


def _spread_blocks(scales: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    spread = scales.repeat_interleave(WEIGHT_BLOCK, 0).repeat_interleave(WEIGHT_BLOCK, 1)
    return spread[:rows, :columns]


def _check_format(fmt: str, width: int) -> int:
    group = GROUP_SIZE.get(fmt)
    if group is None:
        raise BadCall(f"unknown row format {fmt!r}; known: {', '.join(GROUP_SIZE)} (and f32 and bf16 for row_bytes)")
    if width == 0 or width % group:
        raise BadCall(f"{fmt} needs a row width that is a positive multiple of {group}, got {width}")
    return group
