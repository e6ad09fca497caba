"""Which calls the CUDA C++ kernels of a layer's small ops and of sampling take, and what the benchmark of those ops runs."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from deepinfer_cuda import gpu, kernels, native
from deepinfer_hal.card import get_card
from deepinfer_hal.errors import Unsupported
from deepinfer_hal.kernel import CallSpec, Kernel, No, Yes, reference_kernel
from deepinfer_hal.statics import call_spec
from deepinfer_hal.weights import prepare_canonical

sys.path[:0] = [str(Path(__file__).parents[2] / part) for part in ("tools", "tools/cuda")]

import bench_layer_small  # noqa: E402

SITE = {"streams": "bf16", "out": "bf16", "m": 4, "H": 5120}


@pytest.mark.parametrize(("changed", "answer"), [
    ({}, Yes), ({"H": 256}, Yes), ({"streams": "f32"}, No), ({"out": "f32"}, No), ({"m": 2}, No), ({"H": 80}, No),
    ({"m": None}, No), ({"y": None}, Yes), ({"y": "bf16"}, Yes), ({"y": "f32"}, No),
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
    "unpermute": {"rows": "bf16", "out": "bf16", "k": 6, "H": 5120},
    "route_topk": {"E": 384, "k": 6},
    "permute": {},
}


@pytest.mark.parametrize(("op", "changed"), [
    ("quantise", {"x": "f32"}), ("quantise", {"format": "fp4_16"}), ("swiglu_quantise", {"out": "bf16"}),
    ("swiglu_quantise", {"gate_up": "f32"}), ("top_logprobs", {"k": 257}), ("draft_attention", {"window_format": "f32"}),
    ("draft_attention", {"h": 65}), ("draft_attention", {"D": 256}), ("draft_attention", {"q": "f32"}),
    ("unpermute", {"rows": "f32"}), ("unpermute", {"shared": "f32"}), ("unpermute", {"k": 9}), ("unpermute", {"H": 100}),
    ("route_topk", {"E": 513}), ("route_topk", {"k": 9}),
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
    ("unpermute", lambda p: p["dtype"] == "bf16"),
    *[(op, lambda p: True) for op in ("mask_logits", "nan_row_flags", "permute", "route_topk", "sample", "verify_drafts")],
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


@pytest.fixture
def two_providers(monkeypatch):
    """A GPU that is offered a portable kernel for every op of the layer and of sampling, and the CUDA C++ ones."""

    def kernel(op: str, provider: str, **more) -> Kernel:
        return replace(reference_kernel(get_card(op)), provider=provider, symbol=f"{provider}::{op}", **more)

    ops = ("rms_norm", "quantise", "top_logprobs", "draft_attention")
    made = [kernel(op, "triton", priority=50) for op in ops]
    made += [kernel(op, "cuda", priority=native.PRIORITY, supports=native.supports) for op in ops[1:]]
    monkeypatch.setattr(gpu, "gpu_of", lambda index: None)
    monkeypatch.setattr(kernels, "kernels_of", lambda found: made)


def test_each_call_of_the_benchmark_is_run_by_the_kernel_that_serves_it(layer, two_providers):
    w, a, gen = layer
    offered = bench_layer_small.offered(None, {})
    plan = [*bench_layer_small.calls(w, a), *bench_layer_small.source_calls(w, a, bench_layer_small.engram(gen, "cpu"), gen)]
    served = {name: bench_layer_small.kernel_of(offered, op, args).symbol for name, op, args, *_ in plan if op in offered}
    assert served == {"query norm": "triton::rms_norm", "output codes": "cuda::quantise", "index codes": "triton::quantise"}
    codes = next(call for call in bench_layer_small.source_calls(w, a, bench_layer_small.engram(gen, "cpu"), gen)
                 if call[0] == "index codes")  # fmt: skip
    with pytest.raises(Unsupported, match="'quantise': cuda::quantise: "):
        bench_layer_small.kernel_of(bench_layer_small.offered("cuda", {}), *codes[1:3])
    with pytest.raises(Unsupported, match="'rope': none is offered"):
        bench_layer_small.kernel_of(offered, "rope", plan[2][2])


@pytest.mark.parametrize("op", ["top_logprobs", "draft_attention"])
def test_a_call_of_sampling_is_run_by_the_kernel_of_its_statics(op, two_providers):
    offered, card = bench_layer_small.offered(None, {}), get_card(op)
    for case in card.enumerate_cases():
        args = card.generate(case, 0, "cpu", prepare_canonical)
        wanted = "cuda" if native.supports(call_spec(card, args)) == Yes() else "triton"
        assert bench_layer_small.kernel_of(offered, op, tuple(args.values())).provider == wanted
