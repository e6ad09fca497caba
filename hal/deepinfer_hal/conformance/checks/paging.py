"""Where rows lie must not matter: other page ids, other ring bases, a flat window buffer in place of the ring, expert
rows in another order."""

from collections.abc import Iterator

import torch

from deepinfer_hal.conformance.checks._base import Check, Profile
from deepinfer_hal.conformance.compare import assert_same_bits
from deepinfer_hal.conformance.problem import Args, Problem

SHIFT_ROWS = 3


def run(problem: Problem, profile: Profile) -> None:
    for why, args in variants(problem):
        got = problem.run(args).args
        for name in problem.outputs:
            assert_same_bits(got[name], problem.base[name], name, why)


def variants(problem: Problem) -> Iterator[tuple[str, Args]]:
    """(what is different, the same call over memory arranged in another way)."""
    args = problem.pristine
    if args.get("block_table") is not None and args["block_table"].numel():
        cache = "compressed" if "compressed" in args else "cache"
        blocks = args[cache].shape[0]
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(problem.seed + 1))
        yield "with pages renamed", _renamed(args, cache, order)
        yield "with pages in reverse", _renamed(args, cache, torch.arange(blocks).flip(0))
    if "window_base" in args and args["window_base"].numel() and "window" not in problem.outputs:
        yield "with rings moved", _moved_rings(args)
        yield "with a flat window in place of the ring", _flat(args)
    if problem.card.name == "unpermute":
        last = args["rows"].shape[0] - 1
        inverse = torch.where(args["inverse"] >= 0, last - args["inverse"], args["inverse"])
        yield "with expert rows in reverse", {**args, "rows": args["rows"].flip(0), "inverse": inverse}


def _renamed(args: Args, cache: str, order: torch.Tensor) -> Args:
    """Block b becomes block order[b]."""
    moved = torch.full((args[cache].shape[0], args[cache].shape[1]), 0xFF, dtype=torch.uint8)
    moved[order] = args[cache]
    table = args["block_table"]
    named = torch.where(table >= 0, order.to(torch.int32)[table.long().clamp(0, len(order) - 1)], table)
    return {**args, cache: moved, "block_table": named}


def _moved_rings(args: Args) -> Args:
    window = args["window"]
    room = torch.full((SHIFT_ROWS, window.shape[1]), 0xFF, dtype=torch.uint8)
    return {**args, "window": torch.cat((room, window)), "window_base": args["window_base"] + SHIFT_ROWS}


def _flat(args: Args) -> Args:
    """Every request's window rows one after the other, in order of position, from the oldest that a query may see."""
    last, first = _extent(args)
    rows, bases = [], []
    for r, (low, high) in enumerate(zip(first, last, strict=True)):
        bases.append(len(rows))
        base, origin, modulo = (int(args[f"window_{part}"][r]) for part in ("base", "origin", "modulo"))
        rows += [base + (s - origin) % modulo for s in range(low, high + 1)]
    taken = torch.tensor(rows, dtype=torch.int64)
    lengths = [max(high - low + 1, 1) for low, high in zip(first, last, strict=True)]
    as_i32 = {"window_base": bases, "window_origin": first, "window_modulo": lengths}
    flat = args["window"][taken] if rows else torch.full((1, args["window"].shape[1]), 0xFF, dtype=torch.uint8)
    return {**args, "window": flat, **{name: torch.tensor(v, dtype=torch.int32) for name, v in as_i32.items()}}


def _extent(args: Args) -> tuple[list[int], list[int]]:
    """Last and first position of each request that some query may see; last < first where there is none."""
    requests, window = args["window_base"].shape[0], args["window_tokens"]
    last, first = [-1] * requests, [0] * requests
    if "anchor" in args:
        seen = list(enumerate(args["anchor"].tolist()))
    else:
        seen = list(zip(args["row_to_req"].tolist(), args["positions"].tolist(), strict=True))
    for r in range(requests):
        positions = [p for owner, p in seen if owner == r and p >= 0]
        if positions:
            origin = int(args["window_origin"][r])
            last[r], first[r] = max(positions), max(origin, 0, min(positions) - window + 1)
    return last, first


def applies(problem: Problem) -> bool:
    return not problem.empty and problem.kernel.invariant == "yes" and any(True for _ in variants(problem))


CHECK = Check("paging", "Page ids, ring places and flat or paged storage are addresses; no bit may depend on them.", run, applies)
