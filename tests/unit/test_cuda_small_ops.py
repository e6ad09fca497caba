"""Which calls the CUDA C++ kernels of a layer's small ops and of sampling take, and what the benchmark of those ops runs."""

import sys
from pathlib import Path

import pytest
import torch
from deepinfer_cuda import native
from deepinfer_hal.card import get_card
from deepinfer_hal.kernel import CallSpec, No, Yes
from deepinfer_hal.statics import call_spec
from deepinfer_hal.weights import prepare_canonical

sys.path[:0] = [str(Path(__file__).parents[2] / part) for part in ("tools", "tools/cuda")]

import bench_layer_small  # noqa: E402

SITE = {"streams": "bf16", "out": "bf16", "m": 4, "H": 5120}


@pytest.mark.parametrize(("changed", "answer"), [
    ({}, Yes), ({"H": 256}, Yes), ({"streams": "f32"}, No), ({"out": "f32"}, No), ({"m": 2}, No), ({"H": 80}, No),
    ({"m": None}, No),
])  # fmt: skip
@pytest.mark.parametrize("op", ["residual_site", "hyper_connection_pre"])
def test_a_kernel_says_beforehand_which_calls_it_leaves_to_the_portable_one(op, changed, answer):
    said = native.supports(CallSpec(op, {**SITE, **changed}))
    assert isinstance(said, answer)
    if answer is No:
        assert all(f"{name} is {value!r}" in said.reason for name, value in changed.items())


SERVED = {
    "quantise": {"x": "bf16", "format": "fp8_32"},
    "swiglu_quantise": {"gate_up": "bf16", "out": "u8"},
    "top_logprobs": {"k": 20},
    "draft_attention": {"q": "bf16", "out": "bf16", "D": 512, "window_format": "fp8_32", "h": 64},
    "mask_logits": {},
}


@pytest.mark.parametrize(("op", "changed"), [
    ("quantise", {"x": "f32"}), ("quantise", {"format": "fp4_16"}), ("swiglu_quantise", {"out": "bf16"}),
    ("swiglu_quantise", {"gate_up": "f32"}), ("top_logprobs", {"k": 257}), ("draft_attention", {"window_format": "f32"}),
    ("draft_attention", {"h": 65}), ("draft_attention", {"D": 256}), ("draft_attention", {"q": "f32"}),
])  # fmt: skip
def test_what_a_kernel_was_not_written_for_is_refused_by_name(op, changed):
    said = native.supports(CallSpec(op, SERVED[op] | changed))
    assert isinstance(said, No) and all(name in said.reason and str(value) in said.reason for name, value in changed.items())
    assert native.supports(CallSpec(op, SERVED[op])) == Yes()


@pytest.mark.parametrize(("op", "name"), [(op, name) for op, known in SERVED.items() for name in known])
def test_what_a_binding_leaves_open_is_not_promised(op, name):
    assert isinstance(native.supports(CallSpec(op, {key: value for key, value in SERVED[op].items() if key != name})), No)


@pytest.mark.parametrize(("op", "served"), [
    ("quantise", lambda p: p["dtype"] == "bf16" and p["format"] == "fp8_32"),
    ("swiglu_quantise", lambda p: p["x"] == "bf16" and p["out"] == "u8"),
    ("draft_attention", lambda p: p["dtype"] == "bf16" and p["format"] == "fp8_32"),
    ("top_logprobs", lambda p: p["k"] <= 256),
])  # fmt: skip
def test_of_a_cards_cases_those_of_the_kernels_types_are_served(op, served):
    card = get_card(op)
    for case in card.enumerate_cases():
        answer = native.supports(call_spec(card, card.generate(case, 0, "cpu", prepare_canonical)))
        assert isinstance(answer, Yes) == served(case.params), case.id


@pytest.fixture(scope="module")
def layer():
    gen = torch.Generator().manual_seed(3)
    bench_layer_small.TABLE_ROWS = 4096  # an Engram table that a test can draw
    return bench_layer_small.weights(gen, "cpu"), bench_layer_small.activations(2, gen, "cpu"), gen


def test_every_call_of_the_benchmark_keeps_its_card_and_agrees_with_its_own_reference(layer):
    w, a, gen = layer
    for name, op, args in bench_layer_small.calls(w, a):
        assert bench_layer_small.check(name, op, get_card(op).reference, args) == ""
        get_card(op).reference(*args)
    table = bench_layer_small.engram(gen, "cpu")
    for name, op, args, layers in bench_layer_small.source_calls(w, a, table, gen):
        assert bench_layer_small.check(name, op, get_card(op).reference, args) == "" and 1 <= layers <= 8


def test_a_wrong_result_is_named(layer):
    def twice(*args):
        get_card("rms_norm").reference(*args)
        args[-2].add_(1)

    name, op, args = list(bench_layer_small.calls(*layer[:2]))[1]
    assert "out_codes differ" in bench_layer_small.check(name, op, twice, args)
