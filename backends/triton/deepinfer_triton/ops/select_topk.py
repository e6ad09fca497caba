"""select_topk and select_candidate_blocks: one program per row, see `deepinfer_triton.selection`."""

from __future__ import annotations

from deepinfer_triton.launch import launch
from deepinfer_triton.selection import select_kernel
from deepinfer_triton.sizes import next_power_of_2
from deepinfer_triton.support import offer, serves
from deepinfer_triton.targets import Target


def select_topk(target: Target, scores, candidates, candidate_block, count, rows) -> None:
    height, width = scores.shape
    launch(
        select_kernel, (height,), scores, width, candidates, 0 if candidates is None else candidates.stride(0), None,
        count, height, rows, rows.shape[1], BLOCK=candidate_block, BP=1, TILE=2 * target.columns, warps=8,
    )  # fmt: skip


def select_candidate_blocks(target: Target, scores, visible, block, count, out) -> None:
    height, width = scores.shape
    padded = next_power_of_2(block)
    launch(
        select_kernel, (height,), scores, width, None, 0, visible, count, height, out, out.shape[1],
        BLOCK=block, BP=padded, TILE=max(32, 2 * target.columns // padded), warps=8,
    )  # fmt: skip


MAKERS = [
    offer("select_topk", select_topk, supports=serves()),
    offer("select_candidate_blocks", select_candidate_blocks, supports=serves()),
]
