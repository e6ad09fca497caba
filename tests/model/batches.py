"""Drives sequences through the engine in chosen steps: which sequence brings how many tokens to which step."""

import dataclasses

import numpy as np
import torch

from deepinfer.runner.forced import Part, forced_step


@dataclasses.dataclass
class Sequence:
    """ids int32 [T]; slot and blocks: where its state lies; done: tokens that have run."""

    ids: np.ndarray
    slot: int = 0
    blocks: tuple[int, ...] = (0, 1, 2, 3, 4)
    done: int = 0

    def take(self, tokens: int) -> Part:
        part = Part(self.slot, np.array(self.blocks, np.int32), self.done, self.ids[self.done : self.done + tokens])
        self.done += len(part.ids)
        return part


def run_chunks(runner, ids: np.ndarray, chunk: int | None) -> torch.Tensor:
    """float32 [T, V] of one sequence alone, `chunk` tokens a step (None: whole)."""
    sequence, found = Sequence(ids), []
    while sequence.done < len(ids):
        found.append(forced_step(runner, [sequence.take(chunk or len(ids))]).logits())
    return torch.cat(found)


def run_mixed(runner, sequences: list[Sequence], seed: int) -> list[torch.Tensor]:
    """float32 [T, V] of each sequence. Every step holds a random part of them in random order, decoding (one token),
    verifying (up to 7) or prefilling (up to 200 tokens) each."""
    random = np.random.default_rng(seed)
    found = [[] for _ in sequences]
    while any(s.done < len(s.ids) for s in sequences):
        open_ones = [i for i, s in enumerate(sequences) if s.done < len(s.ids)]
        random.shuffle(open_ones)
        chosen = open_ones[: random.integers(1, len(open_ones) + 1)]
        parts = [sequences[i].take(int(random.choice([1, 1, 5, 7, 64, 200]))) for i in chosen]
        logits = forced_step(runner, parts).logits()
        for i, rows in zip(chosen, logits.split([len(part.ids) for part in parts]), strict=True):
            found[i].append(rows)
    return [torch.cat(rows) for rows in found]
