"""Captured steps with prompts in them: the same bits as eager ones for prompts of any length, in chunks, together and beside
decoding sequences, whether or not they need the flat buffer; eager where no captured size holds them."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from deepinfer_hal.errors import BadCall
from deepinfer_hal.step import FlatSizes, empty_step, flat_sizes, pad_step, plan_step
from nano_models import nano_folder
from recording_backend import RecordingBackend

from deepinfer import LLM, SamplingParams
from deepinfer.cli.check import run_check
from deepinfer.config import EngineConfig
from deepinfer.errors import ConfigError
from deepinfer.model.graph_plan import GraphShape, graph_shapes, prompt_sizes
from deepinfer.model.state import BLOCK_TOKENS
from deepinfer.runner import load as loading
from deepinfer.runner.runner import Runner

sys.path.insert(0, str(Path(__file__).parents[2] / "tools/cuda"))

import graph_bits  # noqa: E402

LENGTHS = (1, 7, 8, 9, 40, 128, 129, 200)
"""Tokens of prompts: about the ring's spare rows (7), the window and a block."""


@pytest.fixture
def open_recording(monkeypatch):
    """Lets engines run on a backend that records captures; returns it."""

    def opened(**traits):
        backend = RecordingBackend(**traits)
        monkeypatch.setattr(loading, "open_backend", lambda name: (backend, 0))
        return backend

    return opened


def engine(**settings) -> LLM:
    sizes = {"max_model_len": 256, "max_num_seqs": 5, "max_num_batched_tokens": 256}
    return LLM(str(nano_folder("random")), backend="recording", **sizes | settings)


def prompts(lengths=LENGTHS):
    draw = np.random.default_rng(3)
    return [draw.integers(3, 2000, length).tolist() for length in lengths]


def generate(llm: LLM, lengths=LENGTHS, **params):
    """Tokens and log-probabilities of prompts of these lengths."""
    settings = [
        SamplingParams(max_tokens=2 + number % 5, temperature=0.8, seed=number, ignore_eos=True, logprobs=3, **params)
        for number in range(len(lengths))
    ]
    outputs = llm.generate(prompts(lengths), settings, use_tqdm=False)
    assert not any(output.error for output in outputs)
    return graph_bits.told(outputs), [output.prompt_logprobs for output in outputs]


