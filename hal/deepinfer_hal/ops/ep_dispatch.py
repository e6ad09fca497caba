"""ep_dispatch: each token's row to the ranks of its chosen experts (the way out of expert parallelism, V4.1 notes 2.9).

Expert e of world * experts physical ones lives on rank e // experts. A rank receives one row for each (token, choice)
pair of any rank that chose one of its experts, by expert, then source rank, token and choice: `permute` over all ranks,
cut into ranks. So each row's place, and with it every later sum, is fixed by the ids alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from deepinfer_hal.card import COMM, COUNT, Case, OpCard, out, register, scalar, tensor
from deepinfer_hal.communicator import Communicator, SingleRank
from deepinfer_hal.errors import BadCall
from deepinfer_hal.ops import _common as c
from deepinfer_hal.ops import _communication as m


def ep_dispatch(
    comm: Communicator,
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    ids: torch.Tensor,
    weights: torch.Tensor | None,
    experts: int,
    count: torch.Tensor | None,
    out: torch.Tensor,
    out_scale: torch.Tensor | None,
    out_weights: torch.Tensor | None,
    offsets: torch.Tensor,
    source: torch.Tensor,
    inverse: torch.Tensor,
) -> None:
    """x [T, K] (+ x_scale), ids i32 [T, k] of physical experts, weights f32 [T, k] -> out [M, K] (+ out_scale),
    out_weights f32 [M], offsets i32 [experts+1], source i32 [M, 2], inverse i32 [T, k, 2].

    T and M may differ between ranks; M is the rank's bound, and world * k * (the largest T) always suffices. Rows
    offsets[e] .. offsets[e+1] are for the rank's expert e. source[row] = (rank, t*k + j) the row comes from, and
    inverse[t, j] = (rank, row) it went to; (-1, -1) for an id outside 0 .. world*experts-1, which has no row. Rows of out,
    out_weights and source from offsets[experts] on, and rows of inverse past `count`, stay untouched.

    Raises BadCall on every rank, with nothing moved, if some rank would receive more than its M rows.
    """
    n, k = c.valid_rows(count, ids.shape[0]), ids.shape[1]
    order, sent = m.sort_pairs(ids[:n].reshape(-1).cpu().numpy(), comm.world_size * experts)
    what = f"ep_dispatch({m.spell(x, rows=False)}, k={k}, experts={experts}, weights={'yes' if weights is not None else 'no'})"
    told = np.array(comm.exchange(what, (*sent.tolist(), out.shape[0])), dtype=np.int64)
    counts = told[:, :-1]
    _check_room(counts, experts, told[:, -1])
    arrival, sources, bounds = m.arrivals(counts, comm.rank)
    total = arrival.size

    pairs = torch.from_numpy(order).to(x.device)
    parts = [m.row_bytes(x[pairs // k])]
    if x_scale is not None:
        parts.append(x_scale[pairs // k])
    if weights is not None:
        parts.append(m.row_bytes(weights[:n].reshape(-1)[pairs]))
    parts.append(m.row_bytes(pairs.to(torch.int32)))
    records = torch.cat(parts, dim=1)
    received = torch.empty(total, records.shape[1], dtype=torch.uint8, device=x.device)
    send_rows, receive_rows = (per.reshape(-1, experts).sum(1) for per in (sent, _to_rank(counts, comm.rank, experts)))
    width = records.shape[1]
    comm.all_to_all(records.view(-1), (send_rows * width).tolist(), received.view(-1), (receive_rows * width).tolist())

    received = received[torch.from_numpy(arrival).to(x.device)]
    ends = np.cumsum([part.shape[1] for part in parts]).tolist()
    columns = [received[:, start:end] for start, end in zip([0, *ends], ends, strict=False)]
    out[:total] = m.from_row_bytes(columns.pop(0), out.dtype)
    if out_scale is not None:
        out_scale[:total] = columns.pop(0)
    if out_weights is not None:
        out_weights[:total] = m.from_row_bytes(columns.pop(0), torch.float32)[:, 0]
    source[:total, 1] = m.from_row_bytes(columns.pop(0), torch.int32)[:, 0]
    source[:total, 0] = torch.from_numpy(sources.astype(np.int32)).to(x.device)
    offsets.copy_(torch.from_numpy(bounds.astype(np.int32)))
    back = np.full((n * k, 2), -1, dtype=np.int32)
    back[order] = np.stack(m.landings(counts, comm.rank), axis=1)
    inverse[:n] = torch.from_numpy(back).to(x.device).view(n, k, 2)


def _to_rank(counts: np.ndarray, rank: int, experts: int) -> np.ndarray:
    return counts[:, rank * experts : (rank + 1) * experts].reshape(-1)


def _check_room(counts: np.ndarray, experts: int, rooms: np.ndarray) -> None:
    """All ranks see the same counts, so all of them refuse."""
    for rank, room in enumerate(rooms.tolist()):
        rows = int(_to_rank(counts, rank, experts).sum())
        if rows > room:
            raise BadCall(f"ep_dispatch: rank {rank} is sent {rows} rows, but its out has room for {room}")


def _cases() -> list[Case]:
    rows = [
        dict(T=0, K=256, E=8, k=2, x="bf16"),
        dict(T=1, K=256, E=8, k=2, x="u8", weights=True),
        dict(T=33, K=256, E=8, k=2, x="u8", weights=True, count=21),
        dict(T=33, K=64, E=8, k=2, x="bf16", holes=True, strided=True, spare=7),
        dict(T=9, K=64, E=8, k=2, x="bf16", weights=True, one_expert=3),
        dict(T=3, K=64, E=384, k=6, x="f32", weights=True),
        dict(T=5, K=32, E=4, k=2, x="u8", holes="all"),
    ]
    return [Case("ep_dispatch", row) for row in rows]


def _generate(case: Case, seed: int, device: Any, prepare: c.Prepare) -> dict[str, Any]:
    p, gen = case.params, c.generator(case, seed)
    tokens, k, width, experts = p["T"], p["k"], p["K"], p["E"]
    room = tokens * k + p.get("spare", 0)
    x, x_scale = c.normal(gen, tokens, width, device=device), None
    y, y_scale = c.poisoned_pair(room, width, device)
    if p["x"] == "u8":
        x, x_scale = c.quantised(x)
    else:
        x = x.to(c.dtype_of(p["x"]))
        y, y_scale = c.poisoned(room, width, dtype=x.dtype, device=device), None
    picks = [torch.randperm(experts, generator=gen)[:k] for _ in range(tokens)]
    ids = (torch.stack(picks) if picks else torch.zeros(0, k)).to(torch.int32)
    if "one_expert" in p:
        ids[:] = p["one_expert"]
    if p.get("holes"):
        ids[torch.rand(ids.shape, generator=gen) < (1.0 if p["holes"] == "all" else 0.3)] = -1
    weighed, i32, f32 = p.get("weights", False), torch.int32, torch.float32
    return {
        "comm": SingleRank(),
        "x": c.strided(x) if p.get("strided") else x,
        "x_scale": x_scale,
        "ids": ids.to(device),
        "weights": torch.rand(tokens, k, generator=gen).to(device) if weighed else None,
        "experts": experts,
        "count": c.count_tensor(p.get("count"), device),
        "out": y,
        "out_scale": y_scale,
        "out_weights": c.poisoned(room, dtype=f32, device=device) if weighed else None,
        "offsets": c.poisoned(experts + 1, dtype=i32, device=device),
        "source": c.poisoned(room, 2, dtype=i32, device=device),
        "inverse": c.poisoned(tokens, k, 2, dtype=i32, device=device),
    }


def _check(args: dict[str, Any]) -> None:
    c.check_pairs("ep_dispatch", args, ("x", "x_scale"), ("out", "out_scale"))
    if args["x"].dtype != args["out"].dtype:
        raise BadCall(f"ep_dispatch: out must have x's dtype {args['x'].dtype}, got {args['out'].dtype}")
    if (args["weights"] is None) != (args["out_weights"] is None):
        raise BadCall("ep_dispatch: weights and out_weights are given together or not at all")
    if args["experts"] < 1:
        raise BadCall(f"ep_dispatch: a rank must have at least one expert, got experts = {args['experts']}")


CARD = register(
    OpCard(
        name="ep_dispatch",
        group="communication",
        summary="Sends each token's row to the ranks of its chosen experts, sorted by expert there.",
        signature=(
            COMM,
            tensor("x", "act", "T K"),
            tensor("x_scale", "u8", "T K/32", optional=True),
            tensor("ids", "i32", "T k"),
            tensor("weights", "f32", "T k", optional=True),
            scalar("experts", "int"),
            COUNT,
            out("out", "act", "M K"),
            out("out_scale", "u8", "M K/32", optional=True),
            out("out_weights", "f32", "M", optional=True),
            out("offsets", "i32", "experts+1"),
            out("source", "i32", "M 2"),
            out("inverse", "i32", "T k 2"),
        ),
        reference=ep_dispatch,
        rounding="none: rows and weights are copied",
        invariance="a token's rows have its bits; where they lie depends on the ids of all ranks",
        empty="a rank without tokens sends nothing, receives what others send it, and all ranks finish",
        discrete=("out", "out_scale", "out_weights", "offsets", "source", "inverse"),
        check=_check,
        enumerate_cases=_cases,
        generate=_generate,
    )
)
