"""gather_tokens: the input ids of a step's rows, and the n-grams that Engram hashes, from the token history.

ids[t] = history[slot, p]; ngrams[t, n] = history[slot, p - n], or -1 before the start of the sequence (V4.1 Engram,
section 2.10 of the model notes). Rolling back needs no work: only positions up to p are read.
"""

from __future__ import annotations

import torch

from deepinfer_hal.card import COUNT, Case, OpCard, out, register, tensor
from deepinfer_hal.ops import _cache_cases as cases
from deepinfer_hal.ops._common import count_tensor, generator, poisoned, valid_rows
from deepinfer_hal.ops._cost import touching


def gather_tokens(history, slots, row_to_req, positions, count, ids, ngrams) -> None:
    """history int32 [slots, L]; slots int32 [R]; row_to_req, positions int32 [T]; ids int32 [T]; ngrams int32 [T, N] or
    None. A row whose request, slot or position is -1 is left untouched."""
    n = valid_rows(count, positions.shape[0])
    live = ((row_to_req[:n] >= 0) & (positions[:n] >= 0)).nonzero().squeeze(1)
    if live.numel() == 0:
        return
    slot = slots.long()[row_to_req[live].long()]
    live, slot = live[slot >= 0], slot[slot >= 0]
    position = positions[live].long()
    ids[live] = history[slot, position]
    if ngrams is not None:
        older = position[:, None] - torch.arange(ngrams.shape[1], device=ids.device)
        ngrams[live] = torch.where(older >= 0, history[slot[:, None], older.clamp_min(0)], -1)


def enumerate_cases():
    for requests in ("", "0+1", "0+3,40+2", "1+20,2+1,7+12"):
        yield Case("gather_tokens", dict(requests=requests, N=4))
    yield Case("gather_tokens", dict(requests="0+3,40+2", N=0))
    yield Case("gather_tokens", dict(requests="0+5,3+6", N=3, count=7, skip=3))


def generate(case, seed, device, prepare) -> dict:
    p = {"count": None, "skip": 0, **case.params}
    g, requests = generator(case, seed), cases.parse_requests(p["requests"])
    positions, row_to_req, _ = cases.token_rows(requests)
    if p["skip"]:
        row_to_req[p["skip"] - 1 :: p["skip"]] = -1
        positions[p["skip"] :: p["skip"]] = -1
    rows = positions.shape[0]
    args = dict(
        history=torch.randint(0, 2048, (len(requests) + 2, 64), generator=g, dtype=torch.int32),
        slots=cases.distinct_slots(g, len(requests), len(requests) + 2),
        row_to_req=row_to_req,
        positions=positions,
        count=count_tensor(p["count"]),
        ids=poisoned(rows, 1, dtype=torch.int32)[:, 0],
        ngrams=poisoned(rows, p["N"], dtype=torch.int32) if p["N"] else None,
    )
    return cases.on(device, args)


CARD = register(
    OpCard(
        name="gather_tokens",
        group="state",
        summary="Input ids and n-grams of a step's rows from the token history.",
        signature=(
            tensor("history", "i32", "slots_total L"),
            tensor("slots", "i32", "R"),
            tensor("row_to_req", "i32", "T"),
            tensor("positions", "i32", "T"),
            COUNT,
            out("ids", "i32", "T"),
            out("ngrams", "i32", "T N", optional=True),
        ),
        reference=gather_tokens,
        discrete=("ids", "ngrams"),
        enumerate_cases=enumerate_cases,
        generate=generate,
        cost=touching(history=lambda args: 4 * (args["ids"] if args["ngrams"] is None else args["ngrams"]).numel()),
    )
)
