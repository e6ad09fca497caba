"""From an EngineConfig to a network ready to run: backend, checkpoint, sizes, weights, state, bound ops."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from deepinfer_hal.backend import Backend
from deepinfer_hal.dispatch import Dispatcher, Observer
from deepinfer_hal.registry import open_backend

from deepinfer.checkpoint.reader import Checkpoint, open_checkpoint
from deepinfer.config import EngineConfig
from deepinfer.errors import CapacityError, ConfigError
from deepinfer.model.load import ModelWeights, WeightLoader
from deepinfer.model.network import Network
from deepinfer.model.numerics import Numerics, choose_numerics
from deepinfer.model.state import BLOCK_TOKENS, State, StateLayout, plan_state
from deepinfer.model_path import resolve_model

DEFAULT_MODEL_LEN = 32_768
"""Longest sequence when none is asked for; rotation tables and token history grow with it."""

_DEFAULT_KV_SHARE = 4
_UNKNOWN_MEMORY_KV_BYTES = 1 << 30


@dataclass(frozen=True)
class Sizes:
    """How large a loaded engine is: longest sequence, sequences, paged blocks, token rows of a step."""

    max_model_len: int
    num_slots: int
    num_blocks: int
    max_rows: int


def choose_sizes(config: EngineConfig, checkpoint: Checkpoint, layout: StateLayout, backend: Backend, index: int) -> Sizes:
    """Sizes from the settings, the model's limit and the memory; CapacityError when nothing useful fits."""
    limit = config.resolve_max_model_len(checkpoint.config)
    longest = limit if config.max_model_len is not None else min(limit, DEFAULT_MODEL_LEN)
    wanted = config.max_num_seqs * -(-longest // BLOCK_TOKENS)
    if config.num_blocks is not None:
        blocks = config.num_blocks
    else:
        free = backend.memory_info(index).free_bytes
        budget = config.kv_cache_bytes or (free // _DEFAULT_KV_SHARE if free else _UNKNOWN_MEMORY_KV_BYTES)
        blocks = min(wanted, budget // layout.block_bytes)
    if blocks < 1:
        raise CapacityError(f"the KV cache needs at least one block of {layout.block_bytes} bytes; give more kv_cache_bytes")
    if blocks * BLOCK_TOKENS < longest:
        if config.max_model_len is not None:
            raise CapacityError(
                f"max_model_len {longest} needs {-(-longest // BLOCK_TOKENS)} blocks, the KV cache has {blocks}; "
                "lower max_model_len or give more num_blocks or kv_cache_bytes"
            )
        longest = blocks * BLOCK_TOKENS
    return Sizes(longest, config.max_num_seqs, blocks, max(config.max_num_batched_tokens, config.max_num_seqs))


@dataclass
class Loaded:
    """A network with everything it was built from."""

    config: EngineConfig
    checkpoint: Checkpoint
    backend: Backend
    device_index: int
    numerics: Numerics
    sizes: Sizes
    dispatcher: Dispatcher
    weights: ModelWeights
    state: State
    network: Network


def load(
    config: EngineConfig, *, with_draft: bool = False, only_reference: bool = False, observer: Observer | None = None
) -> Loaded:
    """Loads a model. Raises ConfigError, CheckpointError, CapacityError, BackendUnavailable or Unsupported.

    with_draft: keep what the draft block needs; only_reference: let the references serve every op;
    observer: sees every op call (see Dispatcher).
    """
    backend, index = open_backend(config.backend)
    if config.threads is not None:
        backend.set_threads(config.threads)
    checkpoint = open_checkpoint(resolve_model(config.model)).require_runnable()
    text = checkpoint.config.text
    numerics = choose_numerics(config.dtype, config.act_quant, config.kv_cache_dtype, text.use_fp4_sparse_kv)
    supported = backend.capabilities(index).stream_dtypes
    if numerics.stream_dtype not in supported:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in supported)
        raise ConfigError("dtype", f"backend {backend.name!r} runs {names}, not {config.stream_dtype}")
    layout = plan_state(text, numerics, config.max_backtrack)
    sizes = choose_sizes(config, checkpoint, layout, backend, index)
    dispatcher = Dispatcher(
        backend, index, config.fallback, config.batch_invariant, config.debug_checks, only_reference=only_reference,
        observer=observer,
    )  # fmt: skip
    device = backend.device(index)

    def prepare(role, canonical):
        return backend.prepare_weight(index, role, canonical)

    loader = WeightLoader(checkpoint.config, checkpoint.read, prepare, device, numerics.stream_dtype)
    vision = tuple(name for name, spec in checkpoint.specs.items() if spec.role == "vision" and name in checkpoint.tensors)
    weights = loader.model(vision)
    checkpoint.close()
    state = State(layout, sizes.num_slots, sizes.num_blocks, sizes.max_model_len, device)
    network = Network(
        text, weights, state, numerics, dispatcher, max_rows=sizes.max_rows, max_logit_rows=max(sizes.num_slots, 64),
        max_tokens=sizes.max_model_len + config.max_backtrack, token_map=_token_map(checkpoint, device), with_draft=with_draft,
    )  # fmt: skip
    return Loaded(config, checkpoint, backend, index, numerics, sizes, dispatcher, weights, state, network)


def _token_map(checkpoint: Checkpoint, device: torch.device) -> torch.Tensor | None:
    """Engram's compressed ids, made from the checkpoint's tokenizer and checked against the size that the config states."""
    from deepinfer.model.engram_vocab import engram_token_map

    text = checkpoint.config.text
    if not text.engram_layer_ids:
        return None
    path = checkpoint.folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError("model", f"{path} is absent; Engram layers hash ids that are made from it")
    token_map = engram_token_map(path, text.vocab_size)
    found = int(token_map.max()) + 1
    if text.engram_compressed_vocab_size and found > text.engram_compressed_vocab_size:
        raise ConfigError(
            "text_config.engram_compressed_vocab_size",
            f"is {text.engram_compressed_vocab_size}, but {path.name} gives {found} compressed ids",
        )
    return token_map.to(device)
