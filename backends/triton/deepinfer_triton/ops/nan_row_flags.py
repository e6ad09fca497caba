"""nan_row_flags: one program per row of logits; NaN and +inf are looked for beside each lane's maximum."""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer_triton.launch import launch
from deepinfer_triton.support import NVIDIA, offer, serves
from deepinfer_triton.targets import Target
from deepinfer_triton.vocabulary import FIRST_STAGES, WIDE_LANES, WIDE_WARPS, is_broken, load_logits


@triton.jit
def nan_row_flags_kernel(logits, logits_stride, flags, V, LANES: tl.constexpr):
    s = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    peak = tl.full([LANES], float("-inf"), tl.float32)
    broken = tl.zeros([LANES], tl.int32)
    for start in tl.range(0, V, LANES, num_stages=FIRST_STAGES):
        x = load_logits(logits + s * logits_stride, start + lane, V)
        peak = tl.maximum(peak, x)
        broken |= is_broken(x)
    usable = (tl.max(broken, axis=0) == 0) & (tl.max(peak, axis=0) > float("-inf"))
    tl.store(flags + s, tl.where(usable, 0, 1).to(tl.uint8))


def nan_row_flags(target: Target, logits, flags) -> None:
    rows, vocab = logits.shape
    launch(nan_row_flags_kernel, (rows,), logits, logits.stride(0), flags, vocab, LANES=WIDE_LANES, warps=WIDE_WARPS)


MAKERS = [offer("nan_row_flags", nan_row_flags, supports=serves(), targets=NVIDIA)]
