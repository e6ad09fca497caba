"""A rank's slice: which layers it has, that it computes on numbers, and the arithmetic from its parts to the whole model."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace

import pytest
import torch
from deepinfer_cpu.backend import CpuBackend
from deepinfer_hal.card import get_card
from deepinfer_hal.kernel import No, Yes, reference_kernel
from deepinfer_hal.row_layout import read_rows
from recording_backend import RecordingBackend

from deepinfer.bench import op_times, rank_slice, slice_plot
from deepinfer.bench.extrapolate import PUBLISHED_DECODE, extrapolate, published_scaled, scaled, whole_model_ops
from deepinfer.bench.phases import Phases
from deepinfer.bench.rank_slice import measure
from deepinfer.bench.slice_config import choose_layers, kind_counts, make_slice
from deepinfer.bench.slice_gap import measure_gap, step_times
from deepinfer.bench.slice_model import SliceModel
from deepinfer.bench.slice_workload import Workload
from deepinfer.bench.v41 import released_config
from deepinfer.cli.main import main
from deepinfer.errors import ConfigError
from deepinfer.model import attention
from deepinfer.model_config import ModelConfig
from deepinfer.model_path import resolve_model

RELEASED = ModelConfig.from_dict(released_config())
NANO = ModelConfig.from_folder(resolve_model("nano"))
KINDS = {"window": 2, "source-2": 3, "reuse-2": 15, "source-1": 1, "reuse-1": 15, "pool-1": 4}


class TestTheLayersOfASlice:
    def test_the_released_model_has_six_kinds(self):
        assert kind_counts(RELEASED) == KINDS

    @pytest.mark.parametrize("layers", [2, 4, 6, 9, 17, 40])
    def test_every_layer_keeps_its_kind_and_finds_its_source(self, layers):
        cut = make_slice(RELEASED, layers, 64)
        whole = RELEASED.text.layers
        for topology, layer in zip(cut.config.text.layers, cut.layers, strict=True):
            before = whole[layer]
            for name in ("ratio", "owns_kv", "owns_index_query", "uses_pool", "builds_pool", "rope"):
                assert getattr(topology, name) == getattr(before, name), (layer, name)
        assert len(cut.kinds) == layers and (layers < 6 or set(cut.kinds) == set(KINDS))

    def test_more_layers_go_where_the_model_has_most(self):
        kinds = make_slice(RELEASED, 12, 64).kinds
        assert kinds.count("reuse-2") + kinds.count("reuse-1") == 8

    def test_all_layers_are_the_model(self):
        assert choose_layers(RELEASED, 40) == list(range(40))

    @pytest.mark.parametrize("ranks, experts, draft", [(64, 6, 3), (8, 48, 16), (1, 384, 128)])
    def test_a_rank_holds_its_share_of_experts(self, ranks, experts, draft):
        text = make_slice(RELEASED, 6, ranks).config.text
        assert (text.n_routed_experts, text.dspark_n_routed_experts) == (experts, draft)

    @pytest.mark.parametrize("layers, ranks, key", [(0, 1, "layers"), (41, 1, "layers"), (6, 0, "ranks"), (6, 385, "ranks")])
    def test_what_cannot_be_is_refused_by_name(self, layers, ranks, key):
        with pytest.raises(ConfigError, match=key):
            make_slice(RELEASED, layers, ranks)


def test_random_caches_hold_canonical_numbers_and_sequences_share_no_block():
    model = SliceModel(CpuBackend(), 0, make_slice(NANO, 6, 2), sequences=3, context=300)
    assert model.context == 384 and len(set(model.block_tables(3).ravel().tolist())) == 9
    text, numerics = model.text, model.numerics
    for source in model.state.layout.sources:
        slots = torch.arange(source.block_rows * 9)
        for cache, form, width in (
            (model.state.main_rows(source.layer), numerics.main_format, text.head_dim),
            (model.state.index_rows(source.layer), numerics.index_format, text.index_head_dim),
        ):
            rows = read_rows(cache, slots, form, width, source.block_rows)
            assert rows.isfinite().all() and 0.05 < rows.std() < 20 and len(rows.unique(dim=0)) == len(rows)
    window = read_rows(model.state.windows, torch.arange(200), numerics.window_format, text.head_dim, 0)
    assert window.isfinite().all() and 0.05 < window.std() < 20


@pytest.fixture(scope="module", autouse=True)
def short_samples():
    """Times are not looked at here, so that one call a sample is enough."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op_times, "SAMPLES", 1)
        patch.setattr(op_times, "SAMPLE_SECONDS", 0.0)
        patch.setattr(op_times, "FEWEST_RUNS", 1)
        yield


