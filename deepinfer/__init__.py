"""deepinfer: DeepSeek-V4.1 inference over one hardware abstraction layer.

Importing this package is cheap: the names below are loaded on first use (PEP 562).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer._ownership import require_sole_owner

__version__ = "0.1.0"

require_sole_owner(__file__)

_HOME = {
    "LLM": "deepinfer.llm",
    "AsyncLLM": "deepinfer.async_llm",
    "SamplingParams": "deepinfer.sampling_params",
    "RequestOutput": "deepinfer.outputs",
    "CompletionOutput": "deepinfer.outputs",
    "ModelConfig": "deepinfer.config",
    "EngineConfig": "deepinfer.config",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EngineConfig",
    "ModelConfig",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]

if TYPE_CHECKING:
    from deepinfer.async_llm import AsyncLLM
    from deepinfer.config import EngineConfig, ModelConfig
    from deepinfer.llm import LLM
    from deepinfer.outputs import CompletionOutput, RequestOutput
    from deepinfer.sampling_params import SamplingParams


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'deepinfer' has no attribute {name!r}; it has {', '.join(sorted(_HOME))}")
    import importlib

    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
