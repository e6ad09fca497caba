"""plan_verify_lengths: how many drafts of each request to verify, for the most expected tokens per unit of time."""

from __future__ import annotations

import torch

from deepinfer_hal.card import Case, OpCard, out, register, scalar, tensor
from deepinfer_hal.ops._common import generator, normal, poisoned, wide


def plan_verify_lengths(confidence: torch.Tensor, cost: torch.Tensor, base_rows: int, lengths: torch.Tensor) -> None:
    """Maximises (R + sum of the chosen drafts' chances to be reached and accepted) / cost[rows of the step].

    confidence[r, i] in 0..1: the chance of draft i given that those before it stand (NaN counts as 0), so its own gain
    is the product up to i. cost[n] is the time of a step of n rows; n = base_rows (all rows without drafts) + drafts
    chosen, clamped to the last entry. The best n drafts are the n largest gains, which are prefixes; of equal results
    the fewest drafts.
    """
    requests, width = confidence.shape
    if requests == 0:
        return
    gains = torch.nan_to_num(wide(confidence), nan=0.0).clamp(0, 1).cumprod(dim=-1).flatten()
    ordered, order = gains.sort(descending=True, stable=True)
    expected = requests + torch.cat([gains.new_zeros(1), ordered.cumsum(0)])
    rows = base_rows + torch.arange(expected.numel(), device=cost.device)
    drafts = int((expected / wide(cost)[rows.clamp(max=cost.numel() - 1)]).argmax())
    chosen = torch.zeros_like(order).scatter_(0, order[:drafts], 1)
    lengths.copy_(chosen.view(requests, width).sum(dim=-1))


def _cases():
    for rows, width, sizes in ((0, 5, 8), (1, 5, 8), (3, 5, 64), (33, 5, 256), (64, 5, 100), (2, 0, 4)):
        for shape in ("flat", "linear", "steps"):
            yield Case("plan_verify_lengths", {"R": rows, "B": width, "M": sizes, "cost": shape})


def _generate(case, seed, device, prepare):
    rows, width, sizes, shape = (case.params[name] for name in ("R", "B", "M", "cost"))
    gen = generator(case, seed)
    n = torch.arange(sizes, dtype=torch.float32)
    cost = {"flat": torch.full((sizes,), 3.0), "linear": 0.25 + n, "steps": 1.0 + (n / 8).floor()}[shape]
    return {
        "confidence": (0.4 + 0.6 * torch.sigmoid(normal(gen, rows, width) * 2)).to(device),
        "cost": cost.to(device),
        "base_rows": rows,
        "lengths": poisoned(rows, dtype=torch.int32, device=device),
    }


CARD = register(
    OpCard(
        name="plan_verify_lengths",
        group="step",
        summary="Draft lengths to verify per request that maximise expected tokens over the cost curve.",
        signature=(
            tensor("confidence", "f32", "R B"),
            tensor("cost", "f32", "M"),
            scalar("base_rows", "int"),
            out("lengths", "i32", "R"),
        ),
        reference=plan_verify_lengths,
        rounding="products, sums and quotients are float32",
        invariance="none: lengths depend on the whole batch by design; with coupled verification the tokens do not",
        reference_invariant="no",
        discrete=("lengths",),
        enumerate_cases=_cases,
        generate=_generate,
    )
)
