"""Which sequences run in the next step, and with how many tokens: continuous batching over slots and paged blocks."""

from __future__ import annotations

import heapq
from bisect import insort
from operator import attrgetter

import numpy as np

from deepinfer.engine.pools import BlockPool, SlotPool
from deepinfer.engine.request import Sequence
from deepinfer.engine.step_plan import PromptSpan, StepPlan
from deepinfer.engine.table import SlotTable
from deepinfer.errors import ConfigError

_KEY = attrgetter("key")


class Scheduler:
    """First come, first served within a priority. `plan` counts what it hands out as computed, so steps may overlap.

    Under memory pressure the latest running sequence is preempted and computed again later; the first never is, and
    every admitted sequence fits the pool alone, so something always progresses.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        num_slots: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        enable_chunked_prefill: bool = True,
        block_tokens: int = 128,
    ) -> None:
        self.blocks, self.slots = BlockPool(num_blocks, block_tokens), SlotPool(num_slots)
        self.max_model_len = min(max_model_len, num_blocks * block_tokens)
        self.max_tokens, self.chunked = max_num_batched_tokens, enable_chunked_prefill
        if not enable_chunked_prefill and max_num_batched_tokens < self.max_model_len:
            raise ConfigError(
                "max_num_batched_tokens",
                f"{max_num_batched_tokens} is below the longest sequence of {self.max_model_len} tokens: raise it, "
                "lower max_model_len, or enable chunked prefill",
            )
        self.table = SlotTable(num_slots, self.blocks.blocks_for(self.max_model_len))
        self.running: list[Sequence] = []
        self._waiting: list[tuple[tuple[int, int, int], Sequence]] = []
        self._running_slots = np.zeros(0, np.int32)
        self._stale = False

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence whose prompt is shorter than max_model_len."""
        heapq.heappush(self._waiting, (sequence.key, sequence))

    def release(self, sequence: Sequence) -> None:
        """Takes back all that a sequence holds, at once. A step in flight may still write there, but before any later
        step does."""
        if sequence.slot < 0:
            return
        self.table.release(sequence.slot)
        self.slots.free([sequence.slot])
        self.blocks.free(sequence.blocks)
        sequence.slot, sequence.blocks = -1, []
        self.running.remove(sequence)
        self._stale = True

    def plan(self) -> StepPlan | None:
        """The next step, or None if nothing can run before something in flight is settled."""
        table, new_tokens = self.table, []
        preempted = self._grow_blocks()
        slots = self._slots()
        pending = table.length[slots] - table.computed[slots]
        pending[table.length[slots] >= table.max_length[slots]] = 0
        table.planned[slots] = pending == 1
        budget = self.max_tokens - int(np.count_nonzero(pending == 1))
        for row in np.nonzero(pending > 1)[0].tolist():
            budget -= self._take(int(slots[row]), int(pending[row]), budget)
        while self._waiting and budget > 0 and not preempted:
            sequence = self._admit(budget)
            if sequence is None:
                break
            new_tokens.append((sequence.slot, 0, sequence.all_ids))
            budget -= self._take(sequence.slot, int(table.length[sequence.slot]), budget)
        return self._build(new_tokens)

    def check_integrity(self) -> None:
        """RuntimeError if a slot or block is lost or held twice."""
        self.slots.check([[sequence.slot] for sequence in self.running])
        self.blocks.check([sequence.blocks for sequence in self.running])

    def _take(self, slot: int, pending: int, budget: int) -> int:
        """Plans as much of a prefill as the budget allows; all or nothing without chunking."""
        count = min(pending, budget) if self.chunked or pending <= budget else 0
        self.table.planned[slot] = count
        return count

    def _slots(self) -> np.ndarray:
        if self._stale:
            self._running_slots = np.fromiter((s.slot for s in self.running), np.int32, len(self.running))
            self._stale = False
        return self._running_slots

    def _grow_blocks(self) -> bool:
        """Gives a block to every decoding sequence that needs one, preempting from the end; True if it had to."""
        table, slots, preempted = self.table, self._slots(), False
        full = table.computed[slots] >= table.blocks[slots] * self.blocks.block_tokens
        full &= table.length[slots] < table.max_length[slots]
        for sequence in [self.running[row] for row in np.nonzero(full)[0]]:
            while sequence.slot >= 0 and not self.blocks.available:
                self._preempt(self.running[-1])
                preempted = True
            if sequence.slot >= 0:
                block = self.blocks.allocate(1)
                sequence.blocks += block
                table.add_blocks(sequence.slot, block)
        return preempted

    def _preempt(self, sequence: Sequence) -> None:
        self.release(sequence)
        sequence.request.metrics.preemptions += 1
        self.add(sequence)

    def _admit(self, budget: int) -> Sequence | None:
        """Moves the first waiting sequence to the running ones, if it and one more block for each of them fit."""
        while self._waiting and self._waiting[0][1].finish_reason is not None:
            heapq.heappop(self._waiting)
        if not self._waiting or not self.slots.available:
            return None
        sequence = self._waiting[0][1]
        length = len(sequence.request.prompt_ids) + len(sequence.output_ids)
        needed = self.blocks.blocks_for(length)
        spare = sum(
            len(s.blocks) < self.blocks.blocks_for(int(self.table.max_length[s.slot]) - 1) for s in self.running
        )
        if needed + spare > self.blocks.available or (length > budget and not self.chunked):
            return None
        heapq.heappop(self._waiting)
        sequence.slot, sequence.blocks = self.slots.allocate(1)[0], self.blocks.allocate(needed)
        self.table.admit(sequence, len(sequence.request.prompt_ids) + sequence.max_tokens)
        insort(self.running, sequence, key=_KEY)
        self._stale = True
        return sequence

    def _build(self, new_tokens: list[tuple[int, int, np.ndarray]]) -> StepPlan | None:
        table, slots = self.table, self._slots()
        rows = np.nonzero(table.planned[slots])[0]
        if not len(rows):
            return None
        if len(rows) < len(slots):
            sequences, slots = [self.running[row] for row in rows], slots[rows]
        else:
            sequences, slots = list(self.running), slots.copy()
        counts, starts = table.planned[slots], table.computed[slots]
        cu_q = np.zeros(len(slots) + 1, np.int32)
        np.cumsum(counts, out=cu_q[1:])
        ends = starts + counts
        sampled = np.nonzero(ends == table.length[slots])[0].astype(np.int32)
        sampled_slots = slots[sampled]
        sampling = table.sampling(sampled_slots)
        table.computed[slots] = ends
        table.length[sampled_slots] += 1
        chosen = sequences if len(sampled) == len(sequences) else [sequences[row] for row in sampled]
        seen = self.blocks.blocks_for(int(ends.max()))  # a prompt has blocks ahead of its chunks, which no op need look at
        plan = StepPlan(
            sequences, cu_q, starts, slots, table.block_tables[slots, :seen], new_tokens,
            sampled, sampling.length, sampling, chosen, np.zeros(0, np.int32), np.zeros(0, np.int32),
        )  # fmt: skip
        self._score_prompts(plan)
        return plan

    def _score_prompts(self, plan: StepPlan) -> None:
        """Adds the rows whose log-probabilities of the prompt's next token are still wanted."""
        rows, targets = [], []
        for i, sequence in enumerate(plan.sequences):
            prompt = sequence.request.prompt_ids
            if sequence.prompt_scored >= len(prompt) - 1:
                continue
            start = int(plan.starts[i])
            first = sequence.prompt_scored
            last = min(start + int(plan.cu_q[i + 1] - plan.cu_q[i]), len(prompt) - 1)
            if last <= first:
                continue
            rows.append(np.arange(first, last, dtype=np.int32) - start + plan.cu_q[i])
            targets.append(prompt[first + 1 : last + 1])
            plan.prompt_spans.append(PromptSpan(sequence, last - first))
            plan.num_prompt_logprobs = max(plan.num_prompt_logprobs, sequence.request.params.prompt_logprobs or 0)
            sequence.prompt_scored = last
        if rows:
            plan.logit_rows, plan.logit_targets = np.concatenate(rows), np.concatenate(targets)
