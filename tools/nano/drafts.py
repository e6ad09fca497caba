"""Draft blocks in training and in measurement: anchors, verification against the target, confidence data."""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(frozen=True)
class Verified:
    """n draft blocks of b tokens, verified. accepted bool [n, b]: this draft and all before it equal the target's
    greedy tokens along the drafted text. gold_accepted: the same against the text itself. confidence: logits [n, b].
    features [n, b, H + rank]: what the confidence head reads.
    """

    accepted: torch.Tensor
    gold_accepted: torch.Tensor
    confidence: torch.Tensor
    features: torch.Tensor

    @staticmethod
    def join(parts: list[Verified]) -> Verified:
        return Verified(*(torch.cat([getattr(p, f.name) for p in parts]) for f in dataclasses.fields(Verified)))

    def tested(self) -> torch.Tensor:
        """bool [n, b]: drafts all of whose predecessors were accepted."""
        first = torch.ones_like(self.accepted[:, :1])
        return torch.cat((first, self.accepted[:, :-1]), 1)


@torch.no_grad()
def verify_drafts(net, ids: torch.Tensor, anchors: torch.Tensor, rows_at_once: int = 64) -> Verified:
    """Drafts after each anchor of one sequence, checked by running the target on the text with the drafts in place.

    ids int64 [T], starting with begin; anchors int64 [n]: positions P with P + 1 + block < T, ascending.
    """
    block = net.config.dspark_block_size
    taps: dict = {}
    net.forward(ids[None], taps=taps, wanted={"dspark"})
    draft = net.draft(taps["dspark.features"], ids[None], anchors[None])
    _, tokens, markov = net.markov_chain(draft.base_logits, draft.gold)
    confidence = net.confidence_logits(draft.raw_hidden, markov)[0]
    tokens = tokens[0]
    steps = torch.arange(1, block + 1, device=ids.device)
    agree = []
    for start in range(0, anchors.numel(), rows_at_once):
        part = anchors[start : start + rows_at_once]
        length = int(part[-1]) + 2 + block
        rows = ids[:length].repeat(part.numel(), 1)
        rows.scatter_(1, part[:, None] + 1 + steps, tokens[start : start + rows_at_once])
        greedy = net.forward(rows, taps={}, wanted=set()).argmax(-1)
        agree.append(greedy.gather(1, part[:, None] + steps) == tokens[start : start + rows_at_once])
    matches = torch.cat(agree)
    gold = ids[anchors[:, None] + 1 + steps]
    features = torch.cat((draft.raw_hidden.float(), markov.float()), -1)[0]
    return Verified(matches.cumprod(1).bool(), (tokens == gold).cumprod(1).bool(), confidence, features)


def every_nth_anchor(tokens: int, block: int, step: int, device) -> torch.Tensor:
    """Positions step - 1, 2 step - 1, ... that leave room for the gold token and the block."""
    return torch.arange(step - 1, tokens - block - 1, step, device=device)


def calibration_error(probability: torch.Tensor, outcome: torch.Tensor, bins: int = 15) -> float:
    """Expected calibration error: mean over equal-width bins of |mean probability - frequency|, weighted by count."""
    which = (probability * bins).long().clamp(0, bins - 1)
    count = torch.bincount(which, minlength=bins).double()
    gap = torch.bincount(which, (probability - outcome.to(probability.dtype)).double(), minlength=bins).abs()
    return float(gap.sum() / count.sum())


def area_under_curve(score: torch.Tensor, outcome: torch.Tensor) -> float:
    """Probability that an accepted draft scores above a rejected one (ties count half)."""
    score, outcome = score.double(), outcome.bool()
    ordered, inverse, counts = torch.unique(score, return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0) - (counts - 1) / 2.0)[inverse]
    positive, negative = int(outcome.sum()), int((~outcome).sum())
    if not positive or not negative:
        return float("nan")
    return float((ranks[outcome].sum() - positive * (positive + 1) / 2) / (positive * negative))


def fit_confidence(features: torch.Tensor, accepted: torch.Tensor, iterations: int = 60) -> torch.Tensor:
    """The confidence head's weight [1, F], float32, by L-BFGS with a little ridge.

    features [n, F] and accepted bool [n] of drafts whose predecessors were all accepted.
    """
    x, y = features.double(), accepted.double()
    scale = x.pow(2).mean(0).sqrt().clamp_min(1e-6)
    x = x / scale
    weight = torch.zeros(x.shape[1], dtype=torch.float64, device=x.device, requires_grad=True)
    solver = torch.optim.LBFGS([weight], max_iter=iterations, line_search_fn="strong_wolfe")

    def closure():
        solver.zero_grad()
        logits = x @ weight
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, y) + 1e-4 * weight.square().sum()
        loss.backward()
        return loss

    solver.step(closure)
    return (weight.detach() / scale).float()[None]
