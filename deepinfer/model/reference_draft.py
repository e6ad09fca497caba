"""DSpark in the reference network: draft blocks, the Markov chain over them, and the confidence head (2.11)."""

import dataclasses

import torch
from torch.nn.functional import embedding, linear

from deepinfer.model import reference_ops as ops

CONFIDENCE_LOGIT_LIMIT = 60.0


@dataclasses.dataclass(frozen=True)
class Draft:
    """n draft blocks of b tokens per sequence, the block of position P covering P+1..P+b.

    base_logits float32 [B, n, b, V] (before the Markov term), raw_hidden [B, n, b, H] (before the final norm),
    normed_hidden [B, n, b, H], gold [B, n] (the token at P+1).
    """

    base_logits: torch.Tensor
    raw_hidden: torch.Tensor
    normed_hidden: torch.Tensor
    gold: torch.Tensor


def draft(net, features: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor, gold=None) -> Draft:
    """Drafts after many accepted positions at once.

    features [B, T, targets * H] (tap dspark.features); positions int [B, n]: last accepted position P of each draft;
    gold int [B, n]: the token already sampled for P+1, by default ids[P+1]. Each draft sees the main rows
    max(0, P-window+1)..P and its own block's rows, all of them from all of its queries.
    """
    config = net.config
    gold = ids.gather(1, positions + 1) if gold is None else gold
    size = config.dspark_block_size
    noise = torch.full((*gold.shape, size - 1), config.dspark_noise_token_id, dtype=gold.dtype, device=gold.device)
    streams = net.expand_streams(net.embed(torch.cat((gold[..., None], noise), -1)))
    pre = net.first_pre(streams)

    main = net.norm("mtp.0.main_norm", net.linear("mtp.0.main_proj", net.round_input(features.to(net.numerics.dtype))))
    main = net.round_input(main)
    window = positions[..., None] + torch.arange(1 - config.sliding_window, 1, device=positions.device)
    block_positions = positions[..., None] + torch.arange(1, size + 1, device=positions.device)
    for block in range(config.num_nextn_predict_layers):
        prefix = f"mtp.{block}"

        def attention(x, prefix=prefix):
            return _block_attention(net, f"{prefix}.attn", x, main, window, block_positions)

        def moe(x, prefix=prefix):
            return net.moe(f"{prefix}.ffn", x, config.dspark_num_experts_per_tok, {}, prefix)

        streams, pre = net.block(prefix, streams, pre, attention, moe)
    raw = ops.collapse_streams(streams, pre)
    last = f"mtp.{config.num_nextn_predict_layers - 1}"
    normed = net.norm(f"{last}.norm", raw)
    return Draft(net.head(normed), raw, normed, gold)


def _block_attention(net, prefix, x, main, window, block_positions):
    """Bidirectional inside the block: each of its queries sees the main window and all rows of the block."""
    frequencies = ops.rope_frequencies(net.config, False, x.device)
    x_rounded = net.round_input(x)
    _, q = net.project_query(prefix, x_rounded, block_positions, frequencies)
    own = net.project_kv(prefix, x_rounded, block_positions, frequencies)
    main_rows = net.project_kv(prefix, main, torch.arange(main.shape[1], device=x.device), frequencies)
    batch = torch.arange(main.shape[0], device=x.device)[:, None, None]
    keys = torch.cat((main_rows[batch, window.clamp_min(0)], own), dim=-2)
    exists = torch.nn.functional.pad(window >= 0, (0, own.shape[-2]), value=True)

    b, heads = own.shape[-2], q.shape[-2]
    scores = (q.flatten(-3, -2) @ keys.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~exists[..., None, :], -torch.inf).unflatten(-2, (b, heads))
    p = ops.sink_softmax(scores, net.weights[f"{prefix}.attn_sink"]).to(q.dtype)
    o = (p.flatten(-3, -2) @ keys).unflatten(-2, (b, heads))
    return net.project_output(prefix, o, block_positions, frequencies)


def markov_chain(net, base_logits: torch.Tensor, gold: torch.Tensor, tokens: torch.Tensor | None = None):
    """logits_i = base_i + (embed[prev_i]) head^T, with prev_0 = gold and prev_{i+1} = tokens_i.

    base_logits [..., b, V]; gold [...]. tokens [..., b]: teacher forcing; None takes the argmax as it goes. Returns
    (logits float32 [..., b, V], tokens [..., b], Markov embeddings [..., b, rank]).
    """
    last = f"mtp.{net.config.num_nextn_predict_layers - 1}"
    table = net.weights[f"{last}.markov_head.embed.weight"]
    head = net.weights[f"{last}.markov_head.head.weight"].to(net.numerics.dtype).float()

    def term(previous):
        embedded = embedding(previous, table).to(net.numerics.dtype)
        return embedded, linear(embedded.float(), head)

    if tokens is not None:
        embedded, added = term(torch.cat((gold[..., None], tokens[..., :-1]), -1))
        return base_logits + added, tokens, embedded
    previous, steps = gold, []
    for base in base_logits.unbind(-2):
        embedded, added = term(previous)
        previous = (base + added).argmax(-1)
        steps.append((base + added, previous, embedded))
    logits, tokens, embedded = (list(part) for part in zip(*steps, strict=True))
    return torch.stack(logits, -2), torch.stack(tokens, -1), torch.stack(embedded, -2)


def confidence_logits(net, raw_hidden: torch.Tensor, markov: torch.Tensor) -> torch.Tensor:
    """float32 [..., b]: [raw ; Markov embedding] proj^T, clamped to +-60, before the sigmoid.

    It reads the state before the final norm, as the released weights expect.
    """
    last = f"mtp.{net.config.num_nextn_predict_layers - 1}"
    weight = net.weights[f"{last}.confidence_head.proj.weight"].float()
    joined = torch.cat((raw_hidden.float(), markov.float()), -1)
    return linear(joined, weight).squeeze(-1).clamp(-CONFIDENCE_LOGIT_LIMIT, CONFIDENCE_LOGIT_LIMIT)
