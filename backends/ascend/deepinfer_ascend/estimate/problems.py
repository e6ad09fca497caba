"""What can be estimated: V4.1's shapes, cut to a few cores that get their part of the chip's bandwidth.

A whole decode step does not fit a laptop. A problem gives each of its cores the work that one core of 32 would have; HBM, L2 and
peak are divided in the same proportion, so times stand for the whole chip with 32 / cores times the rows or experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from deepinfer_hal.bench_shapes import V41, bench_cases
from deepinfer_hal.card import Case, get_card
from deepinfer_hal.errors import BadCall

from deepinfer_ascend.weights import prepare


@dataclass(frozen=True)
class Problem:
    """A case of a card for so many cores. peak: the operand type whose cube peak the estimate is compared with. cut: what was
    made smaller than V4.1, in words. adjust: changes drawn arguments."""

    op: str
    shape: str
    case: Case
    cores: int
    peak: str
    cut: str
    adjust: Callable[[dict[str, Any]], None] | None = None

    def arguments(self) -> dict[str, Any]:
        """Arguments of the call, drawn with a fixed seed."""
        args = get_card(self.op).generate(self.case, 1, "cpu", prepare)
        if self.adjust is not None:
            self.adjust(args)
        return args


def _attention(name: str, rows_a_core: int, cores: int, prefill: bool, k: int = 512) -> Problem:
    start, rows = 700, rows_a_core * cores
    requests = f"{start}+{rows}" if prefill else ",".join([f"{start}+1"] * rows)
    sizes = dict(heads=V41.heads, D=V41.head_dim, k=k, block_rows=64, dtype="bf16", window="fp8_32", compressed="fp4_16")
    case = Case("sparse_attention", dict(requests=requests, storage="ring", **sizes))
    what = "of one sequence" if prefill else "of as many sequences"
    cut = f"{rows_a_core} rows {what} a core, context {start}, rows selected at random"
    return Problem("sparse_attention", name, case, cores, "bf16", cut)


def _grouped(name: str, tokens: int, experts: int, cores: int, n: int = 2 * V41.expert_width, k: int = V41.hidden) -> Problem:
    def even(args: Mapping[str, Any]) -> None:
        args["offsets"].copy_(torch.arange(experts + 1, dtype=torch.int32) * tokens)

    case = Case("grouped_gemm", dict(M=tokens * experts, E=experts, K=k, N=n, x="u8", w="fp4_row32", out="bf16"))
    cut = f"{experts} experts of {tokens} tokens each" + ("" if n == 2 * V41.expert_width else f", N cut to {n}")
    return Problem("grouped_gemm", name, case, cores, "fp8", cut, even)


NAMED = (
    _attention("decode", 8, 2, prefill=False),
    _attention("decode-window", 8, 2, prefill=False, k=0),
    _attention("prefill", 16, 2, prefill=True),
    _grouped("4-tokens", 4, 4, 4),
    _grouped("4-tokens-cut", 4, 4, 4, n=1024),
    _grouped("256-tokens", 256, 1, 4),
    _grouped("256-tokens-cut", 256, 1, 4, n=1024),
    _grouped("down-4-tokens", 4, 4, 4, n=V41.hidden, k=V41.expert_width),
)
"""The shapes that kernels are judged by, and smaller ones for trying things."""

_FP8_OPS = ("linear", "grouped_linear", "grouped_gemm")


def problems(op: str) -> list[Problem]:
    """All shapes of one op: the named ones, then those of the benchmark's decode steps and prefill chunk on all 32 cores."""
    get_card(op)
    found = [p for p in NAMED if p.op == op]
    for bench in bench_cases(V41, experts=8, ops=(op,)):
        use = bench.use.replace(" ", "-").replace(",", "")
        name = f"{use}-{bench.rows}" if use else str(bench.rows)
        peak = "fp8" if op in _FP8_OPS and bench.case.params.get("x") == "u8" else "bf16"
        found.append(Problem(op, name, bench.case, 32, peak, "nothing: the benchmark's case on 32 cores"))
    return found


def find_problem(op: str, shape: str) -> Problem:
    """A problem by op and shape; BadCall names the shapes there are."""
    known = problems(op)
    for problem in known:
        if problem.shape == shape:
            return problem
    raise BadCall(f"{op} has no shape {shape!r}; there are {', '.join(p.shape for p in known)}")