@pytest.fixture(scope="module")
def result(short_samples):
    load = Workload(requests=(2,), verify=(2,), context=256, prefill=(200,), ops_at=(2,), gap_steps=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_slice, "DEFAULT_PROMPT_GRAPH_TOKENS", 199)
        return measure(RecordingBackend(), 0, make_slice(NANO, 6, 2), load)


class Marking(CpuBackend):
    """Marks of the host's clock, as a device's that does everything at once."""

    def mark(self, index):
        return HostMark()


class HostMark:
    def __init__(self):
        self.at = time.perf_counter()

    def elapsed_time(self, later):
        return 1e3 * (later.at - self.at)


SELECTING = {"sparse_attention", "attention_decode_layer"}
"""Ops that read rows which an earlier layer selected."""


def test_the_token_after_the_context_has_a_place_in_the_history():
    model = SliceModel(CpuBackend(), 0, make_slice(NANO, 2, 2), sequences=1, context=256)
    step = rank_slice.StepBench(model, rank_slice.BoundNetwork(model, 5), 1, 1, before=255)
    assert int(step.positions.max()) < model.state.history.shape[1]


def test_an_op_is_timed_over_the_rows_that_its_own_layer_selected():
    held = []

    class Watching(CpuBackend):
        def kernels(self, index):
            return [replace(one, fn=watched(one)) if one.op in SELECTING else one for one in super().kernels(index)]

    def watched(kernel):
        def call(*args):
            given = get_card(kernel.op).bind_args(args, {})
            if given["rows"] is not None:
                held.append(int(given["rows"].max()) < given["block_table"].shape[1] * given["block_rows"])
            kernel.fn(*args)

        return call

    found = measure(Watching(), 0, make_slice(NANO, 6, 2), Workload((1,), (), 128, (), (1,)))
    assert {op["op"] for op in found["steps"][0]["ops"]} & SELECTING and held and all(held)


def test_a_prefill_whose_index_scores_come_in_pieces_gives_the_same_logits(monkeypatch):
    def logits(score_bytes):
        monkeypatch.setattr(attention, "_SCORE_BYTES", score_bytes)
        model = SliceModel(CpuBackend(), 0, make_slice(NANO, 6, 2), sequences=1, context=384)
        step = rank_slice.StepBench(model, rank_slice.BoundNetwork(model, 300), 1, 300, before=0)
        pieces = []
        select = step.network.attention._select_rows
        monkeypatch.setattr(step.network.attention, "_select_rows", lambda *given: (pieces.append(1), select(*given)))
        assert step.meta.flat
        step.whole()
        return len(pieces), step.network.outputs.rows(1).logits.clone()

    whole, in_pieces = logits(32 << 20), logits(64 << 10)
    assert in_pieces[0] > 4 * whole[0] and whole[1].isfinite().all() and torch.equal(whole[1], in_pieces[1])


