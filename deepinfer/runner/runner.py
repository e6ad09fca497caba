"""Runs planned steps on a device: `launch` enqueues a step, `settle` reads its results on the host.

Sampled tokens never pass through the host between steps: `advance_step` writes them to the token history, where the next
step finds its ids by position. So step N + 1 may be planned and launched before step N is settled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from deepinfer_hal.step import StepMeta, plan_step

from deepinfer.config import EngineConfig
from deepinfer.errors import RequestError
from deepinfer.model.graph_plan import graph_shapes
from deepinfer.model.state import BLOCK_TOKENS
from deepinfer.runner.graphs import StepGraphs
from deepinfer.runner.load import Loaded, load
from deepinfer.runner.sampler import SampledStep, Sampler
from deepinfer.runner.staging import Staging
from deepinfer.runner.warm_up import run_eager_steps


@dataclass
class StepResult:
    """Host results of a step, one entry per sampled row.

    tokens int32 [S] (-1 where the row's logits were unusable); nan_flags uint8 [S]; logprobs: None or (chosen float32 [S],
    rank int32 [S], top_ids int32 [S, k], top_values float32 [S, k]); prompt_logprobs: the same over plan.logit_rows.
    """

    tokens: np.ndarray
    nan_flags: np.ndarray
    logprobs: tuple[np.ndarray, ...] | None = None
    prompt_logprobs: tuple[np.ndarray, ...] | None = None


class Runner:
    """Owns a loaded model and runs one step at a time."""

    def __init__(self, loaded: Loaded) -> None:
        self.loaded, self.network, self.state = loaded, loaded.network, loaded.state
        self.text = loaded.checkpoint.config.text
        self.device = loaded.backend.device(loaded.device_index)
        self.sampler = Sampler(loaded.dispatcher, self.text.vocab_size, self.device)
        self.staging = Staging(loaded.backend, loaded.device_index)
        self.graphs: StepGraphs | None = None
        self.advance = loaded.dispatcher.bind("advance_step")

    @classmethod
    def from_config(cls, config: EngineConfig, *, with_draft: bool = False) -> Runner:
        """Loads the model that `config` names."""
        return cls(load(config, with_draft=with_draft))

    @property
    def num_blocks(self) -> int:
        return self.state.num_blocks

    @property
    def num_slots(self) -> int:
        return self.state.num_slots

    @property
    def max_model_len(self) -> int:
        return self.loaded.sizes.max_model_len

    @property
    def max_rows(self) -> int:
        """Token rows of the largest step."""
        return self.loaded.sizes.max_rows

    @property
    def vocab_size(self) -> int:
        return self.text.vocab_size

    @property
    def synchronous(self) -> bool:
        """Whether a launch returns only when its work is done, so that overlapping steps gains nothing."""
        return self.loaded.backend.capabilities(self.loaded.device_index).synchronous

    def upload(self, array: np.ndarray) -> torch.Tensor:
        """A host array as a device tensor."""
        return self.staging.upload([array])[0]

    def warm_up(self) -> None:
        """Before the first step: captures steps of every padded size, where the backend can and the settings allow it, and runs
        prefills of all sizes on a device that may compile kernels at their first launch. `graphs` then tells what there is."""
        loaded, sizes = self.loaded, self.loaded.sizes
        capabilities = loaded.backend.capabilities(loaded.device_index)
        if capabilities.graphs and not loaded.config.enforce_eager:
            shapes = graph_shapes(
                min(sizes.num_slots, loaded.config.max_num_seqs), sizes.max_model_len,
                max_prompt_rows=min(loaded.config.max_prompt_graph_tokens, sizes.max_rows),
            )  # fmt: skip
            slot = loaded.backend.graphs(loaded.device_index)
            self.graphs = StepGraphs(self.network, slot, self.staging, shapes, loaded.dispatcher)
            self.graphs.warm_up()
        if not capabilities.synchronous:
            run_eager_steps(self)

    def plan(self, cu_q: np.ndarray, starts: np.ndarray, slots: np.ndarray, block_tables: np.ndarray) -> StepMeta:
        """Step arrays of R requests, on the device."""
        return self.to_device(self.plan_host(cu_q, starts, slots, block_tables))

    def plan_host(
        self, cu_q: np.ndarray, starts: np.ndarray, slots: np.ndarray, block_tables: np.ndarray, flat: bool = False
    ) -> StepMeta:
        """Step arrays of R requests, on the host; flat: through the flat buffer of window rows, though they may not need it."""
        layout = self.state.layout
        return plan_step(
            cu_q, starts, slots, block_tables, window=layout.window, ring_rows=layout.ring_rows, slot_rows=layout.slot_rows,
            ratios=layout.ratios, block_tokens=BLOCK_TOKENS, flat=flat,
        )  # fmt: skip

    def to_device(self, meta: StepMeta) -> StepMeta:
        """A host plan on the device, in one copy."""
        arrays: list[np.ndarray] = []
        meta.to(lambda array: arrays.append(array))
        moved = iter(self.staging.upload(arrays))
        return meta.to(lambda _: next(moved))

    def write_tokens(self, slot: int, start: int, ids: np.ndarray) -> None:
        """Puts host token ids into the history of a slot."""
        row = self.state.history[slot, start : start + len(ids)]
        self.loaded.backend.copy_async(row, torch.from_numpy(np.ascontiguousarray(ids, dtype=np.int32)))

    def launch(self, plan: Any) -> SampledStep:
        """Enqueues a planned step (deepinfer.engine.step_plan.StepPlan) with its sampling."""
        for slot, start, ids in plan.new_tokens:
            self.write_tokens(slot, start, ids)
        meta = self.plan_host(plan.cu_q, plan.starts, plan.slots, plan.block_tables)
        last_rows = (plan.cu_q[1:] - 1)[plan.sample_requests].astype(np.int32)
        step = SampledStep()
        logits = self._forward(plan, meta, last_rows, step)
        if len(last_rows):
            chosen = (plan.slots[plan.sample_requests].astype(np.int32), plan.positions_out.astype(np.int32))
            slots, positions = self.staging.upload(chosen)
            self.sampler(step, logits, plan.sampling, slots, positions, self.state.history, self.staging.upload)
            self.advance(step.tokens, slots, positions, self.state.history)
        step.start_download(self.loaded.backend, self.loaded.device_index)
        return step

    def _forward(self, plan: Any, meta: StepMeta, last_rows: np.ndarray, step: SampledStep) -> torch.Tensor | None:
        """Enqueues the network on a host plan, from a graph where one holds it: logits of `last_rows`, and in `step` the
        prompt's log-probabilities that the plan asks for."""
        captured = self.graphs is not None and not len(plan.logit_rows)
        shape = self.graphs.choose(meta, len(last_rows)) if captured else None
        if shape is not None:
            if shape.prompts and not meta.flat:
                meta = self.plan_host(plan.cu_q, plan.starts, plan.slots, plan.block_tables, flat=True)
            return self.graphs.launch(shape, meta, last_rows)
        meta = self.to_device(meta)
        residual = self.network.forward(meta)
        if len(plan.logit_rows):
            step.prompt_logprobs = self._prompt_logprobs(plan, meta, residual)
        return self.network.logits(residual, meta.num_rows, self.upload(last_rows)) if len(last_rows) else None

    def _prompt_logprobs(self, plan: Any, meta: StepMeta, residual: Any) -> list[tuple[torch.Tensor, ...]]:
        """Log-probabilities of prompt tokens, in pieces of as many rows as the logits buffer holds."""
        pieces, rows = [], self.network.outputs.max_rows
        for start in range(0, len(plan.logit_rows), rows):
            part = slice(start, start + rows)
            logits = self.network.logits(residual, meta.num_rows, self.upload(plan.logit_rows[part].astype(np.int32)))
            chosen = self.upload(plan.logit_targets[part].astype(np.int32))
            pieces.append(self.sampler.top_logprobs(logits, chosen, plan.num_prompt_logprobs))
        return pieces

    def settle(self, step: SampledStep) -> StepResult:
        """Waits for a launched step, not for those after it, and reads its results."""
        step.wait()
        prompt = None
        if step.prompt_logprobs is not None:
            prompt = tuple(np.concatenate([t.numpy() for t in parts]) for parts in zip(*step.prompt_logprobs, strict=True))
        if step.tokens is None:
            return StepResult(np.zeros(0, np.int32), np.zeros(0, np.uint8), None, prompt)
        logprobs = None if step.logprobs is None else tuple(t.numpy() for t in step.logprobs)
        return StepResult(step.tokens.numpy(), step.nan_flags.numpy(), logprobs, prompt)

    def score(self, token_ids: Any, chunk: int | None = None) -> np.ndarray:
        """float32 [T, V]: log-probabilities of the next token after each position, through the caches.

        token_ids: 1-D ids, all inside the vocabulary; chunk: tokens per step (default: the largest step). The engine must
        be idle: slot 0 and the first blocks are used. Raises RequestError.
        """
        ids = self.check_ids(token_ids)
        result = np.empty((len(ids), self.vocab_size), np.float32)
        for start, meta, residual in self.prefill(ids, chunk):
            for first in range(0, meta.num_rows, self.network.outputs.max_rows):
                rows = np.arange(first, min(first + self.network.outputs.max_rows, meta.num_rows), dtype=np.int32)
                logits = self.network.logits(residual, meta.num_rows, self.upload(rows)).cpu()
                result[start + rows] = torch.log_softmax(logits, dim=-1).numpy()
        return result

    def prefill(self, ids: np.ndarray, chunk: int | None = None, slot: int = 0, first_block: int = 0, start: int = 0) -> Any:
        """Yields (start, meta, residual) of every chunk of one sequence run alone, from position `start` on."""
        chunk = min(chunk or self.max_rows, self.max_rows)
        blocks = np.arange(-(-(start + len(ids)) // BLOCK_TOKENS), dtype=np.int32)[None] + first_block
        self.write_tokens(slot, start, ids)
        for offset in range(0, len(ids), chunk):
            length = min(chunk, len(ids) - offset)
            cu_q = np.array([0, length], np.int32)
            seen = blocks[:, : -(-(start + offset + length) // BLOCK_TOKENS)]
            meta = self.plan(cu_q, np.array([start + offset], np.int32), np.array([slot], np.int32), seen)
            yield start + offset, meta, self.network.forward(meta)

    def check_ids(self, token_ids: Any) -> np.ndarray:
        """Token ids as int32 [T]; RequestError when they are none, too many, or outside the vocabulary."""
        ids = np.asarray(token_ids, dtype=np.int64).reshape(-1)
        if not len(ids):
            raise RequestError("token_ids", token_ids, "is empty; give at least one token")
        longest = min(self.max_model_len, self.num_blocks * BLOCK_TOKENS)
        if len(ids) > longest:
            raise RequestError("token_ids", f"{len(ids)} tokens", f"the engine holds at most {longest}; raise max_model_len")
        bad = np.nonzero((ids < 0) | (ids >= self.vocab_size))[0]
        if len(bad):
            raise RequestError("token_ids", int(ids[bad[0]]), f"at {bad[0]} is outside the vocabulary of {self.vocab_size}")
        return ids.astype(np.int32)

