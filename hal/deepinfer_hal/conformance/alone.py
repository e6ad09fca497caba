"""One row, expert or request of an op whose row list cannot simply be cut, as a call of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from deepinfer_hal.conformance.problem import Problem

Variant = tuple[str, dict[str, Any], list[tuple[str, Any, Any]]]
"""(what is different, arguments, [(output, rows of the variant, rows of the base run)])"""


def alone(problem: Problem) -> Iterator[Variant]:
    """Variants of grouped_gemm, draft_attention and mask_logits."""
    yield from CUT_APART[problem.card.name](problem)


def _gemm_rows(problem: Problem) -> Iterator[Variant]:
    args = problem.pristine
    offsets = args["offsets"].tolist()
    for row in sorted({0, problem.valid_rows // 2, problem.valid_rows - 1}):
        expert = next(e for e in range(len(offsets) - 1) if offsets[e] <= row < offsets[e + 1])
        bounds = torch.tensor([0] * (expert + 1) + [1] * (len(offsets) - expert - 1), dtype=torch.int32)
        cut = {k: _rows(args[k], [row]) for k in ("x", "x_scale", "out", "out_scale")}
        pairs = [(name, slice(0, 1), slice(row, row + 1)) for name in problem.outputs]
        yield f"row {row} alone at expert {expert}", {**args, **cut, "offsets": bounds}, pairs
        copies = {k: _rows(args[k], [row] * 9) for k in ("x", "x_scale", "out", "out_scale")}
        pairs = [(name, slice(i, i + 1), slice(row, row + 1)) for name in problem.outputs for i in range(9)]
        yield f"row {row} nine times at expert {expert}", {**args, **copies, "offsets": bounds * 9}, pairs


def _requests(problem: Problem) -> Iterator[Variant]:
    args, block = problem.pristine, problem.pristine["draft_block"]
    for request in range(problem.valid_rows):
        which = list(range(request * block, (request + 1) * block))
        cut = {k: _rows(args[k], [request]) for k in ("window_base", "window_origin", "window_modulo", "anchor")}
        cut |= {k: _rows(args[k], which) for k in ("q", "draft_kv", "out")}
        yield f"request {request} alone", {**args, **cut, "count": None}, [("out", slice(0, block), which)]


def _logit_rows(problem: Problem) -> Iterator[Variant]:
    args = problem.pristine
    per_row = ("slots", "prompt_len", "length", "repetition", "presence", "frequency", "allowed", "logits")
    offsets = args["bias_offsets"].tolist()
    for row in sorted({0, problem.num_rows // 2, problem.num_rows - 1}):
        first, last = offsets[row], offsets[row + 1]
        cut = {k: _rows(args[k], [row]) for k in per_row}
        cut["bias_offsets"] = torch.tensor([0, last - first], dtype=torch.int32)
        cut |= {k: args[k][first:last].clone() for k in ("bias_ids", "bias_values")}
        yield f"row {row} alone", {**args, **cut}, [("logits", slice(0, 1), slice(row, row + 1))]


def _rows(value: Any, index: list[int]) -> Any:
    return None if value is None else value[index].clone()


CUT_APART = {"grouped_gemm": _gemm_rows, "draft_attention": _requests, "mask_logits": _logit_rows}
"""Ops that have variants here."""
