"""A slice of a model with random weights and caches made on the device: the engine's own loader, network and state.

Every weight has the shape and format of the released checkpoint, values of the size that a trained network's have, so that
activations stay finite; every cache row is canonical and random, and no two sequences share one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from deepinfer_hal.dispatch import Dispatcher, Observer
from deepinfer_hal.row_layout import sections

from deepinfer.bench.phases import Phases
from deepinfer.bench.slice_config import Slice
from deepinfer.bench.slice_memory import MAX_BACKTRACK, logit_rows
from deepinfer.checkpoint.tensors import TensorSpec, expected_tensors
from deepinfer.model.load import ModelWeights, WeightLoader
from deepinfer.model.network import Network
from deepinfer.model.numerics import Numerics
from deepinfer.model.state import BLOCK_TOKENS, State, plan_state

_SEED = 20_261
_FILL_BYTES = 1 << 30
_SCALE_SPREAD = 3


class RandomCheckpoint:
    """Reads tensors that no file has: `read(name)` makes the tensor of that name on the device, from a stored seed."""

    def __init__(self, config: Any, device: torch.device) -> None:
        self.specs, self.device = expected_tensors(config), device
        self.generator = torch.Generator(device).manual_seed(_SEED)

    def read(self, name: str) -> torch.Tensor:
        spec = self.specs[name]
        if spec.dtype in ("I8", "F8_E4M3", "F8_E8M0"):
            return self._codes(spec)
        dtype = torch.bfloat16 if spec.dtype == "BF16" else torch.float32
        values = torch.randn(spec.shape, generator=self.generator, device=self.device)
        if len(spec.shape) == 1 or spec.role == "engram_gate":  # norms, biases, sinks: near one, or small
            near_one = spec.role in ("norm", "mhc_scale", "engram_gate")
            return (values * 0.1 + (1.0 if near_one else 0.0)).to(dtype)
        return (values * spec.shape[-1] ** -0.5).to(dtype)

    def _codes(self, spec: TensorSpec) -> torch.Tensor:
        """Codes of all signs in some binades; scales that bring a product of K of them to the size of one input."""
        if spec.dtype == "I8":
            return self._bytes(spec.shape, 0, 256)
        if spec.dtype == "F8_E4M3":
            return _e4m3(self._bytes(spec.shape, 0, 256))
        weight = self.specs[f"{spec.name.removesuffix('.scale')}.weight"]
        columns = weight.shape[-1] * (2 if weight.dtype == "I8" else 1)
        middle = 126 - round(np.log2(columns) / 2)
        return self._bytes(spec.shape, middle - 1, middle + 1)

    def _bytes(self, shape: tuple[int, ...], low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.generator, device=self.device, dtype=torch.uint8)


def _e4m3(raw: torch.Tensor) -> torch.Tensor:
    """Random bytes as e4m3 codes of 2^-3 <= |x| < 2: the sign and mantissa stay, the exponent keeps two bits."""
    return (raw & 0x9F) + 0x20


class SliceModel:
    """A loaded slice on one device. Sequences hold `context` tokens in blocks of their own, sequence s in slot s."""

    def __init__(self, backend: Any, index: int, cut: Slice, sequences: int, context: int, phases: Phases | None = None) -> None:
        self.backend, self.index, self.slice = backend, index, cut
        self.config, self.text = cut.config, cut.config.text
        self.device = backend.device(index)
        self.numerics = Numerics(main_format=self.text.main_kv_format)
        self.blocks_each = -(-context // BLOCK_TOKENS)
        self.sequences, self.context = sequences, self.blocks_each * BLOCK_TOKENS
        source = RandomCheckpoint(self.config, self.device)
        loader = WeightLoader(self.config, source.read, self._prepare, self.device, self.numerics.stream_dtype)
        phases = phases or Phases()
        with phases("weights"):
            self.weights: ModelWeights = loader.model()
        layout = plan_state(self.text, self.numerics, max_backtrack=MAX_BACKTRACK)
        with phases("caches"):
            self.state = State(layout, sequences, sequences * self.blocks_each, self.context + BLOCK_TOKENS, self.device)
            fill_state(self.state, self.numerics, self.text, source.generator)

    def _prepare(self, role: str, canonical: Any) -> Any:
        return self.backend.prepare_weight(self.index, role, canonical)

    def network(self, max_rows: int, observer: Observer | None = None) -> Network:
        """The engine's network over these weights, for steps of at most `max_rows` token rows."""
        text = self.text
        dispatcher = Dispatcher(self.backend, self.index, observer=observer, observe_parts=observer is not None)
        token_map = None
        if text.engram_layer_ids:
            ids = torch.arange(text.vocab_size, dtype=torch.int32, device=self.device)
            token_map = ids % (text.engram_compressed_vocab_size or text.vocab_size)
        network = Network(
            text, self.weights, self.state, self.numerics, dispatcher, max_rows=max_rows,
            max_logit_rows=logit_rows(max_rows, self.sequences),
            max_tokens=self.context + 8, token_map=token_map, with_draft=True,
        )  # fmt: skip
        network.dispatcher = dispatcher
        return network

    def block_tables(self, sequences: int) -> np.ndarray:
        """int32 [R, blocks_each] of the first `sequences` sequences, whose blocks lie scattered over the pool."""
        order = np.random.default_rng(_SEED).permutation(self.sequences * self.blocks_each).astype(np.int32)
        return order.reshape(self.sequences, self.blocks_each)[:sequences]


def fill_state(state: State, numerics: Numerics, text: Any, generator: torch.Generator) -> None:
    """Random canonical rows in all caches, random carries, and a random token history."""
    for source in state.layout.sources:
        for cache, form, width in (
            (state.main_rows(source.layer), numerics.main_format, text.head_dim),
            (state.index_rows(source.layer), numerics.index_format, text.index_head_dim),
        ):
            _fill_rows(cache, form, width, source.block_rows, generator)
    _fill_rows(state.windows, numerics.window_format, text.head_dim, 0, generator)
    for carry in state.carry.values():
        carry.normal_(generator=generator)
    state.history.random_(0, text.vocab_size, generator=generator)


def _fill_rows(cache: torch.Tensor, form: str, width: int, block_rows: int, generator: torch.Generator) -> None:
    codes, scales = sections(cache, form, width, block_rows)
    if not codes.shape[-1] or not codes.numel():
        return
    middle = {"fp4_16": 0x30, "fp8_32": 126, "mxfp4_32": 125}[form]  # 0.5 as e4m3, or a power of two
    step = max(1, _FILL_BYTES // (codes[0].numel() + scales[0].numel()))
    for start in range(0, codes.shape[0], step):
        some = slice(start, start + step)
        drawn = torch.randint(0, 256, codes[some].shape, generator=generator, device=cache.device, dtype=torch.uint8)
        codes[some] = _e4m3(drawn) if form == "fp8_32" else drawn
        shape = scales[some].shape
        scales[some] = torch.randint(
            middle - 1, middle + _SCALE_SPREAD - 1, shape, generator=generator, device=cache.device, dtype=torch.uint8
        )
