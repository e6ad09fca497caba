"""gather_tokens: one lane per row and n-gram place reads the history; place 0 is the row's own id."""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer_triton.launch import launch
from deepinfer_triton.numeric import valid_rows
from deepinfer_triton.sizes import cdiv, next_power_of_2
from deepinfer_triton.support import NVIDIA, offer, serves
from deepinfer_triton.targets import Target

ROWS = 32


@triton.jit(do_not_specialize=["rows"])
def gather_tokens_kernel(
    history, history_stride, slots, row_to_req, positions, count, rows, ids, ngrams,
    N: tl.constexpr, NP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = t < valid_rows(count, rows)
    request = tl.load(row_to_req + t, mask=inside, other=-1)
    position = tl.load(positions + t, mask=inside, other=-1)
    slot = tl.load(slots + request, mask=request >= 0, other=-1)
    live = (position >= 0) & (slot >= 0)
    back = tl.arange(0, NP)
    older = position[:, None] - back[None, :]
    at = history + slot.to(tl.int64)[:, None] * history_stride + older
    token = tl.load(at, mask=live[:, None] & (older >= 0) & (back < NP)[None, :], other=-1)
    own = tl.sum(tl.where((back == 0)[None, :], token, 0), axis=1)
    tl.store(ids + t, own, mask=live)
    if ngrams is not None:
        at = ngrams + t.to(tl.int64)[:, None] * N + back[None, :]
        tl.store(at, token, mask=live[:, None] & (back < N)[None, :])


def gather_tokens(target: Target, history, slots, row_to_req, positions, count, ids, ngrams=None) -> None:
    rows, width = positions.shape[0], 1 if ngrams is None else ngrams.shape[1]
    launch(
        gather_tokens_kernel, (cdiv(rows, ROWS),), history, history.stride(0), slots, row_to_req, positions,
        count, rows, ids, ngrams, N=width, NP=next_power_of_2(width), ROWS=ROWS,
    )  # fmt: skip


MAKERS = [offer("gather_tokens", gather_tokens, supports=serves(), targets=NVIDIA)]
