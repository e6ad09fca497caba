"""advance_step: one lane per sampled token stores it into the history."""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer_triton.launch import launch
from deepinfer_triton.sizes import cdiv
from deepinfer_triton.support import NVIDIA, offer, serves
from deepinfer_triton.targets import Target

ROWS = 128


@triton.jit(do_not_specialize=["rows"])
def advance_step_kernel(tokens, slots, positions, history, history_stride, rows, ROWS: tl.constexpr):
    s = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = s < rows
    token = tl.load(tokens + s, mask=inside, other=-1)
    slot = tl.load(slots + s, mask=inside, other=-1)
    position = tl.load(positions + s, mask=inside, other=-1)
    live = (token >= 0) & (slot >= 0) & (position >= 0)
    tl.store(history + slot.to(tl.int64) * history_stride + position, token, mask=live)


def advance_step(target: Target, tokens, slots, positions, history) -> None:
    rows = tokens.shape[0]
    launch(
        advance_step_kernel, (cdiv(rows, ROWS),), tokens, slots, positions, history, history.stride(0), rows,
        ROWS=ROWS,
    )  # fmt: skip


MAKERS = [offer("advance_step", advance_step, supports=serves(), targets=NVIDIA)]
