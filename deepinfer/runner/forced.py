"""Teacher-forced steps: given tokens of many sequences in one step, logits of any of their rows.

For measurements and tests that decide themselves what a step holds. Going back is running other tokens from an earlier
position, at most `max_backtrack` tokens behind the furthest one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from deepinfer.errors import CapacityError
from deepinfer.model.layers import Residual
from deepinfer.model.state import BLOCK_TOKENS
from deepinfer.runner.runner import Runner


@dataclass(frozen=True)
class Part:
    """One sequence's share of a step.

    slot: its state slot; blocks int32 [n]: its paged blocks in order, enough for start + len(ids) tokens; start:
    position of the first token; ids int32 [q].
    """

    slot: int
    blocks: np.ndarray
    start: int
    ids: np.ndarray


@dataclass(frozen=True)
class ForcedStep:
    """A step that has run: reads logits until the next step of the same runner."""

    runner: Runner
    residual: Residual
    num_rows: int

    def logits(self, rows: np.ndarray | None = None) -> torch.Tensor:
        """float32 [S, V] of these token rows of the step (default: all of them), in a tensor of their own."""
        network = self.runner.network
        wanted = np.arange(self.num_rows, dtype=np.int32) if rows is None else np.asarray(rows, np.int32)
        most = network.outputs.max_rows
        found = torch.empty(len(wanted), self.runner.vocab_size, dtype=torch.float32)
        for first in range(0, len(wanted), most):
            part = self.runner.upload(wanted[first : first + most])
            found[first : first + most] = network.logits(self.residual, self.num_rows, part)
        return found


def forced_step(runner: Runner, parts: Sequence[Part]) -> ForcedStep:
    """Runs the parts as one step, rows in the order of the parts. CapacityError when they do not fit a step."""
    lengths = np.array([len(part.ids) for part in parts], np.int32)
    cu_q = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    if cu_q[-1] > runner.max_rows:
        raise CapacityError(f"parts of {cu_q[-1]} tokens, a step holds {runner.max_rows}: raise max_num_batched_tokens")
    tables = np.full((len(parts), max(len(part.blocks) for part in parts)), -1, np.int32)
    for row, part in enumerate(parts):
        end, held = part.start + len(part.ids), len(part.blocks) * BLOCK_TOKENS
        if held < end:
            raise CapacityError(f"part {row} ends at token {end}, its blocks hold {held}")
        tables[row, : len(part.blocks)] = part.blocks
        runner.write_tokens(part.slot, part.start, part.ids)
    starts = np.array([part.start for part in parts], np.int32)
    slots = np.array([part.slot for part in parts], np.int32)
    meta = runner.plan(cu_q, starts, slots, tables)
    return ForcedStep(runner, runner.network.forward(meta), meta.num_rows)
