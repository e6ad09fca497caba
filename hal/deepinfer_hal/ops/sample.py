"""sample: one token per row of logits, a pure function of the logits, the seed and the position (design 3.7)."""

from __future__ import annotations

import torch

from deepinfer_hal import philox
from deepinfer_hal.card import Case, OpCard, out, register, scalar, tensor
from deepinfer_hal.ops._common import wide
from deepinfer_hal.ops._sampling import keep_top, random_logits

_NEVER = float("-inf")


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    purpose: int,
    tokens: torch.Tensor,
) -> None:
    """tokens[s] = argmax at temperature 0, else Gumbel-max over the survivors; every tie goes to the lower id.

    Survivors at temperature t, in this order: the top_k highest of logits / t (<= 0 keeps all); of those, in descending
    order, every token before which the mass, as a share of what is left, is below top_p; of those, every token whose
    probability is at least min_p times the highest. A row with NaN or +inf, or of nothing but -inf, gives -1.
    """
    if logits.shape[0] == 0:
        return
    unusable = ~torch.isfinite(logits.amax(dim=-1))
    drawn = (temperature > 0) & ~unusable
    best = logits.argmax(dim=-1)
    rows = drawn.nonzero()[:, 0]
    if rows.numel():
        scaled = wide(logits[rows]) / temperature[rows, None]
        _drop(scaled, top_k[rows], top_p[rows], min_p[rows])
        noise = philox.gumbel_noise(seeds[rows], positions[rows], purpose, logits.shape[1])
        best[rows] = scaled.add_(noise).argmax(dim=-1)
    tokens.copy_(best.masked_fill_(unusable, -1))


def _drop(scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> None:
    """Sets what top-k, top-p and min-p remove to -inf, in place, working on the rows that use each."""
    vocab = scaled.shape[1]
    rows = ((top_k > 0) & (top_k < vocab)).nonzero()[:, 0]
    if rows.numel():
        some = scaled[rows]
        scaled[rows] = some.masked_fill(~keep_top(some, top_k[rows]), _NEVER)
    rows = (top_p < 1).nonzero()[:, 0]
    if rows.numel():
        ordered, order = scaled[rows].sort(dim=-1, descending=True, stable=True)
        mass = ordered.softmax(dim=-1)
        before = mass.cumsum(dim=-1) - mass
        spare = before >= top_p[rows, None]
        spare[:, 0] = False
        scaled[rows] = torch.empty_like(ordered).scatter_(1, order, ordered.masked_fill_(spare, _NEVER))
    rows = (min_p > 0).nonzero()[:, 0]
    if rows.numel():
        some = scaled[rows]
        floor = some.amax(dim=-1, keepdim=True) + min_p[rows, None].log()
        scaled[rows] = some.masked_fill(some < floor, _NEVER)


def _cases():
    for rows, vocab in ((0, 8), (1, 1), (3, 33), (33, 2048), (2, 129280)):
        for mode in ("greedy", "plain", "filtered"):
            yield Case("sample", {"S": rows, "V": vocab, "mode": mode, "purpose": 0 if mode != "plain" else 2})


def _generate(case, seed, device, prepare):
    rows, vocab, mode = (case.params[name] for name in ("S", "V", "mode"))
    generator = torch.Generator().manual_seed(seed)
    row = torch.arange(rows)
    greedy = mode == "greedy"
    temperature = torch.zeros(rows) if greedy else 0.25 + torch.rand(rows, generator=generator)
    top_k, top_p, min_p = torch.zeros(rows, dtype=torch.int32), torch.ones(rows), torch.zeros(rows)
    if mode == "filtered":
        temperature[row % 7 == 6] = 0.0
        top_k = torch.where(row % 2 == 0, row + 1, torch.zeros_like(row)).int()
        top_p = torch.where(row % 3 != 1, torch.rand(rows, generator=generator).clamp(min=0.01), torch.ones(rows))
        min_p = torch.where(row % 4 == 3, torch.rand(rows, generator=generator), torch.zeros(rows))
    logits = random_logits(rows, vocab, seed, device)
    if rows > 4:
        logits[1], logits[2, vocab // 2] = float("-inf"), float("nan")
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
    return {
        "logits": logits,
        "temperature": temperature.to(device),
        "top_k": top_k.to(device),
        "top_p": top_p.to(device),
        "min_p": min_p.to(device),
        "seeds": seeds.to(device),
        "positions": torch.randint(0, 1 << 20, (rows,), generator=generator, dtype=torch.int32).to(device),
        "purpose": case.params["purpose"],
        "tokens": torch.full((rows,), -7, dtype=torch.int32, device=device),
    }


CARD = register(
    OpCard(
        name="sample",
        group="sampling",
        summary="Greedy or Gumbel-max token per row, after temperature, top-k, top-p and min-p.",
        signature=(
            tensor("logits", "f32", "S V"),
            tensor("temperature", "f32", "S"),
            tensor("top_k", "i32", "S"),
            tensor("top_p", "f32", "S"),
            tensor("min_p", "f32", "S"),
            tensor("seeds", "i64", "S"),
            tensor("positions", "i32", "S"),
            scalar("purpose", "int"),
            out("tokens", "i32", "S"),
        ),
        reference=sample,
        rounding="logits / temperature, the mass before a token, the noise and their sum are float32",
        discrete=("tokens",),
        enumerate_cases=_cases,
        generate=_generate,
    )
)