class TestMeasuring:
    def test_decode_steps_are_captured_whole_and_in_parts(self, result):
        decode, verify, prefill = result["steps"]
        assert [step["kind"] for step in result["steps"]] == ["decode", "verify", "prefill"]
        for step in (decode, verify):
            assert step["finite"] and step["whole"]["graph"] and all(part["graph"] for part in step["parts"].values())
        assert list(decode["parts"])[-3:] == ["engram", "features", "head"]
        assert list(verify["parts"])[-4:] == ["engram", "features", "head", "draft"]
        assert prefill["finite"] and not prefill["whole"]["graph"] and "draft" not in prefill["parts"]

    @pytest.mark.parametrize("tokens", [8, 200])
    def test_a_prefill_that_the_engine_would_capture_is_captured(self, tokens):
        (prefill,) = measure(RecordingBackend(), 0, make_slice(NANO, 6, 2), Workload((), (), 0, (tokens,), ()))["steps"]
        assert prefill["finite"] and prefill["whole"]["graph"] and all(part["graph"] for part in prefill["parts"].values())

    def test_every_op_is_timed_beside_its_floor_and_its_calls_are_told_apart_by_part(self, result):
        ops = {(op["op"], op["role"]): op for op in result["steps"][0]["ops"]}
        assert ops["grouped_gemm", "experts_down"]["calls"] == 6
        assert ops["sparse_attention", "source-2"]["calls"] == 1
        assert all(op["seconds"] >= 0 and op["floor_seconds"] >= 0 and op["bytes"] > 0 for op in ops.values())
        assert sum(op["share"] for op in ops.values()) == pytest.approx(1)

    def test_ops_of_the_draft_block_are_timed_apart_and_in_a_verify_step_alone(self, result):
        decode, verify = ({(op["op"], op["role"]): op for op in step["ops"]} for step in result["steps"][:2])
        assert not any("draft" in op["parts"] or role.startswith("draft ") for (_, role), op in decode.items())
        layers, draft = verify["grouped_gemm", "experts_down"], verify["grouped_gemm", "draft experts_down"]
        assert layers["calls"] == 6 and all(part.startswith("layer ") for part in layers["parts"])
        assert draft["parts"] == ["draft"] * 3 and draft["flops"] != layers["flops"]
        head, draft_head = verify["linear", "head"], verify["linear", "draft head"]
        assert (head["parts"], draft_head["parts"]) == (["head"], ["draft"])
        assert head["dtype"] == draft_head["dtype"] == "bfloat16"
        assert 4 * draft_head["flops"] == 3 * head["flops"]  # three drafts a request, four tokens to verify
        assert verify["markov_logits", "draft markov_embed"]["calls"] == verify["sample", "draft"]["calls"] == 3
        assert {role for op, role in verify if op == "draft_attention"} == {"draft"}

    def test_ops_of_a_verify_step_can_be_asked_for_alone(self):
        load = Workload((1,), (1,), 128, (), (), gap_steps=2, verify_ops_at=(1,))
        found = measure(CpuBackend(), 0, make_slice(NANO, 2, 2), load)
        assert [(step["kind"], "ops" in step) for step in found["steps"]] == [("decode", False), ("verify", True)]
        assert found["gaps"] == []

    def test_the_whole_model_is_the_sum_of_its_terms(self, result):
        assert result["missing_kinds"] == [] and len(result["whole_model"]) == 4
        assert len(result["suite"]["source_sha256"]) == 64 and result["build"]
        for one in result["whole_model"]:
            assert one["seconds"] == pytest.approx(sum(term["count"] * term["seconds"] for term in one["terms"]))
        counts = {term["name"]: term["count"] for term in result["whole_model"][0]["terms"]}
        assert {kind: counts[kind] for kind in kind_counts(NANO)} == kind_counts(NANO)

    def test_a_replayed_prefill_counts_the_layers_before_the_first_of_ratio_1(self, result):
        whole, replayed = result["whole_model"][-2:]
        assert (whole["kind"], replayed["kind"]) == ("prefill", "replayed prefill")
        kinds = [term["name"] for term in replayed["terms"]]
        assert "reuse-2" in kinds and "reuse-1" not in kinds and replayed["seconds"] < whole["seconds"]

    def test_the_engines_own_loop_tells_the_gap_between_steps(self, result):
        (gap,) = result["gaps"]
        assert gap["graphs"] > 0 and gap["gap_seconds"] == pytest.approx(gap["step_seconds"] - gap["device_seconds"])
        assert gap["between_share"] is None  # host memory has no marks

    def test_idle_time_between_steps_is_what_lies_between_their_marks(self):
        class At(float):
            def elapsed_time(self, later):
                return later - self

        marks = [(At(0), At(9)), (At(9.5), At(19)), (At(19), At(29)), (At(31), At(40))]
        told = step_times(marks, host_seconds=1.0)
        assert told["step_seconds"] == pytest.approx(31e-3 / 3) and told["between_seconds"] == pytest.approx(2.5e-3 / 3)
        assert told["between_largest"] == pytest.approx(2e-3) and told["between_share"] == pytest.approx(2.5 / 31)

    def test_the_loops_marks_open_and_close_every_step(self):
        backend = Marking()
        model = SliceModel(backend, 0, make_slice(NANO, 2, 2), 2, 128)
        gap = measure_gap(backend, 0, model, 2, 4, Phases())
        assert gap["step_seconds"] == pytest.approx(gap["host_seconds"], rel=0.8)
        assert 0 < gap["between_seconds"] < gap["step_seconds"] and gap["between_share"] < 1

    def test_kernels_are_named(self, result):
        assert any(kernel["op"] == "sparse_attention" and kernel["symbol"] for kernel in result["kernels"])

    def test_a_kernel_is_named_if_it_served_in_any_step_and_not_if_it_was_bound_alone(self):
        def known(name):
            return lambda call: Yes() if call.statics.get(name) else No(f"{name} is not known")

        class Picky(CpuBackend):
            def kernels(self, index):
                made = [
                    replace(
                        reference_kernel(get_card(op)), provider="own", symbol=f"own_{op}", supports=known(name), priority=200
                    )
                    for op, name in (("draft_attention", "window_format"), ("top_logprobs", "logits"))
                ]
                return [*super().kernels(index), *made]

        found = measure(Picky(), 0, make_slice(NANO, 2, 2), Workload((1,), (1,), 128, (64,), ()))
        assert not any("error" in step for step in found["steps"]) and found["steps"][-1]["kind"] == "prefill"
        named = {op: [one["symbol"] for one in found["kernels"] if one["op"] == op] for op in ("draft_attention", "top_logprobs")}
        assert named == {"draft_attention": ["own_draft_attention"], "top_logprobs": []}
        assert len({(one["op"], one["role"], one["symbol"]) for one in found["kernels"]}) == len(found["kernels"])
        assert "draft_attention" not in found["reference_fallbacks"]

    def test_a_step_that_fails_is_told_and_the_others_go_on(self, monkeypatch):
        class Failing(rank_slice.StepBench):
            def __init__(self, model, bound, requests, *rest):
                if requests == 2:
                    raise RuntimeError("no such size")
                super().__init__(model, bound, requests, *rest)

        monkeypatch.setattr(rank_slice, "StepBench", Failing)
        found = measure(CpuBackend(), 0, make_slice(NANO, 2, 2), Workload((2, 1), (2, 1), 128, (), ()))
        assert [step.get("error") for step in found["steps"]] == ["RuntimeError: no such size"] * 2 + [None] * 2
        assert found["whole_model"] == [] and found["missing_kinds"]


