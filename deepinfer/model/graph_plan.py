"""Which steps are captured, at which padded sizes: planning alone, without a device.

A graph serves every step with at most its requests, token rows and visible tokens; a smaller step is padded to it with rows of
index -1, which no op touches. Decode steps have graphs of their own; steps with prompts in them have other sizes, since a graph
holds any mix of prompts' chunks and decoding sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

_FIRST_SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256)
_FIRST_TOKENS = 4096
_TOKENS_FACTOR = 4
_PROMPT_TOKENS_FACTOR = 16
"""Rows of a prompt do more for each visible token than a decode step's, so scores wider than need be cost them less."""

_FIRST_PROMPT_ROWS = (16, 32, 64, 96, 128, 192, 256)
_PROMPT_ROWS_PER_DOUBLING = 4
_WORKSPACES = 2
"""Of captured calls in the pool: a temporary that outlives a call may keep the next one from the same place."""


@dataclass(frozen=True, order=True)
class GraphShape:
    """What a captured step holds at most: tokens that a sequence may have seen, requests, and token rows.

    prompts: window rows go through the flat buffer, so that chunks may be of any length, and logits are left to be made of what
    rows they are wanted. Else every row has logits; a step with one row a request is a decode step, one with more a verify step.
    """

    tokens: int
    requests: int
    rows: int
    prompts: bool = False


class GraphPlan(msgspec.Struct, frozen=True):
    """The graphs of an engine: their number, the padded request counts and token limits of decode steps, the padded token rows of
    steps with prompts, and the bytes planned for all.

    pool_bytes: temporaries of the largest step and workspaces of kernels, in the one pool that all graphs share; node_bytes:
    what the driver keeps of all graphs, an estimate of `NODE_BYTES` for each of about `NODES_PER_LAYER` kernels a layer.
    """

    graphs: int
    sizes: tuple[int, ...]
    tokens: tuple[int, ...]
    prompt_rows: tuple[int, ...]
    pool_bytes: int
    node_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.pool_bytes + self.node_bytes


NODES_PER_LAYER = 40
NODE_BYTES = 1024


def capture_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Padded request counts: powers of two and steps between them, up to the largest batch."""
    sizes = list(_FIRST_SIZES)
    while sizes[-1] < max_num_seqs:
        sizes += [sizes[-1] * 3 // 2, sizes[-1] * 2]
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)


def prompt_sizes(max_rows: int) -> tuple[int, ...]:
    """Padded token rows of steps with prompts, up to `max_rows`; none for 0. The more rows, the longer a device takes for those
    of padding, so from 256 on a size is at most a quarter larger than the one before."""
    sizes = list(_FIRST_PROMPT_ROWS)
    while sizes[-1] < max_rows:
        sizes += [sizes[-1] + sizes[-1] * part // _PROMPT_ROWS_PER_DOUBLING for part in range(1, _PROMPT_ROWS_PER_DOUBLING + 1)]
    return (*(size for size in sizes if size < max_rows), max_rows) if max_rows else ()


def token_limits(max_model_len: int, factor: int = _TOKENS_FACTOR) -> tuple[int, ...]:
    """Limits of visible tokens: index scores of a captured step are as wide as its limit, so short sequences get their own."""
    limits, limit = [], _FIRST_TOKENS
    while limit < max_model_len:
        limits.append(limit)
        limit *= factor
    return (*limits, max_model_len)


def graph_shapes(
    max_num_seqs: int, max_model_len: int, tokens_each: int = 1, max_prompt_rows: int = 0
) -> tuple[GraphShape, ...]:
    """Shapes of steps with `tokens_each` token rows a request, and of those with prompts up to `max_prompt_rows` rows, largest
    first, so that the shared pool grows once."""
    shapes = [
        GraphShape(limit, size, size * tokens_each)
        for limit in token_limits(max_model_len)
        for size in capture_sizes(max_num_seqs)
    ]
    shapes += [
        GraphShape(limit, min(rows, max_num_seqs), rows, prompts=True)
        for limit in token_limits(max_model_len, _PROMPT_TOKENS_FACTOR)
        for rows in prompt_sizes(max_prompt_rows)
    ]
    return tuple(sorted(shapes, key=lambda shape: (-shape.rows, -shape.tokens)))


def plan_graphs(
    text: Any, numerics: Any, max_num_seqs: int, max_model_len: int, max_prompt_rows: int = 0, workspace_bytes: int = 0
) -> GraphPlan:
    """Number and bytes of the graphs that an engine of these sizes captures. workspace_bytes: of one call's kernels."""
    shapes = graph_shapes(max_num_seqs, max_model_len, max_prompt_rows=max_prompt_rows)
    nodes = len(shapes) * NODES_PER_LAYER * text.num_hidden_layers
    return GraphPlan(
        graphs=len(shapes), sizes=capture_sizes(max_num_seqs), tokens=token_limits(max_model_len),
        prompt_rows=prompt_sizes(max_prompt_rows), node_bytes=nodes * NODE_BYTES,
        pool_bytes=temporary_bytes(text, numerics, shapes[0].rows) + _WORKSPACES * workspace_bytes,
    )  # fmt: skip


def temporary_bytes(text: Any, numerics: Any, rows: int) -> int:
    """Bytes that the larger of the two composites of a layer allocates when it runs from its parts."""
    wide, hidden = numerics.stream_dtype.itemsize, text.hidden_size
    coded = 1 + 1 / 32 if numerics.quantise_activations else wide
    inner, top_k = text.moe_intermediate_size, text.num_experts_per_tok
    pair = hidden * (coded + wide) + inner * (2 * wide + coded) + 8
    moe = top_k * pair + inner * (2 * wide + coded) + hidden * wide + 4 * text.n_routed_experts
    query, latent = text.num_attention_heads * text.head_dim, text.q_lora_rank
    attention = query * (2 * wide + coded) + (latent + text.head_dim) * wide + latent * coded
    attention += text.o_groups * text.o_lora_rank * coded
    return int(rows * max(moe, attention))
