"""Starting weights: streams that begin as a plain residual network, outputs near zero, selectors undecided."""

from __future__ import annotations

import math

import torch
from config import tensor_table

PRE_BIAS = math.log(0.25 / 0.75)  # each of four streams read with weight 1/4
MIX_DIAGONAL = 4.0  # softmax over a row keeps 95 % in its own stream
HC_JITTER = 0.3  # streams start as copies; without jitter they would stay equal


def init_weights(config: dict, seed: int) -> dict[str, torch.Tensor]:
    """float32 master weights for every tensor of the checkpoint, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return {name: _init(name, tensor.shape, generator) for name, tensor in tensor_table(config).items()}


def _init(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    def normal(std: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * std

    if "norm.weight" in name or name.endswith(("q_weight", "k_weight")):
        return torch.ones(shape)
    if name.endswith(("attn_sink", "gate.bias", "gate.bias_vl", "confidence_head.proj.weight")):
        return torch.zeros(shape)
    if name.endswith("_scale"):
        return torch.full(shape, 0.1)
    if name.endswith("_base"):
        return _init_hc_base(normal(HC_JITTER))
    if name.endswith("wo_b.weight") or ".w2." in name:
        return normal(0.1 / math.sqrt(shape[1]))
    if name == "embed.weight":
        return normal(0.5)
    if name.endswith("engram.embed.weight"):
        return normal(0.5)
    if name == "head.weight" or name.endswith(("markov_head.head.weight", "weights_proj.weight")):
        return normal(0.2 / math.sqrt(shape[1]))
    if name.endswith("markov_head.embed.weight"):
        return normal(0.5)
    return normal(1.0 / math.sqrt(shape[1]))


def _init_hc_base(jitter: torch.Tensor) -> torch.Tensor:
    streams = math.isqrt(jitter.numel() + 1) - 1  # rows are (2 + m) m
    base = jitter.clone()
    base[:streams] += PRE_BIAS
    base[2 * streams :].view(streams, streams).diagonal().add_(MIX_DIAGONAL)
    return base