def test_a_device_that_a_step_left_unusable_loses_no_result(monkeypatch):
    ceilings = [rank_slice.measure_ceilings(CpuBackend(), 0, 1 << 20)]
    monkeypatch.setattr(rank_slice, "measure_ceilings", lambda *given: ceilings.pop())
    found = measure(CpuBackend(), 0, make_slice(NANO, 2, 2), Workload((1,), (1,), 128, (), ()))
    assert found["steps"][0]["finite"] and found["ceilings"]["bandwidth"] > 0


def test_steps_after_the_time_given_are_left_out_and_say_so():
    found = measure(CpuBackend(), 0, make_slice(NANO, 2, 2), Workload((1,), (1,), 128, (64,), (1,), gap_steps=1, seconds=1e-6))
    assert {one["error"] for one in (*found["steps"], *found["gaps"])} == {"not run: the time given to the benchmark was spent"}


def test_an_interrupt_loses_no_result(monkeypatch):
    class Interrupted(rank_slice.StepBench):
        def __init__(self, model, bound, requests, tokens, *rest):
            if tokens > 1:
                raise KeyboardInterrupt
            super().__init__(model, bound, requests, tokens, *rest)

    monkeypatch.setattr(rank_slice, "StepBench", Interrupted)
    found = measure(CpuBackend(), 0, make_slice(NANO, 2, 2), Workload((1,), (1,), 128, (64,), (1,), gap_steps=1))
    over = "not run: the benchmark was interrupted"
    assert [step.get("error") for step in found["steps"]] == [None, "interrupted", over]
    assert found["steps"][0]["finite"] and found["gaps"][0]["error"] == over


