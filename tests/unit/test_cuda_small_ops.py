"""Which calls the CUDA C++ kernels of a layer's small ops take, and what the benchmark of those ops runs."""

import sys
from pathlib import Path

import pytest
import torch
from deepinfer_cuda import native
from deepinfer_hal.card import get_card
from deepinfer_hal.kernel import CallSpec, No, Yes

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
