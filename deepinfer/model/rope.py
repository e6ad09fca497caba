"""Rotary tables: plain for layers without compression and the draft, YaRN for the others (section 2.3 of the model notes)."""

from __future__ import annotations

import math
from typing import Any

import torch


def inverse_frequencies(text: Any, kind: str) -> torch.Tensor:
    """float32 [rope_dim / 2]: theta^(-2i/d), for "yarn" blended with the frequencies divided by `factor`.

    YaRN: f' = f/factor * rho + f * (1 - rho), rho_i = clamp((i - lo)/(hi - lo), 0, 1), lo = floor(d(beta_fast)),
    hi = ceil(d(beta_slow)), d(n) = dim * ln(original/(2 pi n)) / (2 ln theta). No magnitude scale.
    """
    dim = text.qk_rope_head_dim
    theta = text.rope_theta if kind == "plain" else text.compress_rope_theta
    frequencies = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if kind == "plain":
        return frequencies
    yarn = text.rope_scaling
    original = yarn.original_max_position_embeddings

    def boundary(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(boundary(yarn.beta_fast)), 0)
    high = min(math.ceil(boundary(yarn.beta_slow)), dim - 1)
    steps = torch.arange(dim // 2, dtype=torch.float32)
    ramp = ((steps - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequencies / yarn.factor * ramp + frequencies * (1 - ramp)


def rope_table(text: Any, kind: str, positions: int, device: torch.device) -> torch.Tensor:
    """float32 [positions, rope_dim]: cosines of every pair, then sines."""
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), inverse_frequencies(text, kind))
    return torch.cat((angles.cos(), angles.sin()), dim=1).to(device)
