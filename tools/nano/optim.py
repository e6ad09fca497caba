"""Muon for matrices, AdamW for the rest, both under one learning-rate factor."""

from __future__ import annotations

from collections import defaultdict

import torch
from config import Tensor

MUON_RATE, MUON_MOMENTUM, MUON_DECAY = 0.02, 0.95, 0.02
ADAM_BETAS = (0.9, 0.95)
ADAM_RATES = (  # first match decides
    ("engram.embed.weight", 1e-2), ("markov_head.embed.weight", 4e-3), ("embed.weight", 1e-2),
    ("_fn", 1e-3), ("_base", 3e-3), ("_scale", 3e-3), ("attn_sink", 1e-2), ("", 4e-3),
)
NEVER_TRAINED = ("gate.bias", "gate.bias_vl", "confidence_head.proj.weight")
NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def is_muon(name: str, tensor: Tensor) -> bool:
    """Matrices that map one hidden space to another; lookups, heads, gates and mHC maps are not."""
    return tensor.kind in ("fp8", "fp4") or name.endswith(("compressor.wkv.weight", "wgate.weight", "wk.weight"))


def orthogonalise(update: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Newton-Schulz: [n, r, c] to matrices of singular values near 1 (quintic iteration of Keller Jordan's Muon)."""
    a, b, c = NS_COEFFICIENTS
    x = update.bfloat16() if update.is_cuda else update.clone()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).float()


class Optimiser:
    """step(factor) moves every parameter that has a gradient; factor is the schedule's value in [0, 1]."""

    def __init__(self, parameters: dict[str, torch.Tensor], table: dict[str, Tensor]) -> None:
        self.groups: dict[tuple[int, ...], list[torch.Tensor]] = defaultdict(list)
        adam = defaultdict(list)
        for name, parameter in parameters.items():
            if name.endswith(NEVER_TRAINED):
                continue
            if is_muon(name, table[name]):
                self.groups[tuple(parameter.shape)].append(parameter)
            else:
                adam[next(rate for part, rate in ADAM_RATES if part in name)].append(parameter)
        self.momentum = {s: torch.zeros(len(p), *s, device=p[0].device) for s, p in self.groups.items()}
        fused = next(iter(parameters.values())).is_cuda
        self.adam = torch.optim.AdamW([{"params": p, "lr": rate, "rate": rate} for rate, p in adam.items()],
                                      betas=ADAM_BETAS, weight_decay=0.0, fused=fused)

    @torch.no_grad()
    def step(self, factor: float) -> None:
        for group in self.adam.param_groups:
            group["lr"] = group["rate"] * factor
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        for shape, parameters in self.groups.items():
            gradients = torch.stack([torch.zeros_like(p) if p.grad is None else p.grad for p in parameters])
            momentum = self.momentum[shape].lerp_(gradients, 1 - MUON_MOMENTUM)
            update = orthogonalise(gradients.lerp_(momentum, MUON_MOMENTUM))
            rate = MUON_RATE * factor * max(1.0, shape[0] / shape[1]) ** 0.5
            torch._foreach_mul_(parameters, 1 - MUON_DECAY * MUON_RATE * factor)
            torch._foreach_add_(parameters, list(update.unbind(0)), alpha=-rate)
            for parameter in parameters:
                parameter.grad = None

    def state_dict(self) -> dict:
        return {"adam": self.adam.state_dict(), "momentum": list(self.momentum.values())}

    def load_state_dict(self, state: dict) -> None:
        self.adam.load_state_dict(state["adam"])
        for own, saved in zip(self.momentum.values(), state["momentum"], strict=True):
            own.copy_(saved)
