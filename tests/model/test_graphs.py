"""Captured decode steps: the same bits as eager ones, whatever the padding, and eager steps with a reason where an op waits.

Steps with prompts in them: test_prompt_graphs.py.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from deepinfer_hal.errors import BackendError, BadCall
from deepinfer_hal.step import empty_step, pad_step, plan_step
from nano_models import nano_folder
from recording_backend import RecordingBackend, RecordingGraphs

from deepinfer import LLM, SamplingParams
from deepinfer.cli.check import check_command, run_check
from deepinfer.config import EngineConfig
from deepinfer.model.graph_plan import GraphShape, capture_sizes, graph_shapes, token_limits
from deepinfer.runner import load as loading
from deepinfer.runner.runner import Runner

sys.path.insert(0, str(Path(__file__).parents[2] / "tools/cuda"))

import graph_bits  # noqa: E402

PROMPTS = [[5, 9, 14], list(range(20, 170)), [7] * 40, [3, 1, 4, 1, 5], [600, 601, 602]]
LENGTHS = [12, 5, 9, 12, 3]
"""Sequences end at different steps, so that batches shrink through several padded sizes."""


def generate(monkeypatch, backend, **settings):
    """(tokens and log-probabilities of every prompt, the engine's graphs)."""
    monkeypatch.setattr(loading, "open_backend", lambda name: (backend, 0))
    sizes = {"max_model_len": 256, "max_num_seqs": 5, "max_prompt_graph_tokens": 0}
    llm = LLM(str(nano_folder("random")), backend="recording", **sizes | settings)
    params = [SamplingParams(max_tokens=n, temperature=0.8, seed=n, ignore_eos=True, logprobs=3) for n in LENGTHS]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert not any(output.error for output in outputs)
    choices = [output.outputs[0] for output in outputs]
    told = [
        (one.token_ids, [[(t, p.logprob) for t, p in entry.items()] for entry in one.logprobs]) for one in choices
    ]  # fmt: skip
    return told, llm.engine.runner.graphs


@pytest.fixture(scope="module")
def eager():
    with pytest.MonkeyPatch.context() as patch:
        backend = RecordingBackend()
        told, graphs = generate(patch, backend, enforce_eager=True)
        assert graphs is None and backend.graphs(0).captures == 0
        return told


class TestReplays:
    @pytest.mark.parametrize("overlap", [False, True])
    def test_they_give_the_bits_of_eager_steps(self, monkeypatch, eager, overlap):
        backend = RecordingBackend()
        told, graphs = generate(monkeypatch, backend, overlap=overlap)
        assert told == eager
        assert graphs.reason is None and graphs.count == len(graph_shapes(5, 256)) == backend.graphs(0).captures
        assert backend.graphs(0).replays >= max(LENGTHS) - 2

    def test_a_value_frozen_on_the_host_would_show(self, monkeypatch, eager):
        """The stand-in's own check: with the fixed buffer never filled again, replays go wrong."""
        from deepinfer.runner.staging import Staging

        fills, fill = [], Staging.fill

        def fill_at_warm_up(self, packed, arrays):
            fills.append(len(arrays))
            if len(fills) <= len(graph_shapes(5, 256)):
                fill(self, packed, arrays)

        monkeypatch.setattr(Staging, "fill", fill_at_warm_up)
        told, _ = generate(monkeypatch, RecordingBackend())
        assert told != eager and len(fills) > len(graph_shapes(5, 256))


class TestAnOpThatWaits:
    @pytest.mark.parametrize("op, within", [("compress_kv", ""), ("grouped_gemm", " \\(in moe_layer\\)")])
    def test_keeps_the_step_eager_and_is_named(self, monkeypatch, eager, op, within):
        backend = RecordingBackend(waiting=frozenset({op}))
        told, graphs = generate(monkeypatch, backend)
        assert told == eager and backend.graphs(0).captures == 0 and graphs.count == 0
        assert re.search(f"no kernel that a graph can hold serves {op}{within or ' '}", graphs.reason)

    def test_matters_only_if_the_step_calls_it(self, monkeypatch, eager):
        told, graphs = generate(monkeypatch, RecordingBackend(waiting=frozenset({"draft_attention", "mask_logits", "sample"})))
        assert told == eager and graphs.reason is None and graphs.count


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory):
    target = tmp_path_factory.mktemp("poisoned") / "nano"
    graph_bits.poison(nano_folder("random"), target)
    return target


