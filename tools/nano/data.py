"""Token streams for training: documents wrapped in begin and end, cut into pieces, shuffled, laid end to end."""

from __future__ import annotations

import io
import lzma
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

BOS, EOS = 0, 1
PIECE_TOKENS = 8192
OTHER_SHARE = 0.35  # of the text that is not the standard library, the part that each pass draws


@dataclass(frozen=True)
class Split:
    """Documents of one split: bare token ids, and how many bytes of text each stands for."""

    documents: list[np.ndarray]
    bytes: np.ndarray
    is_stdlib: np.ndarray


def load_split(folder: Path, name: str) -> Split:
    """Reads what prepare.py wrote."""
    with np.load(io.BytesIO(lzma.decompress((Path(folder) / f"{name}.npz.xz").read_bytes()))) as arrays:
        ids = arrays["low"].astype(np.uint16) | (arrays["high"].astype(np.uint16) << 8)
        ends = np.cumsum(arrays["lengths"])[:-1]
        return Split(np.split(ids, ends), arrays["bytes"], arrays["is_stdlib"])


def wrap(document: np.ndarray) -> np.ndarray:
    """The document with begin in front and end behind it."""
    return np.concatenate(([BOS], document, [EOS])).astype(np.uint16)


class TokenStream:
    """Endless passes over a split. Each pass holds every standard-library document and a part of the others."""

    def __init__(self, split: Split, device: torch.device, seed: int, other_share: float = OTHER_SHARE) -> None:
        self.split, self.device, self.other_share = split, device, other_share
        self.random = np.random.default_rng(seed)
        self.passes, self.at = 0, 0
        self.pending = self._next_pass()

    def _next_pass(self) -> torch.Tensor:
        keep = self.split.is_stdlib | (self.random.random(len(self.split.documents)) < self.other_share)
        pieces = []
        for index in np.flatnonzero(keep):
            document = wrap(self.split.documents[index])
            pieces += [document[i : i + PIECE_TOKENS] for i in range(0, document.size, PIECE_TOKENS)]
        order = self.random.permutation(len(pieces))
        self.passes += 1
        stream = np.concatenate([pieces[i] for i in order]).astype(np.int32)
        return torch.from_numpy(stream).to(self.device)

    def batch(self, sequences: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, int64 [sequences, tokens] each. A target of -100 (begin, or nothing) is not scored."""
        needed = sequences * tokens
        if self.pending.numel() - self.at < needed + 1:
            self.pending = torch.cat((self.pending[self.at :], self._next_pass()))
            self.at = 0
        chunk = self.pending[self.at : self.at + needed + 1].long()
        self.at += needed
        inputs, targets = chunk[:-1].view(sequences, tokens), chunk[1:].view(sequences, tokens)
        return inputs, targets.masked_fill(targets == BOS, -100)
