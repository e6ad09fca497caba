"""Step plans: from cumulative lengths to the arrays that every layer's ops read.

`plan_step` is pure numpy, runs once a step, and its result goes to every layer. Host upper bounds are Python ints of
StepMeta, device truth are its int32 tensors.

| field | shape | meaning |
|---|---|---|
| cu_q | [R+1] | cumulative query tokens |
| positions, row_to_req | [T] | absolute position and request of each token row |
| slots | [R] | state slot of each request |
| block_tables | [R, Bmax] | paged blocks, -1 padded |
| window_base, window_origin, window_modulo | [R] | window row of position s is base + (s - origin) % modulo |
| window_slots | [T] | window row that each token's key is stored to |
| ring_slots | [T] | ring row of each token's key, -1 for tokens that later ones of the same step overwrite |
| load_src, load_dst / save_src, save_dst | [n] | ring rows copied to the flat buffer before, and back after, attention |
| count | [1] or None | token rows that are not padding, in a padded plan |
| ratios[r] | RatioMeta | groups that this step completes, and visible rows, for compression ratio r |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from deepinfer_hal.errors import BadCall


@dataclass(frozen=True)
class RatioMeta:
    """Per compression ratio: complete [G] token rows that end a group, positions [G] (first token of the group), slots [G]
    (block * block_rows + row), visible [T] = floor((position + 1) / ratio), max_visible on the host."""

    complete: Any
    positions: Any
    slots: Any
    visible: Any
    max_visible: int


@dataclass(frozen=True)
class FlatSizes:
    """Rows of a flat buffer, and of the copies into it and back, that every step of some size can do with."""

    rows: int
    loads: int
    saves: int


@dataclass(frozen=True)
class StepMeta:
    """See the module's table. `flat` tells that window rows go through a flat buffer of `flat_rows` rows in this step."""

    num_rows: int
    num_requests: int
    flat: bool
    flat_rows: int
    cu_q: Any
    positions: Any
    row_to_req: Any
    slots: Any
    block_tables: Any
    window_base: Any
    window_origin: Any
    window_modulo: Any
    window_slots: Any
    ring_slots: Any
    load_src: Any
    load_dst: Any
    save_src: Any
    save_dst: Any
    ratios: Mapping[int, RatioMeta] = field(default_factory=dict)
    count: Any = None

    def to(self, upload: Callable[[np.ndarray], torch.Tensor]) -> StepMeta:
        """The same plan with every array passed through `upload` (host int32 array -> device tensor)."""
        moved = {}
        for name, value in vars(self).items():
            if isinstance(value, np.ndarray):
                moved[name] = upload(value)
            elif name == "ratios":
                moved[name] = {
                    ratio: RatioMeta(upload(m.complete), upload(m.positions), upload(m.slots), upload(m.visible), m.max_visible)
                    for ratio, m in value.items()
                }
            else:
                moved[name] = value
        return StepMeta(**moved)


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Concatenation of arange(start, start + length) for each pair."""
    total = int(lengths.sum())
    if total == 0:
        return np.zeros(0, np.int32)
    ends = np.cumsum(lengths)
    return (np.arange(total) - np.repeat(ends - lengths - starts, lengths)).astype(np.int32)


def plan_step(
    cu_q: np.ndarray,
    starts: np.ndarray,
    slots: np.ndarray,
    block_tables: np.ndarray,
    *,
    window: int,
    ring_rows: int,
    slot_rows: int,
    ratios: tuple[int, ...],
    block_tokens: int,
    flat: bool = False,
) -> StepMeta:
    """Plans one step of R requests.

    cu_q int32 [R+1]; starts int32 [R], position of each request's first query token; slots int32 [R]; block_tables int32
    [R, Bmax]. Rows go through the flat buffer as soon as one request brings more tokens than the ring can take before
    they are attended, or where `flat` asks for it; bits do not depend on it, since the flat buffer holds the ring's own
    bytes. Raises BadCall for lengths, starts or block tables that are no step.
    """
    lengths = _checked_lengths(cu_q, starts, slots, block_tables)
    num_requests, num_rows = len(lengths), int(cu_q[-1])
    row_to_req = np.repeat(np.arange(num_requests, dtype=np.int32), lengths)
    positions = _ranges(starts, lengths)
    flat = flat or (bool(num_requests) and int(lengths.max()) > ring_rows - window + 1)
    ring_base = (slots * slot_rows).astype(np.int32)
    empty = np.zeros(0, np.int32)
    ends = starts + lengths
    ring_slots = ring_base[row_to_req] + positions % ring_rows
    if num_requests and int(lengths.max()) > ring_rows:
        ring_slots = np.where(positions >= ends[row_to_req] - ring_rows, ring_slots, -1)
    if flat:
        history = np.minimum(starts, window - 1).astype(np.int32)
        extent = history + lengths
        base = (np.cumsum(extent) - extent).astype(np.int32)
        origin, modulo = (starts - history).astype(np.int32), np.maximum(extent, 1).astype(np.int32)
        window_slots = base[row_to_req] + positions - origin[row_to_req]
        kept = np.minimum(lengths, ring_rows)
        load_src = np.repeat(ring_base, history) + _ranges(origin, history) % ring_rows
        load_dst = _ranges(base, history)
        saved = ends - kept
        save_src = _ranges(base + saved - origin, kept)
        save_dst = np.repeat(ring_base, kept) + _ranges(saved, kept) % ring_rows
        flat_rows = int(extent.sum())
    else:
        base, origin = ring_base, np.zeros(num_requests, np.int32)
        modulo = np.full(num_requests, ring_rows, np.int32)
        window_slots = ring_slots
        load_src = load_dst = save_src = save_dst = empty
        flat_rows = 0
    arrays = {
        "cu_q": cu_q, "positions": positions, "row_to_req": row_to_req, "slots": slots, "block_tables": block_tables,
        "window_base": base, "window_origin": origin, "window_modulo": modulo, "window_slots": window_slots,
        "ring_slots": ring_slots, "load_src": load_src, "load_dst": load_dst, "save_src": save_src, "save_dst": save_dst,
    }  # fmt: skip
    per_ratio = {ratio: _plan_ratio(ratio, positions, row_to_req, block_tables, block_tokens) for ratio in ratios}
    bounds = {"num_rows": num_rows, "num_requests": num_requests, "flat": flat, "flat_rows": flat_rows}
    return StepMeta(**bounds, **{name: _as_i32(array) for name, array in arrays.items()}, ratios=per_ratio)


def _checked_lengths(cu_q: np.ndarray, starts: np.ndarray, slots: np.ndarray, block_tables: np.ndarray) -> np.ndarray:
    lengths = np.diff(cu_q)
    requests = len(lengths)
    if len(cu_q) == 0 or cu_q[0] != 0 or (requests and lengths.min() < 0):
        raise BadCall(f"plan_step: cu_q must begin with 0 and never fall, got {list(cu_q)}")
    if not len(starts) == len(slots) == len(block_tables) == requests:
        raise BadCall(
            f"plan_step: cu_q tells of {requests} requests; starts has {len(starts)}, slots {len(slots)}, block_tables "
            f"{len(block_tables)}"
        )
    if requests and (starts.min() < 0 or slots.min() < 0):
        raise BadCall("plan_step: starts and slots must not be negative")
    return lengths


def _plan_ratio(
    ratio: int, positions: np.ndarray, row_to_req: np.ndarray, block_tables: np.ndarray, block_tokens: int
) -> RatioMeta:
    visible = (positions + 1) // ratio
    complete = np.nonzero((positions + 1) % ratio == 0)[0]
    group = positions[complete] // ratio
    block_rows = block_tokens // ratio
    last = int(group.max()) if len(group) else -1
    if last >= block_tables.shape[1] * block_rows:
        raise BadCall(
            f"plan_step: position {last * ratio + ratio - 1} needs block {last // block_rows}, "
            f"but block_tables has {block_tables.shape[1]} columns"
        )
    blocks = block_tables[row_to_req[complete], group // block_rows] if len(complete) else np.zeros(0, np.int32)
    slots = np.where(blocks >= 0, blocks * block_rows + group % block_rows, -1)
    most = int(visible.max()) if len(visible) else 0
    return RatioMeta(_as_i32(complete), _as_i32(group * ratio), _as_i32(slots), _as_i32(visible), most)


def flat_sizes(requests: int, rows: int, *, window: int, ring_rows: int) -> FlatSizes:
    """What steps of at most `requests` requests and `rows` token rows need of a flat buffer: each request's history of a window
    but one, and all rows, of which a ring takes no more than it has."""
    history = requests * (window - 1)
    return FlatSizes(history + rows, history, min(rows, requests * ring_rows))


def pad_step(
    meta: StepMeta, *, requests: int, rows: int, columns: int, tokens: int, flat: FlatSizes | None = None
) -> StepMeta:
    """A host plan padded to fixed sizes: `requests` and `rows` at least its own, block tables of `columns` (what lies beyond is
    dropped), groups for as many as `rows` tokens can complete, sequences of at most `tokens` tokens; flat: sizes of the flat
    buffer that the padded plan goes through, which the plan must do as well, unless it is empty.

    Padded rows have request, position and slots -1, padded copies rows -1, padded requests no rows, so that ops leave their
    outputs untouched. BadCall for a plan that does not fit.
    """
    seen = max((ratio * one.max_visible for ratio, one in meta.ratios.items()), default=0)
    room = flat or FlatSizes(0, 0, 0)
    fits = meta.flat_rows <= room.rows and len(meta.load_src) <= room.loads and len(meta.save_src) <= room.saves
    same_way = meta.flat == (flat is not None) or not meta.num_rows
    if not (fits and same_way) or meta.num_requests > requests or meta.num_rows > rows or seen > tokens:
        raise BadCall(
            f"pad_step: a step of {meta.num_requests} requests, {meta.num_rows} rows and {seen} visible tokens"
            f"{f', through a flat buffer of {meta.flat_rows},' if meta.flat else ''} does not fit {requests}, {rows} and {tokens}"
            f"{f', through one of {flat.rows}' if flat else ''}"
        )

    def padded(array: np.ndarray, *shape: int, value: int = -1) -> np.ndarray:
        whole = np.full(shape, value, np.int32)
        whole[tuple(slice(0, size) for size in array.shape)] = array
        return whole

    arrays = {name: padded(getattr(meta, name), rows) for name in ("positions", "row_to_req", "window_slots", "ring_slots")}
    end = int(meta.cu_q[-1])
    arrays["cu_q"] = padded(meta.cu_q, requests + 1, value=end)
    arrays["slots"] = padded(meta.slots, requests)
    arrays["block_tables"] = padded(meta.block_tables[:, :columns], requests, columns)
    arrays["window_base"] = padded(meta.window_base, requests, value=0)
    arrays["window_origin"] = padded(meta.window_origin, requests, value=0)
    arrays["window_modulo"] = padded(meta.window_modulo, requests, value=1)
    ratios = {}
    for ratio, one in meta.ratios.items():
        groups = min(rows, (rows + requests * (ratio - 1)) // ratio)
        ratios[ratio] = RatioMeta(
            padded(one.complete, groups), padded(one.positions, groups), padded(one.slots, groups),
            padded(one.visible, rows, value=0), tokens // ratio,
        )  # fmt: skip
    for names, size in ((("load_src", "load_dst"), room.loads), (("save_src", "save_dst"), room.saves)):
        arrays |= {name: padded(getattr(meta, name), size) for name in names}
    count = np.array([meta.num_rows], np.int32)
    fixed = {"num_rows": rows, "num_requests": requests, "ratios": ratios, "count": count}
    fixed |= {"flat": flat is not None, "flat_rows": room.rows}
    return StepMeta(**{**vars(meta), **arrays, **fixed})


def empty_step(ratios: tuple[int, ...]) -> StepMeta:
    """The plan of a step without requests, on the host: what warm-up pads to each size."""
    none = np.zeros(0, np.int32)
    return plan_step(
        np.zeros(1, np.int32), none, none, np.zeros((0, 0), np.int32), window=1, ring_rows=1, slot_rows=1, ratios=ratios,
        block_tokens=max(ratios, default=1),
    )  # fmt: skip


def _as_i32(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array, dtype=np.int32)