class TestReplays:
    @pytest.mark.parametrize("overlap", [False, True])
    @pytest.mark.parametrize("chunk", [6, 40, 256])
    def test_they_give_the_bits_of_eager_steps(self, open_recording, chunk, overlap):
        open_recording()
        eager, captured = (engine(max_num_batched_tokens=chunk, enforce_eager=e, overlap=overlap) for e in (True, False))
        replayed, steps = graph_bits.count_replays(captured), graph_bits.count_steps(captured)
        assert generate(captured) == generate(eager)
        assert len(replayed) == len(steps) and sum(shape.prompts for shape, _ in replayed) >= 3

    def test_each_length_alone_and_a_long_prompt_over_several_blocks(self, open_recording):
        open_recording()
        sizes = {"max_model_len": 640, "max_num_batched_tokens": 300, "max_num_seqs": 2}
        eager, captured = (engine(enforce_eager=e, **sizes) for e in (True, False))
        for length in (5, 16, 17, 300, 630):
            assert generate(captured, [length]) == generate(eager, [length])

    def test_a_step_beside_decoding_sequences_that_needs_no_flat_buffer_is_replayed_through_one(self, open_recording):
        """Five rows of one prompt beside four that decode are more rows than there are decode sizes for."""
        open_recording()
        eager, captured = (engine(enforce_eager=e, overlap=False) for e in (True, False))
        told = []
        for llm in (eager, captured):
            core = llm.engine
            replayed = graph_bits.count_replays(llm)
            for number, ids in enumerate(prompts([3, 30, 140, 5])):
                core.add_request(str(number), ids, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=2))
            for _ in range(3):
                core.step()
            replayed.clear()
            core.add_request("late", prompts([5])[0], SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
            core.step()
            if llm is captured:
                assert replayed == [(GraphShape(256, 5, 16, prompts=True), 5)]
            outputs = []
            while core.requests:
                outputs += [one for one in core.step() if one.finished]
            told.append({one.request_id: list(one.outputs[0].token_ids) for one in outputs})
        assert told[0] == told[1] and len(told[0]) == 5

    def test_the_rows_of_a_prompt_that_are_scored_stay_eager(self, open_recording):
        open_recording()
        eager, captured = (engine(enforce_eager=e) for e in (True, False))
        replayed = graph_bits.count_replays(captured)
        told = generate(captured, [40], prompt_logprobs=2)
        assert told == generate(eager, [40], prompt_logprobs=2) and told[1][0][1]
        assert not any(shape.prompts for shape, _ in replayed)

    def test_the_window_that_a_replay_leaves_is_the_one_that_an_eager_step_leaves(self, open_recording):
        """Chunks and later single tokens of one sequence, eager and captured in any order, give one state."""
        open_recording()
        states = []
        for captured in ((True, True, True), (False, False, False), (True, False, True), (False, True, False)):
            llm = engine(max_num_batched_tokens=100, overlap=False)
            core, runner = llm.engine, llm.engine.runner
            graphs, turns = runner.graphs, list(captured)
            core.add_request("0", prompts([230])[0], SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
            for turn in turns:
                runner.graphs = graphs if turn else None
                core.step()
            states.append((runner.state.windows.clone(), runner.state.blocks.clone(), runner.state.history.clone()))
        for state in states[1:]:
            assert all(torch.equal(one, other) for one, other in zip(states[0], state, strict=True))


    @pytest.mark.parametrize("name", ["load_src", "save_dst"])
    def test_copies_that_are_left_out_would_show(self, open_recording, monkeypatch, name):
        """The tests' own check: without the window's way into the flat buffer, or back, replays go wrong."""
        open_recording()
        eager, captured = (engine(max_num_batched_tokens=40, enforce_eager=e) for e in (True, False))

        def without(meta, **sizes):
            padded = pad_step(meta, **sizes)
            return replace(padded, **{name: np.full_like(getattr(padded, name), -1)})

        monkeypatch.setattr("deepinfer.runner.graphs.pad_step", without)
        assert generate(captured) != generate(eager)


class TestWhatIsCaptured:
    def test_a_step_that_no_size_holds_is_eager(self, open_recording):
        open_recording()
        eager, captured = engine(enforce_eager=True), engine(max_prompt_graph_tokens=100)
        replayed, steps = graph_bits.count_replays(captured), graph_bits.count_steps(captured)
        assert generate(captured) == generate(eager)
        assert any(rows > 100 for rows in steps) and all(shape.rows <= 100 for shape, _ in replayed)
        assert any(shape.prompts for shape, _ in replayed)

    @pytest.mark.parametrize(("sequences", "most"), [(8, 7), (5, 256), (7, 6)])
    def test_steps_that_only_decode_have_graphs_of_their_own(self, open_recording, sequences, most):
        open_recording()
        graphs = engine(max_num_seqs=sequences, max_prompt_graph_tokens=most).engine.runner.graphs
        layout = graphs.network.state.layout
        for count in range(1, sequences + 1):
            ones, starts = np.ones(count, np.int32), np.full(count, 20, np.int32)
            meta = plan_step(
                np.arange(count + 1, dtype=np.int32), starts, ones.cumsum(dtype=np.int32) - 1, ones[:, None].cumsum(0, np.int32),
                window=layout.window, ring_rows=layout.ring_rows, slot_rows=layout.slot_rows, ratios=layout.ratios,
                block_tokens=BLOCK_TOKENS,
            )  # fmt: skip
            assert not graphs.choose(meta, count).prompts, count

    def test_none_for_a_limit_of_0_and_none_at_all_when_eager_is_enforced(self, open_recording):
        backend = open_recording()
        runner = engine(max_prompt_graph_tokens=0).engine.runner
        assert runner.graphs.count == len(graph_shapes(5, 256)) and not any(one.prompts for one in runner.graphs.shapes)
        captures = backend.graphs(0).captures
        assert engine(enforce_eager=True).engine.runner.graphs is None and backend.graphs(0).captures == captures

    def test_none_where_the_copies_of_window_rows_wait(self, open_recording):
        open_recording(waiting=frozenset({"copy_rows"}))
        graphs = engine().engine.runner.graphs
        assert "copy_rows" in graphs.reason and graphs.count == 0

    def test_padding_alone_touches_no_state(self, open_recording):
        open_recording()
        config = EngineConfig.create(
            model=str(nano_folder("random")), backend="recording", max_model_len=512, max_num_seqs=3, max_num_batched_tokens=140
        )
        runner = Runner.from_config(config)
        tensors = [runner.state.windows, runner.state.blocks, runner.state.history, *runner.state.carry.values()]
        for tensor in tensors:
            tensor.fill_(3)
        runner.warm_up()
        assert runner.graphs.count == len(graph_shapes(3, 512, max_prompt_rows=140))
        assert all((tensor == 3).all() for tensor in tensors)

    def test_a_larger_eager_step_leaves_the_flat_buffer_where_graphs_have_it(self, open_recording):
        open_recording()
        runner = engine(max_prompt_graph_tokens=64).engine.runner
        before = runner.network.attention.flat.data_ptr()
        list(runner.prefill(np.arange(250, dtype=np.int32)))
        assert runner.network.attention.flat.data_ptr() == before

    @pytest.mark.parametrize("value", [-1, "many"])
    def test_a_limit_that_is_none_is_refused(self, value):
        with pytest.raises(ConfigError, match="max_prompt_graph_tokens"):
            EngineConfig.create(model="nano", max_prompt_graph_tokens=value)
        with pytest.raises(ConfigError, match="max_prompt_graph_tokens"):
            run_check("nano", max_prompt_graph_tokens=value)

    def test_a_plan_takes_what_an_engine_takes(self, monkeypatch):
        backend = RecordingBackend()
        monkeypatch.setattr("deepinfer_hal.registry.open_backend", lambda spec: (backend, 0))
        plans = [run_check("nano", "recording", max_prompt_graph_tokens=value).plan.graphs for value in ("1k", 1024, 0, "0")]
        assert plans[0] == plans[1] and plans[2] == plans[3] and not plans[2].prompt_rows
        with pytest.raises(ConfigError, match="max_prompt_graph_tokens"):
            run_check("nano", "recording", max_prompt_graph_tokens="2m")


class TestPlannedSizes:
    @pytest.mark.parametrize("most", [1, 16, 17, 300, 1024, 2048, 5000])
    def test_go_up_to_the_largest_step(self, most):
        sizes = prompt_sizes(most)
        assert sizes[-1] == most and list(sizes) == sorted(set(sizes))
        for before, after in zip(sizes, sizes[1:], strict=False):
            assert after <= (1.25 if before >= 256 else 2) * before

    def test_hold_as_many_requests_as_there_may_be(self):
        shapes = [one for one in graph_shapes(64, 8192, max_prompt_rows=1024) if one.prompts]
        sizes = (16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
        assert {(one.rows, one.requests) for one in shapes} == {(rows, min(rows, 64)) for rows in sizes}
        assert len(shapes) == 2 * len(sizes) and shapes[0] == GraphShape(8192, 64, 1024, prompts=True)

    def test_have_fewer_limits_of_visible_tokens_than_decode_steps(self):
        assert {one.tokens for one in graph_shapes(4, 131072, max_prompt_rows=64) if one.prompts} == {4096, 65536, 131072}


class TestPadding:
    def plan(self, lengths, starts, flat=False):
        cu_q = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        tables = np.arange(len(lengths) * 4, dtype=np.int32).reshape(-1, 4)
        return plan_step(
            cu_q, np.array(starts, np.int32), np.arange(len(lengths), dtype=np.int32), tables, window=128, ring_rows=134,
            slot_rows=134, ratios=(1, 2), block_tokens=128, flat=flat,
        )  # fmt: skip

    def test_copies_are_padded_by_rows_that_copy_nothing(self):
        plan, sizes = self.plan([1, 150], [200, 7]), flat_sizes(3, 160, window=128, ring_rows=134)
        assert sizes == FlatSizes(3 * 127 + 160, 3 * 127, 160)
        padded = pad_step(plan, requests=3, rows=160, columns=3, tokens=384, flat=sizes)
        assert padded.flat and padded.flat_rows == sizes.rows
        for name, size in (("load_src", 381), ("load_dst", 381), ("save_src", 160), ("save_dst", 160)):
            kept = getattr(plan, name).tolist()
            assert len(kept) and getattr(padded, name).tolist() == kept + [-1] * (size - len(kept))

    def test_no_step_needs_more_of_the_flat_buffer_than_is_counted(self):
        for lengths, starts in (([1] * 4, [300] * 4), ([200], [300]), ([130, 1, 20], [0, 127, 128]), ([500], [0])):
            plan = self.plan(lengths, starts, flat=True)
            sizes = flat_sizes(len(lengths), sum(lengths), window=128, ring_rows=134)
            assert plan.flat and plan.flat_rows <= sizes.rows
            assert len(plan.load_src) <= sizes.loads and len(plan.save_src) <= sizes.saves

    def test_refuses_a_plan_that_goes_another_way_or_does_not_fit(self):
        fitting = {"requests": 2, "rows": 160, "columns": 4, "tokens": 512}
        sizes = flat_sizes(2, 160, window=128, ring_rows=134)
        for plan, flat in (
            (self.plan([1, 150], [200, 7]), None), (self.plan([1, 4], [200, 7]), sizes),
            (self.plan([1, 150], [200, 7]), FlatSizes(sizes.rows, 3, sizes.saves)),
            (self.plan([1, 150], [200, 7]), FlatSizes(100, sizes.loads, sizes.saves)),
        ):  # fmt: skip
            with pytest.raises(BadCall, match="does not fit"):
                pad_step(plan, **fitting, flat=flat)

    def test_an_empty_plan_fits_both_ways(self):
        sizes = flat_sizes(2, 8, window=128, ring_rows=134)
        padded = pad_step(empty_step((1, 2)), requests=2, rows=8, columns=1, tokens=128, flat=sizes)
        assert padded.flat and (padded.load_src == -1).all() and len(padded.load_src) == 254
