"""Steps of a slice: a decode, verify or prefill step whole, and its parts (one layer, input, head, draft) alone.

All of it is the engine's network over bound ops; nothing here computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from deepinfer_hal.step import StepMeta, plan_step

from deepinfer.bench.extrapolate import DRAFTS
from deepinfer.bench.op_times import DRAFT, OpRecorder
from deepinfer.bench.slice_config import layer_kind
from deepinfer.bench.slice_model import SliceModel
from deepinfer.model.layers import Residual
from deepinfer.model.state import BLOCK_TOKENS
from deepinfer.runner.sampler import SampledStep, Sampler


class BoundNetwork:
    """The engine's network and sampler over a slice, for steps of at most `max_rows` token rows. `recorder` sees every call
    while `dispatcher.observer` is set to it."""

    def __init__(self, model: SliceModel, max_rows: int) -> None:
        self.recorder = OpRecorder()
        self.network = model.network(max_rows, self.recorder)
        self.dispatcher = self.network.dispatcher
        self.sampler = Sampler(self.dispatcher, model.text.vocab_size, model.device)
        self.advance = self.dispatcher.bind("advance_step")
        self.dispatcher.observer = None


class StepBench:
    """One step of `requests` sequences with `tokens` query tokens each, at the end of a context of `before` tokens.

    logits_each: of how many of a request's last rows the head makes logits.
    """

    def __init__(
        self, model: SliceModel, bound: BoundNetwork, requests: int, tokens: int, before: int, logits_each: int = 1
    ) -> None:
        self.model, self.requests, self.tokens = model, requests, tokens
        self.network, self.dispatcher, self.recorder = bound.network, bound.dispatcher, bound.recorder
        self.sampler, self.advance = bound.sampler, bound.advance
        self.meta = self._plan(before)
        self.rows = self.meta.num_rows
        ends = np.arange(1, requests + 1) * tokens
        picked = (ends[:, None] - 1 - np.arange(logits_each)[::-1]).reshape(-1)
        self.logit_rows = self._upload(picked.astype(np.int32))
        self.settings = {name: self._upload(value) for name, value in random_settings(len(picked)).items()}
        self.slots = self._upload(np.repeat(np.arange(requests, dtype=np.int32), logits_each))
        self.positions = self._upload(np.repeat(np.full(requests, before + tokens, np.int32), logits_each))

    def _plan(self, before: int) -> StepMeta:
        layout, requests = self.model.state.layout, self.requests
        blocks = -(-(before + self.tokens) // BLOCK_TOKENS)  # of a sequence so far, as the scheduler's tables have them
        meta = plan_step(
            np.arange(requests + 1, dtype=np.int32) * self.tokens, np.full(requests, before, np.int32),
            np.arange(requests, dtype=np.int32), self.model.block_tables(requests)[:, :blocks], window=layout.window,
            ring_rows=layout.ring_rows, slot_rows=layout.slot_rows, ratios=layout.ratios, block_tokens=BLOCK_TOKENS,
        )  # fmt: skip
        return meta.to(self._upload)

    def _upload(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.model.device)

    # -- the step and its parts

    def whole(self) -> None:
        """Forward, logits, sampling and the sampled tokens' way into the history."""
        residual = self.network.forward(self.meta)
        self._head(residual)

    def _head(self, residual: Residual) -> None:
        logits = self.network.logits(residual, self.rows, self.logit_rows)
        step = SampledStep()
        self.sampler(step, logits, Settings(self.settings), self.slots, self.positions, self.model.state.history, list)
        self.advance(step.tokens, self.slots, self.positions, self.model.state.history)

    def parts(self) -> dict[str, Callable[[], None]]:
        """The step's parts by name: `input`, `layer i kind`, `engram`, `features`, `head` and `draft`, of which a verify step
        takes no more than its own tokens."""
        network, views = self.network, self.network.buffers.rows(self.rows)

        def tokens_in() -> None:
            network.gather_tokens(
                network.state.history, self.meta.slots, self.meta.row_to_req, self.meta.positions, None, views.ids, views.ngrams
            )
            network.embed(views.ids, network.weights.embedding, None, views.streams)

        found: dict[str, Callable[[], None]] = {"input": tokens_in}
        for topology in self.model.text.layers:
            found[f"layer {topology.layer} {layer_kind(topology)}"] = self._layer(topology, views)
        if network.engram is not None:
            layer = self.model.text.engram_layer_ids[0]
            found["engram"] = lambda: network.engram(network.weights.blocks[layer].engram, views.ngrams, views)
        if network.draft is not None:
            found["features"] = lambda: network.draft.store_main(self.meta, views)
        found["head"] = lambda: self._head(Residual(views.pre_a))
        if network.draft is not None:
            anchors, gold = self.positions[:: max(1, len(self.positions) // self.requests)] - 1, self.slots[: self.requests] + 1
            slots = self.slots[:: max(1, len(self.slots) // self.requests)].contiguous()
            anchors = anchors.contiguous()
            found[DRAFT] = lambda: network.draft(slots, anchors, gold, DRAFTS)
        return found

    def _layer(self, topology: Any, views: Any) -> Callable[[], None]:
        network = self.network
        block = network.weights.blocks[topology.layer]

        def run() -> None:
            residual = Residual(views.pre_a, pending=True)
            network.blocks.run(block, topology, residual, self.meta, views, network.attention, None, None)

        return run

    @property
    def outside(self) -> frozenset[tuple[str, str]]:
        """Bound ops that this step does not call."""
        unused = {("mask_logits", ""), ("top_logprobs", "")}
        return frozenset(unused if self.meta.flat else unused | {("copy_rows", "window")})

    def finite(self) -> bool:
        """Whether the logits of the last step are numbers, so that what was timed was computed on numbers too."""
        return bool(torch.isfinite(self.network.outputs.rows(len(self.logit_rows)).logits).all())


class Settings:
    """Sampling settings that are on the device already."""

    needs_mask, num_logprobs = False, -1

    def __init__(self, settings: dict[str, torch.Tensor]) -> None:
        self.__dict__.update(settings)


def random_settings(rows: int) -> dict[str, np.ndarray]:
    """Settings of the sample op for rows at temperature 1, as host arrays."""
    ones, none = np.ones(rows, np.float32), np.zeros(rows, np.float32)
    seeds = np.arange(rows, dtype=np.int64)
    return {"temperature": ones, "top_k": np.zeros(rows, np.int32), "top_p": ones, "min_p": none, "seeds": seeds}
