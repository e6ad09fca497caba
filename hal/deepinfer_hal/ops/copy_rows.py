"""copy_rows: copies byte rows between two stores (or within one).

dst[dst_rows[i]] = src[src_rows[i]]; -1 on either side copies nothing. src and dst may share storage only if no row is
both read and written.
"""

from __future__ import annotations

import torch

from deepinfer_hal.card import Case, OpCard, inout, register, tensor
from deepinfer_hal.errors import BadCall
from deepinfer_hal.ops import _cache_cases as cases
from deepinfer_hal.ops._common import generator, poisoned
from deepinfer_hal.ops._cost import touching


def copy_rows(src, src_rows, dst_rows, dst) -> None:
    """src uint8 [N, b]; src_rows, dst_rows int32 [n] (destinations distinct); dst uint8 [M, b]."""
    copy_where_valid(src, src_rows, dst_rows, dst)


def copy_where_valid(src: torch.Tensor, src_rows: torch.Tensor, dst_rows: torch.Tensor, dst: torch.Tensor) -> None:
    """The copy that copy_rows, copy_blocks and snapshot_state share."""
    live = ((src_rows >= 0) & (dst_rows >= 0)).nonzero().squeeze(1)
    dst[dst_rows[live].long()] = src[src_rows[live].long()]


def enumerate_cases():
    for rows, skip in ((0, 0), (1, 0), (3, 2), (33, 0), (33, 3)):
        yield Case("copy_rows", dict(rows=rows, bytes=528, skip=skip))
    yield Case("copy_rows", dict(rows=10, bytes=288, skip=4, padding=32))


def generate(case, seed, device, prepare) -> dict:
    p, g = {"padding": 0, **case.params}, generator(case, seed)
    src = torch.randint(0, 256, (50, p["bytes"] + p["padding"]), generator=g, dtype=torch.uint8)
    dst = poisoned(60, p["bytes"] + p["padding"], dtype=torch.uint8)
    args = dict(
        src=src[:, : p["bytes"]],
        src_rows=cases.distinct_slots(g, p["rows"], 50, p["skip"]),
        dst_rows=cases.distinct_slots(g, p["rows"], 60, p["skip"] and p["skip"] + 1),
        dst=dst[:, : p["bytes"]],
    )
    return cases.on(device, args)


def pair_cases(op: str):
    """Cases of a copy within one store."""
    for rows, skip in ((0, 0), (1, 0), (3, 2), (12, 0), (12, 3)):
        yield Case(op, dict(rows=rows, bytes=1152, skip=skip))
    yield Case(op, dict(rows=10, bytes=1056, skip=4, padding=32))


def generate_pairs(case, seed, device, store: str) -> dict:
    """src, dst (disjoint row sets) and the store under its name."""
    p, g = {"padding": 0, **case.params}, generator(case, seed)
    rows = cases.distinct_slots(g, 2 * p["rows"], 30)
    src, dst = rows[: p["rows"]].clone(), rows[p["rows"] :].clone()
    if p["skip"]:
        src[p["skip"] - 1 :: p["skip"]] = -1
        dst[p["skip"] :: p["skip"]] = -1
    content = torch.randint(0, 256, (30, p["bytes"] + p["padding"]), generator=g, dtype=torch.uint8)
    return cases.on(device, {"src": src, "dst": dst, store: content[:, : p["bytes"]]})


def check(args) -> None:
    if args["src"].shape[1] != args["dst"].shape[1]:
        src, dst = args["src"].shape[1], args["dst"].shape[1]
        raise BadCall(f"copy_rows: src and dst rows must have one size, got {src} and {dst} bytes")


def _copied_bytes(args) -> int:
    """What is read of the source, and written of the destination."""
    return args["src_rows"].shape[0] * args["src"].shape[1]


CARD = register(
    OpCard(
        name="copy_rows",
        group="state",
        summary="Copies byte rows between stores.",
        signature=(
            tensor("src", "u8", "N b"),
            tensor("src_rows", "i32", "n"),
            tensor("dst_rows", "i32", "n"),
            inout("dst", "u8", "M _"),
        ),
        reference=copy_rows,
        discrete=("dst",),
        check=check,
        enumerate_cases=enumerate_cases,
        generate=generate,
        cost=touching(src=_copied_bytes, dst=_copied_bytes),
    )
)