class TestArithmetic:
    def result(self):
        def step(kind, tokens, **parts):
            timed = {name.replace("_", " "): {"median": seconds} for name, seconds in parts.items()}
            return {"kind": kind, "requests": 10, "tokens": tokens, "parts": timed}

        layers = {"layer 0 window": 1.0, "layer 1 reuse-1": 2.0, "layer 2 reuse-1": 4.0}
        steps = [step("decode", 1, head=5.0, draft=7.0), step("verify", 4, head=6.0, draft=7.0)]
        for one in steps:
            one["parts"] = {**{name: {"median": seconds} for name, seconds in layers.items()}, **one["parts"]}
        return {
            "kinds": ["window", "reuse-1", "reuse-1"], "model_kinds": {"window": 2, "reuse-1": 10}, "model_engram_layers": 0,
            "experts": 6, "ceilings": {"bandwidth": 100.0}, "steps": steps,
        }  # fmt: skip

    def test_layers_count_by_kind_and_the_missing_gate_columns_by_their_bytes(self):
        decode, verify = extrapolate(self.result(), hidden=50, experts=16)
        gate = 12 * (16 - 6) * 50 * 2 / 100.0
        assert decode["seconds"] == pytest.approx(2 * 1 + 10 * 3 + 5 + gate)
        assert decode["tokens_per_second"] == pytest.approx(10 / decode["seconds"])
        assert verify["seconds"] == pytest.approx(2 * 1 + 10 * 3 + 6 + gate + 7)
        assert verify["tokens_per_second"] == pytest.approx(10 * 3.25 / verify["seconds"])

    def test_ops_count_as_often_as_their_parts(self):
        op = {"op": "linear", "role": "wo_b", "calls": 3, "parts": ["layer 0 window", "layer 1 reuse-1", "draft"]}
        step = {"kind": "verify", "ops": [{**op, "seconds": 3.0, "floor_seconds": 1.5}]}
        (row,) = whole_model_ops(self.result(), step)
        assert row["seconds"] == pytest.approx(2 + 5 + 1) and row["floor_seconds"] == pytest.approx(4)

    def test_the_published_curve_is_scaled_point_by_point(self):
        assert scaled(PUBLISHED_DECODE, 0.5) == [(8, 1300), (256, 13150)]
        assert published_scaled("verify", 8)["by_bandwidth"] == pytest.approx(2600 * 0.6)
        assert published_scaled("verify", 16) == published_scaled("decode", 8) == {}


class TestTheCommand:
    def test_prints_the_arithmetic_and_stores_a_report(self, tmp_path, capsys):
        report = tmp_path / "slice.json"
        arguments = [
            "bench", "rank-slice", "--backend", "cpu", "--model", "nano", "--ranks", "2", "--requests", "1", "--context", "128",
            "--prefill", "-", "--ops-at", "1", "--gap-steps", "2", "--report", str(report),
        ]  # fmt: skip
        assert main(arguments) == 0
        shown = capsys.readouterr().out
        assert "Not measured: exchanges between ranks" in " ".join(shown.split())
        assert "whole model, decode 1 requests: 1 x" in shown
        stored = json.loads(report.read_text())
        assert stored["benchmark"] == "rank-slice" and stored["results"]["slices"][0]["whole_model"]

    @pytest.mark.parametrize(
        "options, named",
        [
            (["--requests", "8,0"], "requests: 0 is no size of a step"), (["--prefill", "0"], "prefill: 0 is no size"),
            (["--requests", "-", "--prefill", "-"], "neither a decode nor a prefill step"),
            (["--verify", "8", "--verify-ops-at", "8,16"], "verify_ops_at: 16 is none of --verify 8"),
            (["--context", "3"], "context: 3 does not hold the tokens of a verify step: give 4"),
            (["--report", "FILE/slice.json"], "FILE/slice.json cannot be written"),
            (["--plot", "p.png"], "needs matplotlib"),
        ],
    )  # fmt: skip
    def test_what_cannot_be_done_is_refused_before_anything_is_measured(self, options, named, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        (tmp_path / "FILE").touch()
        monkeypatch.setattr(rank_slice, "measure", lambda *given: pytest.fail("measured"))
        assert main(["bench", "rank-slice", "--backend", "cpu", "--model", "nano", "--ranks", "2", *options]) == 1
        assert named in capsys.readouterr().err

    def test_a_plot_needs_matplotlib_and_says_so(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        with pytest.raises(ConfigError, match="needs matplotlib"):
            slice_plot.plot(tmp_path / "p.png", [])