class TestARowOfNan:
    @pytest.mark.parametrize("overlap", [False, True])
    @pytest.mark.parametrize("eager", [False, True])
    def test_ends_its_request_and_changes_no_other(self, monkeypatch, poisoned, overlap, eager):
        monkeypatch.setattr(loading, "open_backend", lambda name: (RecordingBackend(), 0))
        found = graph_bits.bad_row(poisoned, "recording", overlap=overlap, enforce_eager=eager)
        assert graph_bits.stayed_alone(found), found
        assert (found["replays_with_it"] > 0) == (not eager)

    def test_is_what_the_token_makes(self, monkeypatch):
        """The check's own check: without the poison nothing ends."""
        monkeypatch.setattr(loading, "open_backend", lambda name: (RecordingBackend(), 0))
        found = graph_bits.bad_row(nano_folder("random"), "recording")
        assert not graph_bits.stayed_alone(found) and found["finish_reason"] == "length"


def test_a_step_that_cannot_be_captured_after_all_says_what_to_do(monkeypatch):
    def capture(self, step):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(RecordingGraphs, "capture", capture)
    with pytest.raises(BackendError, match="5 sequences could not be captured.*not permitted.*enforce_eager"):
        generate(monkeypatch, RecordingBackend())


class TestWarmUp:
    def test_runs_every_prefill_size_and_touches_no_state(self, monkeypatch):
        monkeypatch.setattr(loading, "open_backend", lambda name: (RecordingBackend(synchronous=False), 0))
        config = EngineConfig.create(
            model=str(nano_folder("random")), backend="recording", max_model_len=512, max_num_seqs=3, max_num_batched_tokens=300
        )
        runner = Runner.from_config(config)
        state = runner.state
        tensors = [state.windows, state.blocks, state.history, *state.carry.values()]
        for tensor in tensors:
            tensor.fill_(3)
        rows = []
        forward = runner.network.forward
        monkeypatch.setattr(runner.network, "forward", lambda meta: (rows.append((meta.num_rows, meta.flat)), forward(meta))[1])
        runner.warm_up()
        assert rows[-6:] == [(1, False), (4, False), (16, True), (64, True), (256, True), (300, True)]
        assert all((tensor == 3).all() for tensor in tensors)

    def test_leaves_a_device_that_compiles_nothing_alone(self, monkeypatch, eager):
        ran = []
        monkeypatch.setattr("deepinfer.runner.runner.run_eager_steps", ran.append)
        assert generate(monkeypatch, RecordingBackend())[0] == eager and not ran

    def test_changes_no_bits(self, monkeypatch, eager):
        assert generate(monkeypatch, RecordingBackend(synchronous=False))[0] == eager


class TestPlannedSizes:
    @pytest.mark.parametrize("most", [1, 3, 64, 100, 256, 300])
    def test_go_up_to_the_largest_batch(self, most):
        sizes = capture_sizes(most)
        assert sizes[-1] == most and list(sizes) == sorted(set(sizes))
        assert all(after <= 2 * before for before, after in zip(sizes, sizes[1:], strict=False))

    def test_short_sequences_have_limits_of_their_own(self):
        assert token_limits(131072) == (4096, 16384, 65536, 131072)
        assert token_limits(300) == (300,)

    def test_the_largest_is_captured_first(self):
        shapes = graph_shapes(4, 8192, tokens_each=4)
        assert shapes[0] == GraphShape(8192, 4, 16) and shapes[-1] == GraphShape(4096, 1, 4)


