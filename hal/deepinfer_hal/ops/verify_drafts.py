"""verify_drafts: which drafts of each request stand, and the token after them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from deepinfer_hal import philox
from deepinfer_hal.card import Case, OpCard, out, register, scalar, tensor
from deepinfer_hal.errors import BadCall
from deepinfer_hal.ops._common import generator, integers, normal, poisoned, wide

RULES = ("coupled", "rejection")


def verify_drafts(
    target: torch.Tensor,
    drafts: torch.Tensor,
    draft_counts: torch.Tensor,
    target_logits: torch.Tensor | None,
    draft_logits: torch.Tensor | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    rule: str,
    accepted: torch.Tensor,
    tokens: torch.Tensor,
) -> None:
    """accepted[r] = length of the accepted prefix; tokens[r] = that prefix, then one more token, then -1.

    target[r, i] is the token that plain sampling gives at positions[r] + i; drafts[r, i] is proposed for that place.
    coupled: a draft stands iff it equals its target, and the token after is the next target.
    rejection (Leviathan, Kalman and Matias, 2023): with p, q the softmax of target and draft logits (what each side
    really samples from), draft d stands iff u < p(d) / q(d), u of purpose ACCEPT; the token after a refusal is the
    Gumbel-max of the positive part of p - q under noise of purpose RESIDUAL; after all stand, the next target.
    """
    if rule not in RULES:
        raise BadCall(f"verify_drafts: rule {rule!r} is not one of {', '.join(RULES)}")
    if target.shape[0] == 0:
        return
    width = drafts.shape[1]
    column = torch.arange(width + 1, device=target.device)
    offered = (column[:width] < draft_counts[:, None]) & (drafts >= 0)
    if rule == "coupled":
        stands, refill = drafts == target[:, :width], target
    else:
        stands, refill = _reject(target, drafts, offered, target_logits, draft_logits, seeds, positions)
    count = (stands & offered).int().cumprod(dim=-1).sum(dim=-1)
    padded = torch.nn.functional.pad(drafts, (0, 1), value=-1)
    kept = torch.where(column == count[:, None], refill, torch.full_like(refill, -1))
    tokens.copy_(torch.where(column < count[:, None], padded, kept))
    accepted.copy_(count)


def _reject(target, drafts, offered, target_logits, draft_logits, seeds, positions):
    """Which drafts pass their test (bool [R, B]), and the token that follows if the first failure is at each place."""
    width, vocab = draft_logits.shape[1:]
    p, q = wide(target_logits)[:, :width].softmax(-1), wide(draft_logits).softmax(-1)
    picked = drafts.long().clamp(0, vocab - 1)[..., None]
    at = positions.long()[:, None] + torch.arange(width, device=drafts.device)
    u = philox.uniform_at(seeds[:, None], at, philox.ACCEPT, picked[..., 0])
    stands = u * q.gather(-1, picked)[..., 0] < p.gather(-1, picked)[..., 0]
    residual = (p - q).clamp(min=0)
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p)
    noise = philox.gumbel_noise(seeds[:, None].expand_as(at), at, philox.RESIDUAL, vocab)
    fresh = (residual.log() + noise).argmax(dim=-1).to(target.dtype)
    refill = target.clone()
    refill[:, :width] = torch.where(offered, fresh, target[:, :width])
    return stands, refill


def _check(args: Mapping[str, Any]) -> None:
    if args["rule"] not in RULES:
        raise BadCall(f"verify_drafts: rule {args['rule']!r} is not one of {', '.join(RULES)}")
    if args["rule"] == "rejection" and (args["target_logits"] is None or args["draft_logits"] is None):
        raise BadCall("verify_drafts: the rejection rule needs target_logits and draft_logits")


def _cases():
    for rows, width, vocab in ((0, 5, 64), (1, 1, 64), (3, 5, 64), (33, 5, 2048), (3, 0, 64)):
        for rule in RULES:
            yield Case("verify_drafts", {"R": rows, "B": width, "V": vocab, "rule": rule})


def _generate(case, seed, device, prepare):
    rows, width, vocab, rule = (case.params[name] for name in ("R", "B", "V", "rule"))
    gen = generator(case, seed)
    target = integers(gen, 0, vocab, rows, width + 1, device=device)
    wrong = normal(gen, rows, width, device=device) > 0.8
    drafts = torch.where(wrong, integers(gen, 0, vocab, rows, width, device=device), target[:, :width])
    logits = normal(gen, rows, width + 1, vocab, device=device, scale=2.0)
    near = logits[:, :width] + normal(gen, rows, width, vocab, device=device, scale=0.5)
    counts = integers(gen, 0, width + 1, rows, device=device)
    return {
        "target": target,
        "drafts": drafts,
        "draft_counts": counts,
        "target_logits": logits if rule == "rejection" else None,
        "draft_logits": near if rule == "rejection" else None,
        "seeds": integers(gen, -(2**62), 2**62, rows, dtype=torch.int64, device=device),
        "positions": integers(gen, 0, 1 << 20, rows, device=device),
        "rule": rule,
        "accepted": poisoned(rows, dtype=torch.int32, device=device),
        "tokens": poisoned(rows, width + 1, dtype=torch.int32, device=device),
    }


CARD = register(
    OpCard(
        name="verify_drafts",
        group="sampling",
        summary="Accepted prefix of each request's drafts and the token after it: coupled or rejection rule.",
        signature=(
            tensor("target", "i32", "R B+1"),
            tensor("drafts", "i32", "R B"),
            tensor("draft_counts", "i32", "R"),
            tensor("target_logits", "f32", "R B+1 V", optional=True),
            tensor("draft_logits", "f32", "R B V", optional=True),
            tensor("seeds", "i64", "R"),
            tensor("positions", "i32", "R"),
            scalar("rule", "str"),
            out("accepted", "i32", "R"),
            out("tokens", "i32", "R B+1"),
        ),
        reference=verify_drafts,
        rounding="rejection: both softmaxes, the ratio test and the residual are float32",
        discrete=("accepted", "tokens"),
        check=_check,
        enumerate_cases=_cases,
        generate=_generate,
    )
)
