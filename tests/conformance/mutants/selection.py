"""Scores of the index and the rows chosen by them: ties, -inf, NaN, candidates."""

from __future__ import annotations

import torch
from deepinfer_hal.ops import _selection

from tests.conformance.mutants._base import Mutant, changed, kernel, patched, spoiled, with_rows

TIES = "select_topk(rows=6,columns=40,k=8,ties=3)"
PLAIN = "select_topk(rows=6,columns=40,k=8)"
CANDIDATES = "select_topk(rows=5,columns=64,k=8,ties=6,candidates=8)"
POOL = "select_candidate_blocks(rows=6,columns=90,chosen=3,block=8)"
_INDEX = "heads=2,d=64,q=mxfp4_32,format=mxfp4_32,block_rows=16,dtype=bf16,ratio=2"
INDEX = f"score_index(requests=40+3,5+2,{_INDEX})"
INDEX_SKIPPING = f"score_index(requests=40+3,5+2,{_INDEX},skip=2)"

best = _selection.best_columns


def upward(scores, k):
    return best(scores.flip(1), k).flip(1)


def with_invisible(scores, k):
    """-inf is a score like any other."""
    return best(scores.nan_to_num(neginf=-1e30, nan=-1e30), k)


def nan_is_largest(scores, k):
    return best(torch.where(scores.isnan(), float("inf"), scores), k)


def by_score(args) -> None:
    """Best row first, as a heap leaves them."""
    for row, scores in zip(args["rows"], args["scores"], strict=True):
        chosen = row[row >= 0].long()
        row[: chosen.numel()] = chosen[scores[chosen].argsort(descending=True, stable=True)].to(torch.int32)


def last_block_not_forced(scores, visible, block, count, out) -> None:
    column = torch.arange(scores.shape[1])
    live = torch.where(column < visible[:, None], scores, float("-inf"))
    live = torch.nn.functional.pad(live, (0, -live.shape[1] % block), value=float("-inf")).unflatten(1, (-1, block)).amax(2)
    ids = torch.arange(live.shape[1]).expand_as(live)
    out.copy_(_selection.pack_ids(best(live, out.shape[1]), ids, out.shape[1]))


def without_relu(query, weights, keys) -> torch.Tensor:
    return ((query @ keys.T) * weights[:, :, None]).sum(1)


def select(name, case, fn, killed_by, why) -> Mutant:
    return Mutant(name, "select_topk", case, lambda: kernel("select_topk", name, fn), killed_by, why)


def select_by(name, case, choose, killed_by, why) -> Mutant:
    return select(name, case, patched("select_topk", "deepinfer_hal.ops.select_topk.best_columns", choose), killed_by, why)


def score(name, case, fn, killed_by, why) -> Mutant:
    return Mutant(name, "score_index", case, lambda: kernel("score_index", name, fn), killed_by, why)


MUTANTS = [
    select_by("tie_broken_upward", TIES, upward, ("discrete", "nan", "extremes"),
              "Of equal scores the higher row is chosen."),
    select_by("minus_infinity_selected", PLAIN, with_invisible, ("discrete", "extremes", "nan"),
              "Where there are too few rows, invisible ones fill the list instead of -1."),
    select_by("nan_selected", PLAIN, nan_is_largest, ("nan",),
              "A NaN score wins against every number."),
    select("selection_unsorted", PLAIN, spoiled("select_topk", by_score), ("discrete", "extremes", "nan"),
           "Rows come best first, not ascending."),
    select("candidates_ignored", CANDIDATES, changed("select_topk", lambda args: {"candidates": None}),
           ("discrete", "extremes", "nan"), "Columns are given out as rows, though they stand for candidate blocks."),
    Mutant("last_visible_block_not_forced", "select_candidate_blocks", POOL,
           lambda: kernel("select_candidate_blocks", "last_visible_block_not_forced", with_rows(
               "select_candidate_blocks", last_block_not_forced)),
           ("discrete",), "The block of the last visible row must win whatever its scores are."),
    score("relu_forgotten", INDEX, patched("score_index", "deepinfer_hal.ops.score_index._scores", without_relu),
          ("values",), "Negative head scores are added instead of dropped."),
    score("index_sees_one_row_too_many", INDEX, changed("score_index", lambda args: {"visible": args["visible"] + 1}),
          ("values", "poison"), "A compressed row whose group is not finished gets a score."),
    score("row_of_no_request_scored", INDEX_SKIPPING, changed(
        "score_index", lambda args: {"row_to_req": args["row_to_req"].clamp_min(0)}), ("untouched",),
        "Rows of request -1 are computed with the first request's keys."),
]  # fmt: skip
