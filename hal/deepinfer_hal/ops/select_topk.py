"""select_topk: the k best-scored rows of each query row.

Highest scores, ties to the lower row, -inf (and NaN) never; ids ascending, -1 at the end when fewer (V4.1 indexer,
section 2.6 of the model notes). With candidate blocks, column c * candidate_block + i stands for row candidates[t, c]
* candidate_block + i; candidate blocks are ascending, so the tie rule is the same.
"""

from __future__ import annotations

import torch

from deepinfer_hal.card import COUNT, Case, OpCard, out, register, scalar, tensor
from deepinfer_hal.errors import BadCall
from deepinfer_hal.ops import _cache_cases as cases
from deepinfer_hal.ops._common import count_tensor, generator, poisoned, valid_rows
from deepinfer_hal.ops._selection import best_columns, pack_ids


def select_topk(scores, candidates, candidate_block, count, rows) -> None:
    """scores float32 [T, K]; candidates int32 [T, C] (C * candidate_block = K) or None; rows int32 [T, k]."""
    n = valid_rows(count, scores.shape[0])
    if n == 0:
        return
    live = scores[:n]
    ids = torch.arange(live.shape[1], device=live.device).expand_as(live)
    if candidates is not None:
        block = candidates[:n].long().repeat_interleave(candidate_block, 1)
        live = torch.where(block >= 0, live, float("-inf"))
        ids = block * candidate_block + ids % candidate_block
    rows[:n] = pack_ids(best_columns(live, rows.shape[1]), ids, rows.shape[1])


def enumerate_cases():
    for rows, columns, k in ((0, 100, 64), (1, 0, 64), (1, 1, 64), (3, 64, 64), (33, 200, 64), (3, 3000, 512)):
        yield Case("select_topk", dict(rows=rows, columns=columns, k=k))
    yield Case("select_topk", dict(rows=33, columns=300, k=64, ties=4))
    yield Case("select_topk", dict(rows=5, columns=300, k=64, ties=1, count=3))
    yield Case("select_topk", dict(rows=9, columns=256, k=64, ties=6, candidates=32))


def scored_rows(g: torch.Generator, rows: int, columns: int, ties: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(scores float32 [rows, columns], visible int32 [rows]): -inf past visible; with ties > 0 few distinct values."""
    scores = torch.randn(rows, columns, generator=g)
    if ties:
        scores = torch.randint(0, ties, (rows, columns), generator=g).float()
    visible = torch.randint(0, columns + 1, (rows,), generator=g, dtype=torch.int32)
    if rows:
        visible[0] = columns
    return scores.masked_fill(torch.arange(columns) >= visible[:, None], float("-inf")), visible


def generate(case, seed, device, prepare) -> dict:
    p = {"ties": 0, "count": None, "candidates": 0, **case.params}
    g = generator(case, seed)
    scores, _ = scored_rows(g, p["rows"], p["columns"], p["ties"])
    candidates = None
    if p["candidates"]:
        chosen = [torch.randperm(3 * p["candidates"], generator=g)[: p["candidates"]].sort().values for _ in scores]
        candidates = torch.stack(chosen).to(torch.int32)
        candidates[1::2, -3:] = -1
    args = dict(
        scores=scores,
        candidates=candidates,
        candidate_block=8,
        count=count_tensor(p["count"]),
        rows=poisoned(p["rows"], p["k"], dtype=torch.int32),
    )
    return cases.on(device, args)


def check(args) -> None:
    if args["candidates"] is None:
        return
    columns, blocks = args["scores"].shape[1], args["candidates"].shape[1]
    if args["candidate_block"] < 1 or blocks * args["candidate_block"] != columns:
        raise BadCall(
            f"select_topk: {blocks} candidate blocks of {args['candidate_block']} rows need "
            f"{blocks * args['candidate_block']} score columns, got {columns}"
        )


CARD = register(
    OpCard(
        name="select_topk",
        group="attention",
        summary="The k best-scored rows, ascending, ties to the lower row.",
        signature=(
            tensor("scores", "f32", "T K"),
            tensor("candidates", "i32", "T C", optional=True),
            scalar("candidate_block", "int"),
            COUNT,
            out("rows", "i32", "T k"),
        ),
        reference=select_topk,
        discrete=("rows",),
        check=check,
        enumerate_cases=enumerate_cases,
        generate=generate,
    )
)
