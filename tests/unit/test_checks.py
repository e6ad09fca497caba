"""Argument checks made from cards: each kind of bad call is named before anything is written; dims as expressions."""

from __future__ import annotations

import pytest
import torch
from deepinfer_hal.card import COUNT, OpCard, all_cards, inout, out, scalar, tensor, weight
from deepinfer_hal.checks import check_call
from deepinfer_hal.dims import DimExpression
from deepinfer_hal.errors import BadCall
from deepinfer_hal.weights import CanonicalWeight, prepare_canonical
from hypothesis import given, settings
from hypothesis import strategies as st

CARD = OpCard(
    name="toy",
    group="test",
    summary="Every kind of argument.",
    signature=(
        tensor("x", "stream", "T K"),
        tensor("x_scale", "u8", "T K/32", optional=True),
        weight("w", "N K"),
        tensor("offsets", "i32", "R+1"),
        tensor("slots", "i32", "R"),
        scalar("k", "int"),
        scalar("eps", "float"),
        scalar("inverse", "bool"),
        scalar("format", "str"),
        COUNT,
        inout("state", "f32", "_ 2 (k+1)*K", optional=True),
        out("ids", "i32", "T k"),
        out("y", "float", "T N", optional=True),
    ),
    reference=lambda *args: None,
)


def arguments(**changes) -> dict:
    """A good call with some arguments replaced."""
    good = {
        "x": torch.zeros(3, 64),
        "x_scale": torch.zeros(3, 2, dtype=torch.uint8),
        "w": prepare_canonical("w", CanonicalWeight("f32", torch.zeros(5, 64))),
        "offsets": torch.zeros(3, dtype=torch.int32),
        "slots": torch.zeros(2, dtype=torch.int32),
        "k": 2,
        "eps": 1e-6,
        "inverse": False,
        "format": "fp8_32",
        "count": torch.zeros(1, dtype=torch.int32),
        "state": torch.zeros(7, 2, 192),
        "ids": torch.zeros(3, 2, dtype=torch.int32),
        "y": torch.zeros(3, 5),
    }
    return {**good, **changes}


def test_a_good_call_gives_the_sizes_of_its_dims():
    assert check_call(CARD, arguments()) == {"T": 3, "K": 64, "N": 5, "R": 2, "k": 2}


def test_optional_arguments_may_be_absent_and_the_others_not():
    optional = [arg.name for arg in CARD.signature if arg.optional]
    assert optional == ["x_scale", "count", "state", "y"]
    check_call(CARD, arguments(**dict.fromkeys(optional)))
    for name in set(CARD.arg_names) - set(optional):
        with pytest.raises(BadCall, match=f"toy: argument '{name}' is missing"):
            check_call(CARD, arguments(**{name: None}))


def test_rows_may_be_strided_and_there_may_be_none():
    check_call(CARD, arguments(x=torch.zeros(3, 128)[:, :64], y=torch.zeros(3, 9)[:, :5]))
    none = {"x": torch.zeros(0, 64), "x_scale": torch.zeros(0, 2, dtype=torch.uint8), "y": torch.zeros(0, 5)}
    check_call(CARD, arguments(**none, ids=torch.zeros(0, 2, dtype=torch.int32)))


I32 = torch.int32
BAD_CALLS = {
    "no tensor": ({"x": [1.0]}, "toy: x must be a tensor, got list"),
    "a dtype of another kind": ({"x": torch.zeros(3, 64, dtype=torch.float16)}, "x must be bfloat16 or float32, got float16"),
    "int64 ids": ({"slots": torch.zeros(2, dtype=torch.int64)}, "slots must be int32, got int64"),
    "a transposed input": ({"x": torch.zeros(64, 3).T}, "last dimension of x must be contiguous, its stride is 3"),
    "too few dims": ({"x": torch.zeros(64)}, r"x must have shape \[T, K\], got \[64\]"),
    "a fixed size": ({"count": torch.zeros(2, dtype=I32)}, r"count must have shape \[1\], got \[2\]"),
    "a fixed size inside": ({"state": torch.zeros(7, 3, 192)}, r"state must have shape \[_, 2, "),
    "a size that an earlier argument has": ({"y": torch.zeros(4, 5)}, "y has T = 4, but T = 3 in earlier arguments"),
    "a weight of another width": (
        {"w": prepare_canonical("w", CanonicalWeight("f32", torch.zeros(5, 32)))}, "w has K = 32, but K = 64",
    ),
    "a tensor for a weight": ({"w": torch.zeros(5, 64)}, "w must be a prepared weight handle, got Tensor"),
    "an expression": ({"offsets": torch.zeros(2, dtype=I32)}, r"offsets needs R\+1 = 3, got 2"),
    "an expression of a scalar": ({"state": torch.zeros(7, 2, 64)}, r"state needs \(k\+1\)\*K = 192, got 64"),
    "a width that scales do not divide": (
        {
            "x": torch.zeros(3, 48), "x_scale": torch.zeros(3, 1, dtype=torch.uint8), "state": None,
            "w": prepare_canonical("w", CanonicalWeight("f32", torch.zeros(5, 48))),
        },
        "x_scale needs K/32 values, which is no whole number at K = 48",
    ),
    "a dim that a scalar gives": ({"ids": torch.zeros(3, 4, dtype=I32)}, "ids has k = 4, but the argument k = 2"),
    "a float for an int": ({"k": 2.0}, "k must be int, got float"),
    "a bool for an int": ({"k": True}, "k must be int, got bool"),
    "a bool for a float": ({"eps": True}, "eps must be float, got bool"),
    "an int for a bool": ({"inverse": 1}, "inverse must be bool, got int"),
    "a number for a string": ({"format": 8}, "format must be str, got int"),
    "a tensor for a scalar": ({"eps": torch.ones(1)}, "eps must be float, got Tensor"),
    "another device": ({"slots": torch.zeros(2, dtype=I32, device="meta")}, "slots is on meta, other arguments are on cpu"),
    "an expanded output": ({"y": torch.zeros(1, 5).expand(3, 5)}, "y is written, so its elements must not share memory"),
    "an output whose rows overlap": ({"y": torch.zeros(16).as_strided((3, 5), (3, 1))}, "y is written"),
}  # fmt: skip


