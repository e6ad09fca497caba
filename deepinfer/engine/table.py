"""Per-slot arrays: all that planning a step needs, so that a step of many sequences costs a few numpy calls."""

from __future__ import annotations

import numpy as np

from deepinfer.engine.request import Sequence
from deepinfer.engine.step_plan import SamplingBatch

_NO_IDS, _NO_VALUES = np.zeros(0, np.int32), np.zeros(0, np.float32)


class SlotTable:
    """Arrays indexed by slot.

    length: tokens known or in flight; computed: tokens whose rows are computed or in flight; max_length: where the
    sequence must end; blocks: allocated blocks; planned: token rows in the step being planned.
    """

    def __init__(self, num_slots: int, max_blocks: int) -> None:
        ints = ("length", "computed", "max_length", "prompt_len", "blocks", "planned", "top_k", "min_end", "logprobs")
        floats = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
        for name in ints:
            setattr(self, name, np.zeros(num_slots, np.int32))
        for name in floats:
            setattr(self, name, np.zeros(num_slots, np.float32))
        self.seeds = np.zeros(num_slots, np.int64)
        self.penalised = np.zeros(num_slots, bool)
        self.biased = np.zeros(num_slots, bool)
        self.block_tables = np.full((num_slots, max_blocks), -1, np.int32)
        self._bias: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._end_ids: dict[int, np.ndarray] = {}

    def admit(self, sequence: Sequence, max_length: int) -> None:
        """Fills the row of sequence.slot; its blocks are those it holds."""
        slot, request, params = sequence.slot, sequence.request, sequence.request.params
        self.prompt_len[slot] = len(request.prompt_ids)
        self.length[slot] = len(request.prompt_ids) + len(sequence.output_ids)
        self.computed[slot] = self.planned[slot] = self.blocks[slot] = 0
        self.max_length[slot] = max_length
        self.add_blocks(slot, sequence.blocks)
        self.temperature[slot], self.top_p[slot], self.min_p[slot] = params.temperature, params.top_p, params.min_p
        self.top_k[slot], self.seeds[slot] = max(0, params.top_k), sequence.seed
        self.repetition[slot], self.presence[slot] = params.repetition_penalty, params.presence_penalty
        self.frequency[slot] = params.frequency_penalty
        self.penalised[slot] = (
            params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
        )
        self.logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self.min_end[slot] = len(request.prompt_ids) + params.min_tokens if request.stop_ids else 0
        self.biased[slot] = bool(params.logit_bias)
        bias = params.logit_bias or {}
        self._bias[slot] = np.array(list(bias), np.int32), np.array(list(bias.values()), np.float32)
        self._end_ids[slot] = np.array(sorted(request.stop_ids), np.int32)

    def add_blocks(self, slot: int, ids: list[int]) -> None:
        """Appends blocks to the slot's table."""
        have = int(self.blocks[slot])
        self.block_tables[slot, have : have + len(ids)] = ids
        self.blocks[slot] = have + len(ids)

    def release(self, slot: int) -> None:
        """Empties the row."""
        self.block_tables[slot, : self.blocks[slot]] = -1
        self.length[slot] = self.computed[slot] = self.max_length[slot] = self.blocks[slot] = self.planned[slot] = 0
        self._bias.pop(slot, None)
        self._end_ids.pop(slot, None)

    def sampling(self, slots: np.ndarray) -> SamplingBatch:
        """Settings for the next token of each slot."""
        length = self.length[slots]
        offsets, ids, values = self._biases(slots, length)
        return SamplingBatch(
            self.temperature[slots],
            self.top_k[slots],
            self.top_p[slots],
            self.min_p[slots],
            self.seeds[slots],
            self.repetition[slots],
            self.presence[slots],
            self.frequency[slots],
            self.prompt_len[slots],
            length,
            offsets,
            ids,
            values,
            bool(len(ids)) or bool(self.penalised[slots].any()),
            int(self.logprobs[slots].max(initial=-1)),
        )

    def _biases(self, slots: np.ndarray, length: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """CSR of logit_bias, and of bans on every stop id while fewer than min_tokens tokens are out."""
        early = length < self.min_end[slots]
        rows = np.nonzero(self.biased[slots] | early)[0]
        counts = np.zeros(len(slots) + 1, np.int32)
        if not len(rows):
            return counts, _NO_IDS, _NO_VALUES
        ids, values = [], []
        for row in rows.tolist():
            own_ids, own_values = self._bias[int(slots[row])]
            banned = self._end_ids[int(slots[row])] if early[row] else _NO_IDS
            ids += (own_ids, banned)
            values += (own_values, np.full(len(banned), -np.inf, np.float32))
            counts[row + 1] = len(own_ids) + len(banned)
        return counts.cumsum(dtype=np.int32), np.concatenate(ids), np.concatenate(values)
