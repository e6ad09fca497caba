"""verify_drafts: the coupled rule is one comparison a place; the rejection rule is one program a draft, then one a request.

The first kernel of the rejection rule leaves in `tokens` each draft that stands and -1 where one does not, so that the second
knows the first failure. Only there does it draw from what is left of the target's distribution.
"""

from __future__ import annotations

import triton
import triton.language as tl
from deepinfer_hal import philox
from deepinfer_hal.errors import BadCall
from deepinfer_hal.ops.verify_drafts import RULES

from deepinfer_triton.launch import launch
from deepinfer_triton.noise import LARGEST_NOISE, gumbel, top_word_of_id, top_words_of_ids, uniform
from deepinfer_triton.sizes import cdiv, next_power_of_2
from deepinfer_triton.support import NVIDIA, offer, serves
from deepinfer_triton.targets import Target
from deepinfer_triton.vocabulary import LANES, STAGES, WARPS, WIDE_LANES, WIDE_WARPS, first_of_largest, load_logits, softmax_stats

ROWS = 32


@triton.jit(do_not_specialize=["requests"])
def coupled_kernel(
    target, drafts, draft_counts, requests, accepted, tokens, B: tl.constexpr, BP: tl.constexpr, ROWS: tl.constexpr
):
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = r < requests
    column = tl.arange(0, BP)[None, :]
    wanted = tl.load(target + r[:, None] * (B + 1) + column, mask=here[:, None] & (column <= B), other=-1)
    offered = column < tl.minimum(tl.load(draft_counts + r, mask=here, other=0), B)[:, None]
    draft = tl.load(drafts + r[:, None] * B + column, mask=here[:, None] & offered, other=-1)
    count = tl.min(tl.where((draft >= 0) & (draft == wanted), BP, column), axis=1)
    token = tl.where(column < count[:, None], draft, tl.where(column == count[:, None], wanted, -1))
    tl.store(tokens + r[:, None] * (B + 1) + column, token, mask=here[:, None] & (column <= B))
    tl.store(accepted + r, count, mask=here)


@triton.jit
def accept_kernel(
    drafts, draft_counts, target_logits, draft_logits, seeds, positions, tokens,
    B: tl.constexpr, V: tl.constexpr, ACCEPT: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    r, i = tl.program_id(0).to(tl.int64), tl.program_id(1)
    draft = -1
    if i < tl.load(draft_counts + r):
        draft = tl.load(drafts + r * B + i)
    if draft >= 0:
        p_row, q_row = target_logits + (r * (B + 1) + i) * V, draft_logits + (r * B + i) * V
        p_peak, p_total = softmax_stats(p_row, V, LANES)
        q_peak, q_total = softmax_stats(q_row, V, LANES)
        picked = tl.minimum(draft, V - 1)
        p = tl.exp(tl.load(p_row + picked) - p_peak) / p_total
        q = tl.exp(tl.load(q_row + picked) - q_peak) / q_total
        top = top_word_of_id(tl.load(seeds + r), tl.load(positions + r) + i, ACCEPT, picked)
        draft = tl.where(uniform(top) * q < p, draft, -1)
    tl.store(tokens + r * (B + 1) + i, draft)


@triton.jit
def draw_residual(
    p_row, p_peak, p_total, q_row, q_peak, q_total, of_target, seed, position, RESIDUAL: tl.constexpr, V: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """The Gumbel-max token of the positive part of p - q, or of p if `of_target`; -1 if nothing is positive."""
    lane = tl.arange(0, LANES)
    best, token = float("-inf"), -1
    for start in tl.range(0, V, LANES, num_stages=STAGES):
        p = tl.exp(load_logits(p_row, start + lane, V) - p_peak) / p_total
        q = tl.exp(load_logits(q_row, start + lane, V) - q_peak) / q_total
        left = tl.where(of_target, p, tl.maximum(p - q, 0.0))
        log_left = tl.where(left > 0, tl.log(left), float("-inf"))
        if tl.max(log_left, axis=0) + LARGEST_NOISE > best:
            noisy = log_left + gumbel(top_words_of_ids(seed, position, RESIDUAL, start, LANES))
            value, column = first_of_largest(noisy, start + lane)
            token = tl.where(value > best, column, token)
            best = tl.maximum(best, value)
    return token


@triton.jit
def settle_kernel(
    target, drafts, draft_counts, target_logits, draft_logits, seeds, positions, accepted, tokens,
    B: tl.constexpr, BP: tl.constexpr, V: tl.constexpr, RESIDUAL: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BP)
    stood = tl.load(tokens + r * (B + 1) + column, mask=column < B, other=-1)
    count = tl.min(tl.where(stood >= 0, BP, column), axis=0)
    token = tl.load(target + r * (B + 1) + count)
    refused = -1
    if count < tl.minimum(tl.load(draft_counts + r), B):
        refused = tl.load(drafts + r * B + count)
    if refused >= 0:
        p_row, q_row = target_logits + (r * (B + 1) + count) * V, draft_logits + (r * B + count) * V
        p_peak, p_total = softmax_stats(p_row, V, LANES)
        q_peak, q_total = softmax_stats(q_row, V, LANES)
        seed, position = tl.load(seeds + r), tl.load(positions + r) + count
        token = -1
        for of_target in range(2):
            if token < 0:
                token = draw_residual(
                    p_row, p_peak, p_total, q_row, q_peak, q_total, of_target == 1, seed, position, RESIDUAL, V, LANES
                )
        token = tl.maximum(token, 0)
    settled = tl.where(column < count, stood, tl.where(column == count, token, -1))
    tl.debug_barrier()  # all have read `tokens`
    tl.store(tokens + r * (B + 1) + column, settled, mask=column <= B)
    tl.store(accepted + r, count)


def verify_drafts(
    target: Target, targets, drafts, draft_counts, target_logits, draft_logits, seeds, positions, rule, accepted, tokens
) -> None:
    if rule not in RULES:
        raise BadCall(f"verify_drafts: rule {rule!r} is not one of {', '.join(RULES)}")
    requests, width = drafts.shape
    padded = next_power_of_2(width + 1)
    if rule == "coupled" or width == 0:
        launch(
            coupled_kernel, (cdiv(requests, ROWS),), targets, drafts, draft_counts, requests, accepted, tokens,
            B=width, BP=padded, ROWS=ROWS,
        )  # fmt: skip
        return
    vocab = draft_logits.shape[2]
    launch(
        accept_kernel, (requests, width), drafts, draft_counts, target_logits, draft_logits, seeds, positions, tokens,
        B=width, V=vocab, ACCEPT=philox.ACCEPT, LANES=WIDE_LANES, warps=WIDE_WARPS,
    )  # fmt: skip
    launch(
        settle_kernel, (requests,), targets, drafts, draft_counts, target_logits, draft_logits, seeds, positions, accepted,
        tokens, B=width, BP=padded, V=vocab, RESIDUAL=philox.RESIDUAL, LANES=LANES // 2, warps=WARPS // 2,
    )  # fmt: skip


MAKERS = [offer("verify_drafts", verify_drafts, supports=serves(rule=RULES), targets=NVIDIA)]