@pytest.mark.parametrize("change, message", BAD_CALLS.values(), ids=BAD_CALLS)
def test_each_kind_of_bad_call_is_named(change, message):
    with pytest.raises(BadCall, match=message):
        check_call(CARD, arguments(**change))


def test_an_int_is_a_float_and_an_expanded_input_is_fine():
    check_call(CARD, arguments(eps=1, x=torch.zeros(1, 64).expand(3, 64)))


def test_arguments_are_bound_by_place_and_by_name():
    values = arguments()
    first, rest = list(values.items())[:4], dict(list(values.items())[4:])
    bound = CARD.bind_args(tuple(value for _, value in first), rest)
    assert list(bound) == list(CARD.arg_names) and all(bound[name] is values[name] for name in bound)
    assert CARD.bind_args(tuple(values.values())[:12], {})["y"] is None


@pytest.mark.parametrize(
    "values, named, message",
    [
        (tuple(range(14)), {}, "toy: takes 13 arguments, got 14"),
        ((1,), {"x": 2}, "toy: argument 'x' given twice"),
        ((), {"z": 2}, r"toy: unknown argument 'z'; the signature is \(x, x_scale, "),
        ((1, 2), {}, "toy: argument 'w' is missing"),
    ],
)
def test_a_call_that_does_not_fit_the_signature_is_named(values, named, message):
    with pytest.raises(BadCall, match=message):
        CARD.bind_args(values, named)


@pytest.mark.parametrize("name", sorted(all_cards()))
def test_every_argument_of_every_card_is_missed_and_its_kind_checked_before_anything_is_written(name):
    """All outputs keep their bytes whichever argument is wrong."""
    card = all_cards()[name]
    args = card.generate(next(iter(card.enumerate_cases())), 0, "cpu", prepare_canonical)
    check_call(card, args)
    before = {key: args[key].clone() for key in card.outputs() if args[key] is not None}
    wrong = {"weight": torch.zeros(2, 2), "str": 1, "bool": "no", "int": 1.5, "float": "much"}
    for arg in card.signature:
        with pytest.raises(BadCall, match=rf"{name}: {arg.name} must be"):
            check_call(card, {**args, arg.name: wrong.get(arg.kind, "no tensor")})
        if not arg.optional:
            with pytest.raises(BadCall, match=f"{name}: argument '{arg.name}' is missing"):
                check_call(card, {**args, arg.name: None})
    for key, old in before.items():
        assert torch.equal(args[key].view(torch.uint8) if old.numel() else old, old.view(torch.uint8) if old.numel() else old)


class TestDimExpressions:
    @pytest.mark.parametrize(
        "text, value",
        [("K/32", 4), ("R+1", 3), ("(m+1)*H", 50), ("C*d/32", 12), ("2*I-1", 15), ("12-2-3", 7), ("64/4/2", 8), ("((H))", 10)],
    )
    def test_values(self, text, value):
        assert DimExpression(text).value({"K": 128, "R": 2, "m": 4, "H": 10, "C": 6, "d": 64, "I": 8}) == value

    def test_names_are_those_it_needs(self):
        assert DimExpression("(m+1)*H/2").names == {"m", "H"}

    @pytest.mark.parametrize("text", ["K/32", "(K/32)*32", "1+K/K2", "K/0"])
    def test_a_division_with_a_remainder_has_no_value(self, text):
        assert DimExpression(text).value({"K": 33, "K2": 2}) is None

    @pytest.mark.parametrize(
        "text", ["", "K+", "(K", "K)", "K K", "K**2", "K//2", "f(x)", "K.real", "K@2", "__import__('os')", "-K", "a[0]"]
    )
    def test_anything_else_is_refused_when_the_expression_is_made(self, text):
        with pytest.raises(ValueError, match="dim expression"):
            DimExpression(text)

    @settings(max_examples=100, deadline=None, derandomize=True)
    @given(st.recursive(
        st.one_of(st.integers(0, 99).map(str), st.sampled_from(["a", "b", "cd"])),
        lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda t: f"({t[0]}{t[1]}{t[2]})"),
        max_leaves=8,
    ))  # fmt: skip
    def test_without_division_it_is_arithmetic(self, text):
        sizes = {"a": 3, "b": 5, "cd": 7}
        assert DimExpression(text).value(sizes) == eval(text, {}, sizes)  # noqa: S307  (made above)

    def test_every_dim_of_every_card_can_be_read(self):
        for card in all_cards().values():
            for dim in (dim for arg in card.signature for dim in arg.dims):
                assert dim == "..." or DimExpression(dim) is not None