class TestTheByteplan:
    def test_counts_the_graphs_of_a_backend_that_has_them(self, monkeypatch, capsys):
        monkeypatch.setattr("deepinfer_hal.registry.open_backend", lambda name: (RecordingBackend(), 0))
        for eager, shown in ((False, True), (True, False)):
            sizes = {"max_num_seqs": 8, "max_model_len": 8192, "enforce_eager": eager}
            plan = run_check("nano", "recording", **sizes).plan
            check_command("nano", "recording", **sizes)
            line = "38, of 1 to 8 sequences, prompts to 1024 rows"
            assert (line in " ".join(capsys.readouterr().out.split())) == shown == (plan.graphs is not None)
            if shown:
                without = run_check("nano", max_num_seqs=8, max_model_len=8192).plan
                assert plan.graphs.graphs == len(graph_shapes(8, 8192, max_prompt_rows=1024)) and without.graphs is None
                assert plan.graphs.total_bytes > plan.graphs.pool_bytes > 1024 * 4 * 512 * 2

    def test_counts_steps_with_prompts_up_to_the_setting(self, monkeypatch, capsys):
        monkeypatch.setattr("deepinfer_hal.registry.open_backend", lambda name: (RecordingBackend(), 0))
        sizes = {"max_num_seqs": 8, "max_model_len": 8192}
        plans = {most: run_check("nano", "recording", max_prompt_graph_tokens=most, **sizes).plan for most in (0, 256, 4096)}
        counts = [len(graph_shapes(8, 8192, max_prompt_rows=rows)) for rows in (0, 256, 2048)]  # of a step: 2048 at most
        assert [plan.graphs.graphs for plan in plans.values()] == counts
        assert plans[0].graphs.total_bytes < plans[256].graphs.total_bytes < plans[4096].graphs.total_bytes
        check_command("nano", "recording", max_prompt_graph_tokens=0, **sizes)
        printed = " ".join(capsys.readouterr().out.split())
        assert "8, of 1 to 8 sequences" in printed and "prompts" not in printed


class TestPadding:
    def plan(self, lengths, starts):
        cu_q = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        tables = np.arange(len(lengths) * 4, dtype=np.int32).reshape(-1, 4)
        return plan_step(
            cu_q, np.array(starts, np.int32), np.arange(len(lengths), dtype=np.int32), tables, window=128, ring_rows=134,
            slot_rows=134, ratios=(1, 2), block_tokens=128,
        )  # fmt: skip

    def test_keeps_the_plan_and_adds_rows_that_no_op_touches(self):
        plan = self.plan([1, 4], [200, 7])
        padded = pad_step(plan, requests=4, rows=8, columns=3, tokens=384)
        assert (padded.num_requests, padded.num_rows, padded.count.tolist()) == (4, 8, [5])
        for name in ("positions", "row_to_req", "window_slots", "ring_slots"):
            assert getattr(padded, name)[:5].tolist() == getattr(plan, name).tolist()
            assert (getattr(padded, name)[5:] == -1).all()
        assert padded.cu_q.tolist() == [0, 1, 5, 5, 5] and padded.slots.tolist() == [0, 1, -1, -1]
        assert padded.block_tables.tolist() == [[0, 1, 2], [4, 5, 6], [-1] * 3, [-1] * 3]
        for ratio, groups in ((1, 8), (2, 6)):
            one, kept = padded.ratios[ratio], plan.ratios[ratio].complete
            assert one.complete.shape == one.slots.shape == (groups,) and one.max_visible == 384 // ratio
            assert one.complete.tolist() == kept.tolist() + [-1] * (groups - len(kept))

    @pytest.mark.parametrize("limits", [{"requests": 1}, {"rows": 4}, {"tokens": 128}])
    def test_refuses_a_plan_that_does_not_fit(self, limits):
        sizes = {"requests": 2, "rows": 5, "columns": 4, "tokens": 512, **limits}
        with pytest.raises(BadCall, match="2 requests, 5 rows"):
            pad_step(self.plan([1, 4], [200, 7]), **sizes)

    def test_an_empty_plan_fits_every_size(self):
        padded = pad_step(empty_step((1, 2)), requests=2, rows=2, columns=1, tokens=128)
        assert (padded.positions == -1).all() and (padded.cu_q == 0).all()
