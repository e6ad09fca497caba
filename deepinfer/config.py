"""All configuration: `EngineConfig` for how to run, and `ModelConfig` (re-exported) for what to run."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from deepinfer.errors import ConfigError
from deepinfer.model_config import (
    ModelConfig,
    QuantizationConfig,
    RopeScaling,
    TextConfig,
    VisionConfig,
    config_error,
)
from deepinfer.topology import LayerTopology
from deepinfer.units import human_int

DEFAULT_PROMPT_GRAPH_TOKENS, MOST_ROWS = 1024, 1 << 20
_HUMAN_SIZED = (
    "max_model_len", "max_num_seqs", "max_num_batched_tokens", "num_blocks", "kv_cache_bytes", "max_prompt_graph_tokens",
)  # fmt: skip


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an engine runs. Build it with `EngineConfig.create(...)`, which checks keys, types and combinations.

    - model: folder of a checkpoint, or `nano`. backend: `auto` or a backend's name, such as `cpu`.
    - dtype: of the streams; `auto` is bfloat16. act_quant: `fp8_32` quantises the released inputs, `none` is the oracle
      mode. kv_cache_dtype: `auto` is the canonical quantised rows, `float32` is for tests.
    - max_model_len: tokens of prompt and output together; None takes what the model and the memory allow.
    - block_size: tokens in a cache block. num_blocks or kv_cache_bytes: size of the pool; both None lets the engine
      choose. max_backtrack: tokens by which a sequence's state can be rolled back.
    - enforce_eager: capture no graphs of steps, on a backend that can. max_prompt_graph_tokens: token rows of the largest
      captured step with a prompt in it; larger ones keep a device busy without; 0 captures decode steps alone.
    - overlap: plan the next step while the device runs; None leaves it to the backend. threads: CPU threads; None
      leaves them as they are.
    """

    model: str
    backend: str = "auto"
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    act_quant: Literal["fp8_32", "none"] = "fp8_32"
    kv_cache_dtype: Literal["auto", "float32"] = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    enable_chunked_prefill: bool = True
    block_size: Literal[128] = 128
    num_blocks: int | None = None
    kv_cache_bytes: int | None = None
    max_backtrack: int = 6
    batch_invariant: bool = False
    fallback: Literal["allow", "forbid"] = "allow"
    debug_checks: bool = False
    seed: int = 0
    enforce_eager: bool = False
    max_prompt_graph_tokens: int = DEFAULT_PROMPT_GRAPH_TOKENS
    overlap: bool | None = None
    threads: int | None = None
    disable_progress: bool = False

    @classmethod
    def create(cls, **settings: Any) -> EngineConfig:
        """Check and convert; sizes may be strings such as `4k`. Raises ConfigError with the field's path."""
        converted = dict(settings)
        for key in _HUMAN_SIZED:
            if isinstance(converted.get(key), str):
                try:
                    converted[key] = human_int(converted[key])
                except ValueError as error:
                    raise ConfigError(key, str(error)) from None
        if hasattr(converted.get("model"), "__fspath__"):
            converted["model"] = converted["model"].__fspath__()
        try:
            config = msgspec.convert(converted, cls, strict=True)
        except msgspec.ValidationError as error:
            raise config_error(error, cls) from None
        _check_engine_config(config)
        return config

    @property
    def stream_dtype(self) -> str:
        """`bfloat16` or `float32`: what `auto` resolves to."""
        return "bfloat16" if self.dtype == "auto" else self.dtype

    def resolve_max_model_len(self, model: ModelConfig) -> int:
        """Tokens of one sequence at most: the setting, checked against the model. Raises ConfigError."""
        limit = model.text.max_position_embeddings
        if self.max_model_len is None:
            return limit
        if self.max_model_len > limit:
            raise ConfigError(
                "max_model_len", f"{self.max_model_len} exceeds the model's max_position_embeddings {limit}"
            )
        return self.max_model_len


def _check_engine_config(config: EngineConfig) -> None:
    ranges = {
        "max_model_len": (1, 1 << 30),
        "max_num_seqs": (1, 1 << 16),
        "max_num_batched_tokens": (1, MOST_ROWS),
        "num_blocks": (1, 1 << 31),
        "kv_cache_bytes": (1, 1 << 62),
        "max_backtrack": (0, 64),
        "max_prompt_graph_tokens": (0, MOST_ROWS),
        "seed": (0, (1 << 64) - 1),
        "threads": (1, 4096),
    }
    for key, (low, high) in ranges.items():
        value = getattr(config, key)
        if value is not None and not low <= value <= high:
            raise ConfigError(key, f"{value} is out of range: {low} to {high}")
    if not config.model:
        raise ConfigError("model", "is empty: give the folder of a checkpoint, or nano")
    if config.num_blocks is not None and config.kv_cache_bytes is not None:
        raise ConfigError("kv_cache_bytes", "give num_blocks or kv_cache_bytes, not both")
    if config.max_num_batched_tokens < config.max_num_seqs:
        raise ConfigError(
            "max_num_batched_tokens",
            f"{config.max_num_batched_tokens} is below max_num_seqs {config.max_num_seqs}: each decodes a token a step",
        )
    if not config.enable_chunked_prefill and config.max_num_batched_tokens < (config.max_model_len or 0):
        raise ConfigError(
            "max_num_batched_tokens",
            f"{config.max_num_batched_tokens} is below max_model_len {config.max_model_len}: without chunked prefill a "
            "prompt must fit one step",
        )


__all__ = [
    "EngineConfig",
    "LayerTopology",
    "ModelConfig",
    "QuantizationConfig",
    "RopeScaling",
    "TextConfig",
    "VisionConfig",
]
