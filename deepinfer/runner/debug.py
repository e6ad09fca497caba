"""Taps for tests: single layers and the draft block, run through the engine's own path."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import torch

from deepinfer.model.draft import DraftResult
from deepinfer.model.layers import Residual
from deepinfer.model.state import BLOCK_TOKENS
from deepinfer.runner.runner import Runner


class DebugSession:
    """Works on slot 0 and the first blocks of an idle runner."""

    def __init__(self, runner: Runner) -> None:
        self.runner, self.network = runner, runner.network

    def forward_layer(
        self, layer: int, token_ids: np.ndarray, streams: torch.Tensor, pre_mix: torch.Tensor, caches: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Runs one layer alone over a whole sequence (one step, from position 0).

        streams [T, m, H] and pre_mix float32 [T, m] as the layer before left them. caches may hold, for a layer that is no
        source itself, "compressed_kv" and "index_keys" (rows of its KV source), "select" int32 [T, k] and "candidates"
        0/1 [T, rows]. Returns "streams", "pre_mix", and "select" for an index source.
        """
        runner, network = self.runner, self.network
        topology = runner.text.layers[layer]
        ids = runner.check_ids(token_ids)
        runner.write_tokens(0, 0, ids)
        blocks = np.arange(-(-len(ids) // BLOCK_TOKENS), dtype=np.int32)[None]
        zero = np.zeros(1, np.int32)
        meta = runner.plan(np.array([0, len(ids)], np.int32), zero, zero, blocks)
        views = network.buffers.rows(len(ids))
        history = runner.state.history
        network.gather_tokens(history, meta.slots, meta.row_to_req, meta.positions, None, views.ids, views.ngrams)
        views.streams.copy_(streams)
        views.pre_a.copy_(pre_mix)
        self._fill(topology, caches, views)
        residual = Residual(views.pre_a)
        network.run_block(topology, residual, meta, views)
        network.blocks.finish_site(residual, views)
        found = {"streams": views.streams.clone(), "pre_mix": residual.pre.clone()}
        if topology.owns_index_query:
            found["select"] = views.selected.clone()
        return found

    def _fill(self, topology, caches: dict[str, torch.Tensor], views) -> None:
        """Puts given rows into the caches of the layer's source, through the store ops."""
        if topology.ratio == 0 or topology.owns_kv:
            return
        runner, numerics = self.runner, self.network.numerics
        source = runner.state.layout.source(topology.kv_source)
        bind = runner.loaded.dispatcher.bind
        for name, op, fmt, cache in (
            ("compressed_kv", "store_compressed_kv", numerics.main_format, runner.state.main_rows(source.layer)),
            ("index_keys", "store_index_k", numerics.index_format, runner.state.index_rows(source.layer)),
        ):
            if name in caches:
                rows = caches[name].to(runner.device, numerics.stream_dtype)
                slots = torch.arange(rows.shape[0], dtype=torch.int32, device=rows.device)
                bind(op, "debug", x=numerics.dtype_name, format=fmt)(rows, slots, fmt, source.block_rows, None, cache)
        if "select" in caches:
            views.selected.copy_(caches["select"])
        if "candidates" in caches:
            views.candidates.copy_(self._candidate_blocks(caches["candidates"]))

    def _candidate_blocks(self, mask: torch.Tensor) -> torch.Tensor:
        """int32 [T, C] block ids of a 0/1 row mask [T, rows]."""
        text = self.runner.text
        size, most = text.candidate_block_size, text.candidate_topk_blocks
        rows = mask.shape[1]
        padded = torch.nn.functional.pad(mask, (0, -rows % size)).view(mask.shape[0], -1, size)
        blocks = torch.full((mask.shape[0], most), -1, dtype=torch.int32)
        for row, held in enumerate(padded.amax(-1) > 0):
            found = held.nonzero()[:, 0][:most]
            blocks[row, : len(found)] = found.int()
        return blocks

    @contextlib.contextmanager
    def selections(self, rows: dict[int, torch.Tensor]) -> Iterator[None]:
        """Inside, index sources use these compressed rows (layer -> int32 [T, k] over the whole sequence) in place of their own.

        For comparisons with an implementation that breaks exact score ties differently.
        """
        attention = self.network.attention
        select = attention._select

        def given(block, topology, meta, ratio, views, *rest):
            select(block, topology, meta, ratio, views, *rest)
            if topology.layer in rows:
                views.selected.copy_(rows[topology.layer].to(meta.positions.device)[meta.positions.long()])

        attention._select = given
        try:
            yield
        finally:
            del attention._select

    def run(self, token_ids: np.ndarray, chunk: int | None = None) -> None:
        """Runs a whole sequence, filling every cache, draft rings included."""
        for _ in self.runner.prefill(self.runner.check_ids(token_ids), chunk):
            pass

    def store_features(self, features: torch.Tensor) -> None:
        """Fills the draft rings from given target features [T, targets * H] of positions 0..T-1, without the backbone."""
        runner, zero = self.runner, np.zeros(1, np.int32)
        blocks = np.zeros((1, -(-len(features) // BLOCK_TOKENS)), np.int32)
        meta = runner.plan(np.array([0, len(features)], np.int32), zero, zero, blocks)
        views = self.network.buffers.rows(len(features))
        views.features.copy_(features)
        self.network.draft.store_main(meta, views)

    def draft(self, position: int, gold: int) -> DraftResult:
        """The draft block after `position` given the next token, on the caches that `run` left."""
        if self.network.draft is None:
            raise RuntimeError("the runner was loaded without the draft: use Runner.from_config(config, with_draft=True)")
        upload = self.runner.upload
        return self.network.draft(
            upload(np.zeros(1, np.int32)), upload(np.array([position], np.int32)), upload(np.array([gold], np.int32))
        )
