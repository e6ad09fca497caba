"""select_candidate_blocks: the pool of row blocks that later indexers may choose from.

A block's score is the highest score of its visible rows; the block that holds the last visible row counts as +inf.
The C best blocks, ties to the lower block, ids ascending, -1 at the end (V4.1 candidate pool, section 2.7 of the
model notes).
"""

from __future__ import annotations

import torch

from deepinfer_hal.card import COUNT, Case, OpCard, out, register, scalar, tensor
from deepinfer_hal.errors import BadCall
from deepinfer_hal.ops import _cache_cases as cases
from deepinfer_hal.ops._common import count_tensor, generator, poisoned, valid_rows
from deepinfer_hal.ops._selection import best_columns, pack_ids
from deepinfer_hal.ops.select_topk import scored_rows


def select_candidate_blocks(scores, visible, block, count, out) -> None:
    """scores float32 [T, K]; visible int32 [T]; out int32 [T, C] block ids."""
    n = valid_rows(count, scores.shape[0])
    if n == 0:
        return
    seen = visible[:n].long()
    column = torch.arange(scores.shape[1], device=scores.device)
    live = torch.where((column < seen[:, None]) & ~scores[:n].isnan(), scores[:n], float("-inf"))
    live = torch.nn.functional.pad(live, (0, -live.shape[1] % block), value=float("-inf"))
    blocks = live.shape[1] // block
    if blocks == 0:
        out[:n] = -1
        return
    best = live.unflatten(1, (blocks, block)).amax(2)
    ids = torch.arange(blocks, device=scores.device).expand_as(best)
    best = torch.where(ids == (seen[:, None] - 1).div(block, rounding_mode="floor"), float("inf"), best)
    out[:n] = pack_ids(best_columns(best, out.shape[1]), ids, out.shape[1])


def enumerate_cases():
    for rows, columns, chosen in ((0, 100, 4), (1, 0, 4), (1, 1, 4), (3, 64, 32), (33, 515, 32), (3, 3000, 64)):
        yield Case("select_candidate_blocks", dict(rows=rows, columns=columns, chosen=chosen, block=8))
    yield Case("select_candidate_blocks", dict(rows=33, columns=300, chosen=16, block=8, ties=3))
    yield Case("select_candidate_blocks", dict(rows=9, columns=300, chosen=5, block=16, ties=1, count=4))


def generate(case, seed, device, prepare) -> dict:
    p = {"ties": 0, "count": None, **case.params}
    scores, visible = scored_rows(generator(case, seed), p["rows"], p["columns"], p["ties"])
    args = dict(
        scores=scores,
        visible=visible,
        block=p["block"],
        count=count_tensor(p["count"]),
        out=poisoned(p["rows"], p["chosen"], dtype=torch.int32),
    )
    return cases.on(device, args)


def check(args) -> None:
    if args["block"] < 1:
        raise BadCall(f"select_candidate_blocks: block must be at least 1 row, got {args['block']}")


CARD = register(
    OpCard(
        name="select_candidate_blocks",
        group="attention",
        summary="The candidate pool: best row blocks by their highest score.",
        signature=(
            tensor("scores", "f32", "T K"),
            tensor("visible", "i32", "T"),
            scalar("block", "int"),
            COUNT,
            out("out", "i32", "T C"),
        ),
        reference=select_candidate_blocks,
        discrete=("out",),
        check=check,
        enumerate_cases=enumerate_cases,
        generate=generate,
    )
)
