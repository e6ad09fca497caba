"""What each part of nano learns from."""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy, log_softmax

BALANCE_RATE = 1e-3


def next_token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy in nats over targets that are not -100. logits [B, T, V]."""
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def index_loss(taps: dict, config) -> torch.Tensor:
    """KL from each indexer's softmax to the attention that the layers which use it paid to compressed rows.

    Mass is averaged over those layers and normalised over the rows that got any: all visible ones while attention is
    dense, the selected ones afterwards. Only indexer weights receive a gradient (the taps are detached elsewhere).
    """
    sources = sorted(config.index_source_layer_ids)
    scale = (config.index_n_heads * config.index_head_dim) ** -0.5
    total = 0.0
    for source, following in zip(sources, [*sources[1:], config.num_hidden_layers], strict=True):
        users = [layer for layer in range(source, following) if f"compressed_attention.{layer}" in taps]
        mass = sum(taps[f"compressed_attention.{layer}"] for layer in users)
        target = mass / mass.sum(-1, keepdim=True).clamp_min(1e-9)
        scores = (taps[f"index_scores.{source}"] * scale).masked_fill(mass <= 0, -1e30)
        divergence = (torch.xlogy(target, target) - target * log_softmax(scores, -1)).sum(-1)
        total = total + divergence.mean()
    return total / len(sources)


@torch.no_grad()
def balance_experts(weights: dict, chosen: dict[str, torch.Tensor], factor: float = 1.0) -> torch.Tensor:
    """Moves each gate.bias towards equal load without a gradient; bias_vl follows.

    chosen: prefix of a feed-forward part -> expert ids [..., k]. Returns the largest load over the fair one.
    """
    worst = torch.zeros((), device=next(iter(weights.values())).device)
    for prefix, ids in chosen.items():
        bias = weights[f"{prefix}.gate.bias"]
        load = (ids.flatten()[:, None] == torch.arange(bias.numel(), device=ids.device)).sum(0).float()
        bias += BALANCE_RATE * factor * (load.mean() - load).sign()
        bias -= bias.mean()
        weights[f"{prefix}.gate.bias_vl"].copy_(bias)
        worst = torch.maximum(worst, load.max() / load.mean())
    return worst


def draft_loss(draft_logits, target_logits, gold, decay: float = 0.8) -> tuple[torch.Tensor, torch.Tensor]:
    """Distillation plus cross entropy against the target's greedy token; also returns agreement per row [b].

    draft_logits, target_logits [n, b, V]: row i predicts position P+2+i, both given the text up to it. gold [n, b]: the
    text there (-100 past the end). A row counts less once the text has left the target's greedy path, since no draft
    that far is ever accepted, and by decay**i.
    """
    greedy = target_logits.argmax(-1)
    on_path = torch.where(greedy == gold, 1.0, 0.15)
    weight = torch.cat((torch.ones_like(on_path[:, :1]), on_path[:, :-1]), 1).cumprod(1)
    weight = weight * decay ** torch.arange(weight.shape[1], device=weight.device) * (gold >= 0)
    log_draft = log_softmax(draft_logits, -1)
    log_target = log_softmax(target_logits, -1)
    divergence = (log_target.exp() * (log_target - log_draft)).sum(-1)
    hard = -log_draft.gather(-1, greedy[..., None]).squeeze(-1)
    agreement = ((log_draft.argmax(-1) == greedy) * weight).sum(0) / weight.sum(0).clamp_min(1e-9)
    return ((divergence + 0.5 * hard) * weight).sum() / weight.sum().clamp_min(1e-9), agreement.detach()
