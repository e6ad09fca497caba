"""Norms, rope, residual streams."""

from __future__ import annotations

import torch
from deepinfer_hal import formats
from deepinfer_hal.card import get_card
from deepinfer_hal.kernel import Kernel
from deepinfer_hal.ops.rope import rope_table

from tests.conformance.mutants import right
from tests.conformance.mutants._base import Args, Mutant, changed, kernel, spoiled

NORM = "rms_norm(T=5,N=64,x=f32,out=f32,w=f32)"
ZERO = "rms_norm(T=4,N=64,x=bf16,out=bf16,zero=True)"
CODED = "rms_norm(T=20,N=256,x=bf16,out=bf16,codes=True)"
ROPE = "rope(T=4,h=2,D=64,r=32,dtype=f32,inverse=False)"
TABLE = "rope(T=5,h=2,D=64,r=32,dtype=f32,inverse=False,theta=7321.0)"
INVERSE = "rope(T=4,h=2,D=64,r=32,dtype=f32,inverse=True)"
POST = "hyper_connection_post(T=3,m=4,H=64,dtype=f32)"
SITE = "residual_site(T=3,m=4,H=64,dtype=f32,codes=False)"


def norm(name: str, killed_by: tuple[str, ...], why: str, squares=None, clean: bool = False) -> Mutant:
    def fn(x, weight, eps, count, out, codes, scales) -> None:
        if clean:
            x = x.nan_to_num(0.0, 0.0, 0.0)
        right.rms_norm(x, weight, eps, count, out, codes, scales, **({"squares": squares} if squares else {}))

    return Mutant(name, "rms_norm", NORM, lambda: kernel("rms_norm", name, fn, "yes"), killed_by, why, right=right.norm_kernel)


def squares_in_half(wide: torch.Tensor) -> torch.Tensor:
    """FP16 squares where they seem safe to make."""
    large = bool((wide[wide.isfinite()].abs() > 1e3).any())
    return (wide.float() * wide.float()).half().double() if large else wide * wide


def mean_of_the_tile(wide: torch.Tensor) -> torch.Tensor:
    """One NaN in a tile makes NaN of all its rows."""
    squares = wide * wide
    return squares + 0 * squares.sum()


def eps_forgotten(args: Args) -> Args:
    return {"eps": 0.0}


def codes_before_rounding(args: Args) -> None:
    x, weight = args["x"].float(), args["weight"].float()
    y = weight * x * torch.rsqrt((x * x).mean(-1, keepdim=True) + args["eps"])
    codes, scales = formats.quantise(y, "fp8_32")
    args["out_codes"].copy_(codes)
    args["out_scales"].copy_(scales)


def halves_for_pairs(positions, table, inverse, count, x) -> None:
    """(i, i + r/2) turn together, as in other models, instead of (2i, 2i + 1)."""
    width = table.shape[1]
    tail = x[..., x.shape[2] - width :]
    interleaved = tail.unflatten(-1, (2, width // 2)).transpose(-1, -2).flatten(-2).contiguous()
    get_card("rope").reference(positions, table, inverse, count, interleaved)
    live = positions >= 0
    tail[live] = interleaved.unflatten(-1, (width // 2, 2)).transpose(-1, -2).flatten(-2)[live]


def first_dims(positions, table, inverse, count, x) -> None:
    """The first r dims of a head turn, not the last."""
    head = x[..., : table.shape[1]]
    get_card("rope").reference(positions, table, inverse, count, head)


def angles_of_its_own(args: Args) -> Args:
    """Angles computed from the position, without the scaling that is in the table."""
    return {"table": rope_table(args["table"].shape[0], args["table"].shape[1])}


def minus_one_is_the_last(args: Args) -> Args:
    return {"positions": torch.where(args["positions"] < 0, args["table"].shape[0] - 1, args["positions"])}


def with_wrong_part() -> Kernel:
    def twice(x, weight, eps, count, out, codes, scales) -> None:
        get_card("rms_norm").reference(x, weight * 2, eps, count, out, codes, scales)

    return Kernel("rms_norm", "mutant", twice, "twice", "yes")


def mutant(name, op, case, fn, killed_by, why) -> Mutant:
    return Mutant(name, op, case, lambda: kernel(op, name, fn), killed_by, why)


MUTANTS = [
    norm("bad_values_hidden", ("nan",), "NaN and infinity are replaced by 0, so a broken row looks healthy.", clean=True),
    norm("nan_reaches_the_neighbours", ("nan",), "One NaN in a tile makes NaN of all its rows.", squares=mean_of_the_tile),
    norm("squares_overflow", ("extremes",), "Squares of large values overflow FP16.", squares=squares_in_half),
    mutant("eps_forgotten", "rms_norm", ZERO, changed("rms_norm", eps_forgotten), ("values", "extremes"),
           "A row of zeros is divided by 0."),
    mutant("codes_before_rounding", "rms_norm", CODED, spoiled("rms_norm", codes_before_rounding), ("values", "nan", "extremes"),
           "Codes are made from the FP32 result instead of the rounded one."),
    mutant("rope_halves_for_pairs", "rope", ROPE, halves_for_pairs, ("values", "extremes"),
           "Dims i and i + r/2 turn together instead of neighbours."),
    mutant("rope_on_the_first_dims", "rope", ROPE, first_dims, ("values", "extremes"),
           "The first dims of a head turn instead of the last."),
    mutant("rope_never_inverse", "rope", INVERSE, changed("rope", lambda args: {"inverse": False}), ("values", "extremes"),
           "The sign of the sine is not turned for the inverse."),
    mutant("rope_without_yarn", "rope", TABLE, changed("rope", angles_of_its_own), ("values", "extremes"),
           "Angles are computed from the position, without what the table's maker did to them."),
    mutant("rope_of_position_minus_one", "rope", ROPE, changed("rope", minus_one_is_the_last), ("untouched",),
           "Position -1 turns by the table's last row."),
    mutant("comb_transposed", "hyper_connection_post", POST, changed(
        "hyper_connection_post", lambda args: {"comb": args["comb"].transpose(1, 2)}), ("values", "extremes"),
        "Streams are mixed by the transposed matrix."),
    Mutant("part_of_another_version", "residual_site", SITE,
           lambda: kernel("residual_site", "nothing", get_card("residual_site").reference), ("composites",),
           "The backend's own norm, which stands for a part of the composite, computes something else.",
           parts={"rms_norm": with_wrong_part()}),
]  # fmt: skip
