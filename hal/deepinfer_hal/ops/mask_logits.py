"""mask_logits: penalties, biases, bans and an allowed-token mask, applied to rows of logits in place."""

from __future__ import annotations

import torch

from deepinfer_hal.card import Case, OpCard, inout, register, sum_tolerance, tensor
from deepinfer_hal.ops._common import wide
from deepinfer_hal.ops._cost import touching
from deepinfer_hal.ops._sampling import random_logits


def mask_logits(
    history: torch.Tensor,
    slots: torch.Tensor,
    prompt_len: torch.Tensor,
    length: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    bias_offsets: torch.Tensor,
    bias_ids: torch.Tensor,
    bias_values: torch.Tensor,
    allowed: torch.Tensor | None,
    logits: torch.Tensor,
) -> None:
    """In this order, per row s with history[slots[s], :length[s]], of which prompt_len[s] ids are the prompt:

    repetition r on every id of the history (a positive logit is divided by r, another multiplied); minus frequency
    times the id's count in the output; minus presence if it is in the output; plus bias_values of the row's CSR entries
    (-inf bans, an id may come twice); -inf where bit id % 32 of allowed[s, id // 32] is 0. Ids outside the vocabulary
    are skipped. slot -1 has no history.
    """
    if logits.shape[0] == 0:
        return
    rows = ((repetition != 1) | (presence != 0) | (frequency != 0)).nonzero()[:, 0]
    if rows.numel():
        _penalise(rows, history, slots, prompt_len, length, repetition, presence, frequency, logits)
    if bias_ids.numel():
        counts = (bias_offsets[1:] - bias_offsets[:-1]).long()
        row_of = torch.repeat_interleave(torch.arange(logits.shape[0], device=logits.device), counts)
        entries = row_of.numel()
        ids, values = bias_ids[:entries].long(), bias_values[:entries].to(logits.dtype)
        valid = (ids >= 0) & (ids < logits.shape[1])
        logits.index_put_((row_of[valid], ids[valid]), values[valid], accumulate=True)
    if allowed is not None:
        bits = (allowed.long()[:, :, None] >> torch.arange(32, device=logits.device)) & 1
        logits.masked_fill_(bits.flatten(1)[:, : logits.shape[1]] == 0, float("-inf"))


def _penalise(rows, history, slots, prompt_len, length, repetition, presence, frequency, logits) -> None:
    vocab = logits.shape[1]
    slots = slots[rows].long()
    length = torch.where(slots >= 0, length[rows], torch.zeros_like(length[rows])).long()[:, None]
    longest = int(length.max())
    ids = history[slots.clamp(min=0), :longest].long()
    at = torch.arange(longest, device=logits.device)
    valid = (at < length) & (ids >= 0) & (ids < vocab)
    ids = torch.where(valid, ids, torch.full_like(ids, vocab))
    counts = torch.zeros(rows.numel(), vocab + 1, dtype=logits.dtype, device=logits.device)
    seen = counts.scatter(1, ids, 1.0)[:, :vocab] > 0
    in_output = (at >= prompt_len[rows].long()[:, None]).to(logits.dtype)
    counts = counts.scatter_add_(1, ids, in_output)[:, :vocab]
    values = wide(logits[rows])
    factor = repetition[rows, None].to(values.dtype)
    values = torch.where(seen, torch.where(values > 0, values / factor, values * factor), values)
    values = values - frequency[rows, None] * counts
    logits[rows] = (values - presence[rows, None] * (counts > 0)).to(logits.dtype)


def _penalised_tokens(args) -> int:
    """Tokens in the histories of rows that have a penalty; other rows' histories are not read."""
    on = (args["repetition"] != 1) | (args["presence"] != 0) | (args["frequency"] != 0)
    return int(args["length"][on].sum())


def _changed_bytes(args) -> int:
    """Logits of tokens in a history or with a bias, read and written. What the mask bans is not counted: it may be nothing."""
    tokens = min(_penalised_tokens(args) + args["bias_ids"].numel(), args["logits"].numel())
    return 2 * 4 * tokens


def _cases():
    for rows, vocab, max_len in ((0, 8, 4), (1, 1, 3), (3, 33, 16), (33, 2048, 300), (2, 129280, 40)):
        for mode in ("off", "penalties", "all"):
            yield Case("mask_logits", {"S": rows, "V": vocab, "L": max_len, "mode": mode})


def _generate(case, seed, device, prepare):
    rows, vocab, max_len, mode = (case.params[name] for name in ("S", "V", "L", "mode"))
    generator = torch.Generator().manual_seed(seed)
    slots_n = rows + 3
    history = torch.randint(0, vocab, (slots_n, max_len), generator=generator, dtype=torch.int32)
    history[:, ::5] = history[:, :1]
    slots = torch.randperm(slots_n, generator=generator)[:rows].int()
    length = torch.randint(0, max_len + 1, (rows,), generator=generator, dtype=torch.int32)
    prompt_len = (length * torch.rand(rows, generator=generator)).int()
    on = (torch.arange(rows) % 4 != 3) & (mode != "off")
    one, zero = torch.ones(rows), torch.zeros(rows)
    counts = torch.randint(0, 5, (rows,), generator=generator) * (mode == "all")
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    total = int(offsets[-1])
    bias_values = torch.randn(total, generator=generator) * 2
    bias_values[::3] = float("-inf")
    words = torch.randint(-(2**31), 2**31, (rows, -(-vocab // 32)), generator=generator, dtype=torch.int32)
    args = {
        "history": history,
        "slots": slots,
        "prompt_len": prompt_len,
        "length": length,
        "repetition": torch.where(on, 0.5 + torch.rand(rows, generator=generator), one),
        "presence": torch.where(on, torch.randn(rows, generator=generator), zero),
        "frequency": torch.where(on, torch.randn(rows, generator=generator), zero),
        "bias_offsets": offsets.int(),
        "bias_ids": torch.randint(0, vocab, (total,), generator=generator, dtype=torch.int32),
        "bias_values": bias_values,
        "allowed": words if mode == "all" else None,
        "logits": random_logits(rows, vocab, seed, "cpu"),
    }
    return {name: value.to(device) if value is not None else None for name, value in args.items()}


CARD = register(
    OpCard(
        name="mask_logits",
        group="sampling",
        summary="Repetition, frequency and presence penalties, logit biases and bans, and an allowed-token bitmask.",
        signature=(
            tensor("history", "i32", "slots L"),
            tensor("slots", "i32", "S"),
            tensor("prompt_len", "i32", "S"),
            tensor("length", "i32", "S"),
            tensor("repetition", "f32", "S"),
            tensor("presence", "f32", "S"),
            tensor("frequency", "f32", "S"),
            tensor("bias_offsets", "i32", "S+1"),
            tensor("bias_ids", "i32", "n"),
            tensor("bias_values", "f32", "n"),
            tensor("allowed", "i32", "S W", optional=True),
            inout("logits", "f32", "S V"),
        ),
        reference=mask_logits,
        rounding="float32 after each of the four penalties and biases",
        tolerance=lambda args, name: sum_tolerance(torch.float32, 8, 8.0),
        enumerate_cases=_cases,
        generate=_generate,
        cost=touching(history=lambda args: 4 * _penalised_tokens(args), logits=_changed_bytes),
    )
)
