"""Everything that outlives a step: window rings, carry rings, paged compressed rows and the token history.

State rolls back by position alone: a row belongs to a position, is overwritten when that position is computed again, and
is never read past the position that a query stands at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from deepinfer_hal.formats import row_bytes
from deepinfer_hal.step import FlatSizes, flat_sizes

from deepinfer.model.numerics import Numerics

BLOCK_TOKENS = 128
"""Uncompressed tokens per block of the paged caches."""

_BLOCK_ALIGNMENT = 128


def _aligned(nbytes: int, alignment: int = _BLOCK_ALIGNMENT) -> int:
    return -(-nbytes // alignment) * alignment


@dataclass(frozen=True)
class SourceLayout:
    """Where the compressed rows of one KV source layer lie in a block (bytes)."""

    layer: int
    ratio: int
    main_offset: int
    main_bytes: int
    index_offset: int
    index_bytes: int

    @property
    def block_rows(self) -> int:
        return BLOCK_TOKENS // self.ratio


@dataclass(frozen=True)
class StateLayout:
    """Shapes of all state, pure arithmetic over the config.

    ring_rows: window + backtrack, made even so that ring bases stay multiples of two rows; carry_tokens: ratio + backtrack - 1.
    """

    window: int
    ring_rows: int
    ring_layers: int
    window_row_bytes: int
    carry_tokens: int
    carry_layers: tuple[int, ...]
    head_dim: int
    sources: tuple[SourceLayout, ...]
    block_bytes: int
    max_backtrack: int

    @property
    def slot_rows(self) -> int:
        """Window rows of one sequence, all layers."""
        return self.ring_rows * self.ring_layers

    @property
    def slot_bytes(self) -> int:
        """Window and carry bytes of one sequence."""
        carry = len(self.carry_layers) * self.carry_tokens * 2 * self.head_dim * 4
        return self.slot_rows * self.window_row_bytes + carry

    def source(self, layer: int) -> SourceLayout:
        return next(source for source in self.sources if source.layer == layer)

    @property
    def ratios(self) -> tuple[int, ...]:
        return tuple(sorted({source.ratio for source in self.sources}))

    def flat_sizes(self, requests: int, rows: int) -> FlatSizes:
        """What steps of at most so many requests and token rows need of the flat buffer of window rows."""
        return flat_sizes(requests, rows, window=self.window, ring_rows=self.ring_rows)

    @property
    def longest_ring_step(self) -> int:
        """Most query tokens of one request that may be stored in the ring before they are attended."""
        return self.ring_rows - self.window + 1


def plan_state(text: Any, numerics: Numerics, max_backtrack: int) -> StateLayout:
    """Layout for a text config (ModelConfig.text)."""
    ratios = text.compress_ratios
    sources, offset = [], 0
    for layer in text.kv_source_layer_ids:
        rows = BLOCK_TOKENS // ratios[layer]
        main = rows * row_bytes(numerics.main_format, text.head_dim)
        index = rows * row_bytes(numerics.index_format, text.index_head_dim)
        sources.append(SourceLayout(layer, ratios[layer], offset, main, offset + _aligned(main), index))
        offset += _aligned(main) + _aligned(index)
    carry = tuple(layer for layer in text.kv_source_layer_ids if ratios[layer] > 1)
    longest = max((ratios[layer] for layer in carry), default=1)
    ring = text.sliding_window + max_backtrack
    return StateLayout(
        window=text.sliding_window,
        ring_rows=ring + ring % 2,
        ring_layers=text.num_hidden_layers + text.num_nextn_predict_layers,
        window_row_bytes=row_bytes(numerics.window_format, text.head_dim),
        carry_tokens=longest + max_backtrack - 1,
        carry_layers=carry,
        head_dim=text.head_dim,
        sources=tuple(sources),
        block_bytes=max(offset, _BLOCK_ALIGNMENT),
        max_backtrack=max_backtrack,
    )


class State:
    """The allocated state of a device.

    windows: uint8 [slots * slot_rows, row_bytes]; carry: layer -> float32 [slots, carry_tokens, 2, D]; blocks: uint8
    [num_blocks, block_bytes]; history: int32 [slots, max_tokens], token ids by position.
    """

    def __init__(self, layout: StateLayout, num_slots: int, num_blocks: int, max_tokens: int, device: torch.device) -> None:
        self.layout = layout
        self.num_slots, self.num_blocks = num_slots, num_blocks
        self.windows = torch.zeros(num_slots * layout.slot_rows, layout.window_row_bytes, dtype=torch.uint8, device=device)
        carry_shape = (num_slots, layout.carry_tokens, 2, layout.head_dim)
        self.carry = {layer: torch.zeros(carry_shape, dtype=torch.float32, device=device) for layer in layout.carry_layers}
        self.blocks = torch.zeros(num_blocks, layout.block_bytes, dtype=torch.uint8, device=device)
        self.history = torch.full((num_slots, max_tokens), -1, dtype=torch.int32, device=device)
        self._ring = [self.windows[layer * layout.ring_rows :] for layer in range(layout.ring_layers)]
        self._main = {s.layer: self.blocks[:, s.main_offset : s.main_offset + s.main_bytes] for s in layout.sources}
        self._index = {s.layer: self.blocks[:, s.index_offset : s.index_offset + s.index_bytes] for s in layout.sources}

    def ring(self, layer: int) -> torch.Tensor:
        """Window rows seen from a layer (draft blocks follow the backbone): row = slot * slot_rows + position % ring_rows."""
        return self._ring[layer]

    def main_rows(self, layer: int) -> torch.Tensor:
        """Main compressed rows of a KV source layer: uint8 [num_blocks, bytes], strided."""
        return self._main[layer]

    def index_rows(self, layer: int) -> torch.Tensor:
        """Index keys of a KV source layer: uint8 [num_blocks, bytes], strided."""
        return self._index[layer]

    def tracked_bytes(self) -> dict[str, int]:
        """Bytes really held, by pool."""
        return {
            "kv_blocks": self.blocks.numel(),
            "window_state": self.windows.numel(),
            "carry_state": sum(t.numel() * 4 for t in self.carry.values()),
            "token_history": self.history.numel() * 4,
        }
