"""Row formats made or read wrongly: scales, codes, nibbles, flags."""

from __future__ import annotations

import torch
from deepinfer_hal import formats

from tests.conformance.mutants._base import Mutant, kernel, patched, spoiled

FP8 = "quantise(T=5,N=64,format=fp8_32,dtype=f32)"
FP8_BF16 = "quantise(T=5,N=64,format=fp8_32,dtype=bf16)"
FP4 = "quantise(T=5,N=64,format=mxfp4_32,dtype=f32)"
FP4_SCALED = "quantise(T=5,N=64,format=fp4_16,dtype=f32)"


def roll_scales(args) -> None:
    args["scales"].copy_(args["scales"].roll(1, dims=-1))


def scale_up_at_the_edge(amax, floor, largest):
    """448 * 2^k counts as more than 448 * 2^k."""
    v = amax.float().clamp_min(floor) / torch.tensor(largest)
    bits = v.view(torch.int32)
    return (((bits >> 23) & 0xFF) + (v.isfinite()).to(torch.int32)).clamp_max_(255)


def scale_by_logarithm(amax, floor, largest):
    v = amax.float().clamp_min(floor) / torch.tensor(largest)
    return torch.where(v.isfinite(), torch.log2(v).ceil() + 127, 255).to(torch.int32)


def no_floor(amax, floor, largest, made=formats.ue8m0_scale):
    return made(amax, 2.0**-126, largest)


def wrapping(x, mantissa_bits, min_exponent, largest, made=formats._encode):
    """Codes of too large a value run over into the exponent's next value, and from there into the sign."""
    code = made(x, mantissa_bits, min_exponent, float("inf"))
    return code & (0xFF if mantissa_bits == 3 else 0xF)


def truncated(x, mantissa_bits, min_exponent, largest, made=formats._encode):
    step = formats._binade(x.abs(), min_exponent) * 2.0**-mantissa_bits
    return made((x / step).trunc() * step, mantissa_bits, min_exponent, largest)


def without_negative_zero(x, made=formats.encode_e4m3):
    code = made(x)
    return torch.where(code == 0x80, 0, code)


def only_nan_is_flagged(args) -> None:
    rows = args["x"]
    infinite = rows.isinf().any(-1) & ~rows.isnan().any(-1)
    args["flags"] &= ~infinite.to(torch.uint8)


def flags_are_set_not_joined(args) -> None:
    args["flags"] &= 1


def scale_255_is_a_power_of_two() -> torch.Tensor:
    return torch.tensor([2.0 ** min(code - 127, 126) for code in range(256)])


def swapped_nibbles(codes: torch.Tensor) -> torch.Tensor:
    return codes[..., 1::2] | (codes[..., 0::2] << 4)


def quantise(name: str, target: str, replacement, case: str, killed_by: tuple[str, ...], why: str) -> Mutant:
    fn = patched("quantise", f"deepinfer_hal.formats.{target}", replacement)
    return Mutant(name, "quantise", case, lambda: kernel("quantise", name, fn), killed_by, why)


def quantise_spoiled(name: str, spoil, killed_by: tuple[str, ...], why: str) -> Mutant:
    fn = spoiled("quantise", spoil)
    return Mutant(name, "quantise", FP8, lambda: kernel("quantise", name, fn), killed_by, why)


MUTANTS = [
    quantise_spoiled("wrong_scale_group", roll_scales, ("discrete", "extremes"),
                     "Each group is stored with its neighbour's scale."),
    quantise("scale_exponent_off_at_448", "ue8m0_scale", scale_up_at_the_edge, FP8, ("extremes",),
             "The scale is one step too large where the group's maximum is exactly 448 * 2^k."),
    quantise("scale_by_log2", "ue8m0_scale", scale_by_logarithm, FP8, ("extremes",),
             "log2 in FP32 forgets the last bits of a maximum just above 448 * 2^k."),
    quantise("scale_floor_forgotten", "ue8m0_scale", no_floor, FP8, ("discrete", "extremes"),
             "A row of zeros gets a scale below the floor of 1e-4 / 448."),
    quantise("cast_wraps", "_encode", wrapping, FP4_SCALED, ("extremes",),
             "A value past the largest code wraps into another code instead of saturating."),
    quantise("cast_truncates", "_encode", truncated, FP8, ("discrete", "extremes"),
             "Codes are cut off instead of rounded to nearest even."),
    quantise("negative_zero_lost", "encode_e4m3", without_negative_zero, FP8_BF16, ("extremes",),
             "The sign of a value that rounds to zero is dropped."),
    quantise("nibbles_swapped", "pack_nibbles", swapped_nibbles, FP4, ("discrete", "extremes"),
             "The even index goes to the high nibble."),
    quantise_spoiled("infinity_not_flagged", only_nan_is_flagged, ("discrete", "nan", "extremes"),
                     "The flag of a row is set for NaN, but not for infinity."),
    quantise_spoiled("flags_overwritten", flags_are_set_not_joined, ("discrete", "untouched", "nan", "extremes"),
                     "Bits that a row's flag had from earlier ops are cleared."),
    Mutant("nibbles_swapped_on_reading", "dequantise", "dequantise(T=3,N=32,format=mxfp4_32,dtype=f32)",
           lambda: kernel("dequantise", "nibbles_swapped", patched(
               "dequantise", "deepinfer_hal.formats.unpack_nibbles",
               lambda packed: torch.stack((packed >> 4, packed & 0xF), dim=-1).flatten(-2))),
           ("values",), "The even index is read from the high nibble."),
    Mutant("nan_scale_is_a_number", "dequantise", "dequantise(T=3,N=32,format=mxfp4_32,dtype=f32)",
           lambda: kernel("dequantise", "nan_scale_is_a_number", patched(
               "dequantise", "deepinfer_hal.formats.E8M0_VALUES", lambda device="cpu": scale_255_is_a_power_of_two())),
           ("values",), "A group with a NaN scale reads as a plausible number."),
]  # fmt: skip
