"""Memory that a call must not read: rows past the count, unused rows of a cache, gaps between rows.

Their content is changed; no bit of the result may follow.
"""

import torch

from deepinfer_hal import row_layout
from deepinfer_hal.conformance import rows
from deepinfer_hal.conformance.checks._base import Check, Profile
from deepinfer_hal.conformance.compare import assert_same_bits
from deepinfer_hal.conformance.problem import Args, Problem

UNUSED = 0xFF
"""Cards fill unused cache rows with this byte."""

STORES = (
    ("window", "window_format", None), ("draft_kv", "window_format", None), ("compressed", "compressed_format", "block_rows"),
    ("cache", "format", "block_rows"),
)  # fmt: skip
"""(store, its row format, its rows a block) by argument name."""

_PLAUSIBLE = 0x38
"""Reads as 1 or so in every format: a value that would pass for data, where NaN would be noticed or masked."""


def run(problem: Problem, profile: Profile) -> None:
    changed = _changed(problem)
    if changed is None:
        return
    got = problem.run(changed).args
    for name in problem.outputs:
        want, have, written = problem.base[name], got[name], problem.written[name]
        assert_same_bits(
            torch.where(written, have, torch.zeros_like(have)), torch.where(written, want, torch.zeros_like(want)), name,
            "with another content in unused memory",
        )  # fmt: skip


def _changed(problem: Problem) -> Args | None:
    card, args, any_change = problem.card, dict(problem.pristine), False
    valid, total = problem.valid_rows, problem.num_rows
    for name in rows.row_args(card, args):
        if valid < total and name not in problem.outputs:
            args[name] = args[name].clone()
            args[name][valid:] = _garbage(args[name][valid:])
            any_change = True
    inputs = {arg.name for arg in card.signature if arg.kind == "in"}
    for store, format, block_rows in STORES:
        if store in inputs and args[store] is not None and args[store].numel():
            rows_a_block = args[block_rows] if block_rows else 0
            filled = _filled(args[store], args[format], _width(args), rows_a_block)
            any_change |= not torch.equal(filled, args[store])
            args[store] = filled
    return args if any_change else None


def _garbage(like: torch.Tensor) -> torch.Tensor:
    if like.is_floating_point():
        return torch.full_like(like, float("nan"))
    return torch.full_like(like, 0x7F if like.dtype == torch.uint8 else 1 << 30)


def _width(args: Args) -> int:
    """Values of a row of the call's stores."""
    if "kv_norm" in args:
        return args["kv_norm"].shape[0]
    if "q" not in args:
        return args["out"].shape[-1]
    return args["q"].shape[-1] * (2 if args["q"].dtype == torch.uint8 else 1)


def _filled(cache: torch.Tensor, format: str, width: int, block_rows: int) -> torch.Tensor:
    """The store with plausible content in its unused rows and after its blocks."""
    filled = torch.full((cache.shape[0], cache.shape[1]), _PLAUSIBLE, dtype=torch.uint8)
    parts = zip(*(row_layout.sections(c, format, width, block_rows) for c in (cache, filled)), strict=True)
    used = torch.stack([(part != UNUSED).any(-1) for part in row_layout.sections(cache, format, width, block_rows)]).any(0)
    for old, new in parts:
        new.copy_(torch.where(used[..., None], old, new))
    return filled


CHECK = Check("poison", "Stale rows, padding and memory past the count never reach a result.", run)
