"""Step plans against plain Python loops, for any mix of requests."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from deepinfer_hal.errors import BadCall
from deepinfer_hal.step import StepMeta, plan_step
from hypothesis import given, settings
from hypothesis import strategies as st

WINDOW, BLOCK_TOKENS, RATIOS = 8, 16, (1, 2, 4)


@dataclasses.dataclass
class Step:
    """Requests as (slot, start, length) with their block tables, and the ring they live in."""

    requests: list[tuple[int, int, int]]
    tables: np.ndarray
    ring_rows: int
    slot_rows: int

    def plan(self, upload=None) -> StepMeta:
        slots, starts, lengths = (np.array([one[i] for one in self.requests], np.int32) for i in range(3))
        cu_q = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        meta = plan_step(
            cu_q, starts, slots, self.tables, window=WINDOW, ring_rows=self.ring_rows, slot_rows=self.slot_rows, ratios=RATIOS,
            block_tokens=BLOCK_TOKENS,
        )  # fmt: skip
        return meta if upload is None else meta.to(upload)

    def rows(self):
        """(row, request, slot, position) of every token row."""
        row = 0
        for request, (slot, start, length) in enumerate(self.requests):
            for position in range(start, start + length):
                yield row, request, slot, position
                row += 1

    def ring_row(self, slot: int, position: int) -> int:
        return slot * self.slot_rows + position % self.ring_rows


@st.composite
def steps(draw) -> Step:
    backtrack = draw(st.integers(0, 6))
    ring_rows = WINDOW + backtrack
    count = draw(st.integers(0, 5))
    slots = draw(st.permutations(range(8)))[:count]
    longest = draw(st.sampled_from([1, backtrack + 1, ring_rows, 3 * ring_rows]))
    requests = [(slot, draw(st.integers(0, 60)), draw(st.integers(0, longest))) for slot in slots]
    columns = -(-max([start + length for _, start, length in requests], default=1) // BLOCK_TOKENS)
    ids = draw(st.permutations(range(count * columns))) if count else []
    tables = np.array(ids, np.int32).reshape(count, columns)
    return Step(requests, tables, ring_rows, slot_rows=3 * ring_rows)


PROPERTY = settings(max_examples=150, deadline=None, derandomize=True)


@PROPERTY
@given(steps())
def test_each_row_knows_its_request_and_position(step):
    meta = step.plan()
    rows = list(step.rows())
    assert (meta.num_rows, meta.num_requests) == (len(rows), len(step.requests))
    assert meta.row_to_req.tolist() == [request for _, request, _, _ in rows]
    assert meta.positions.tolist() == [position for *_, position in rows]
    assert meta.slots.tolist() == [slot for slot, _, _ in step.requests]
    assert meta.cu_q.tolist() == [sum(length for *_, length in step.requests[:i]) for i in range(len(step.requests) + 1)]


@PROPERTY
@given(steps())
def test_ring_rows_are_those_of_the_last_positions_and_none_is_given_twice(step):
    meta = step.plan()
    for row, request, slot, position in step.rows():
        _, start, length = step.requests[request]
        kept = position >= start + length - step.ring_rows
        assert meta.ring_slots[row] == (step.ring_row(slot, position) if kept else -1)
    used = meta.ring_slots[meta.ring_slots >= 0]
    assert len(set(used.tolist())) == len(used)


def run_window_storage(step: Step, meta: StepMeta) -> None:
    """Plays a step on rows that hold (slot, position): load, store, read every key of every query, save."""
    ring: dict[int, tuple[int, int]] = {}
    for slot, start, _ in step.requests:
        for position in range(max(0, start - step.ring_rows), start):
            ring[step.ring_row(slot, position)] = (slot, position)
    store = ring
    if meta.flat:
        assert len(set(meta.load_dst.tolist())) == len(meta.load_dst)
        store = {int(dst): ring[int(src)] for src, dst in zip(meta.load_src, meta.load_dst, strict=True)}
    for row, _, slot, position in step.rows():
        store[int(meta.window_slots[row])] = (slot, position)
    for _, request, slot, position in step.rows():
        base, origin, modulo = (int(one[request]) for one in (meta.window_base, meta.window_origin, meta.window_modulo))
        for key in range(max(0, position - WINDOW + 1), position + 1):
            assert key >= origin
            assert store[base + (key - origin) % modulo] == (slot, key)
    if meta.flat:
        assert len(set(meta.save_dst.tolist())) == len(meta.save_dst)
        assert all(0 <= int(one) < meta.flat_rows for one in (*meta.window_slots, *meta.load_dst, *meta.save_src))
        for src, dst in zip(meta.save_src, meta.save_dst, strict=True):
            ring[int(dst)] = store[int(src)]
    for slot, start, length in step.requests:
        for position in range(max(0, start + length - step.ring_rows), start + length):
            assert ring[step.ring_row(slot, position)] == (slot, position)


@PROPERTY
@given(steps())
def test_every_query_finds_every_key_of_its_window_and_the_ring_ends_with_the_last_positions(step):
    run_window_storage(step, step.plan())


@PROPERTY
@given(steps())
def test_rows_go_through_the_flat_buffer_exactly_when_a_request_would_overwrite_what_it_reads(step):
    meta = step.plan()
    longest = max((length for *_, length in step.requests), default=0)
    assert meta.flat == (longest + WINDOW - 1 > step.ring_rows)
    if not meta.flat:
        assert meta.flat_rows == 0 and not any(len(one) for one in (meta.load_src, meta.load_dst, meta.save_src, meta.save_dst))
        assert meta.window_slots.tolist() == meta.ring_slots.tolist()


@PROPERTY
@given(steps())
def test_groups_end_where_their_last_token_is_and_lie_in_their_requests_blocks(step):
    meta = step.plan()
    assert tuple(meta.ratios) == RATIOS
    for ratio, found in meta.ratios.items():
        rows = list(step.rows())
        assert found.visible.tolist() == [(position + 1) // ratio for *_, position in rows]
        assert found.max_visible == max(found.visible.tolist(), default=0)
        complete = [(row, request, position) for row, request, _, position in rows if (position + 1) % ratio == 0]
        assert found.complete.tolist() == [row for row, _, _ in complete]
        assert found.positions.tolist() == [position + 1 - ratio for *_, position in complete]
        block_rows = BLOCK_TOKENS // ratio
        for slot, (_, request, position) in zip(found.slots.tolist(), complete, strict=True):
            block = step.tables[request, position // BLOCK_TOKENS]
            assert slot == block * block_rows + position // ratio % block_rows
        assert len(set(found.slots.tolist())) == len(found.slots)


@PROPERTY
@given(steps())
def test_every_array_is_int32_and_goes_through_the_upload(step):
    seen = []

    def upload(array):
        assert array.dtype == np.int32 and array.flags.c_contiguous
        seen.append(array)
        return torch.from_numpy(array)

    meta = step.plan(upload)
    host = step.plan()
    arrays = [name for name, value in vars(host).items() if isinstance(value, np.ndarray)]
    assert len(seen) == len(arrays) + 4 * len(RATIOS)
    assert all(np.array_equal(getattr(meta, name).numpy(), getattr(host, name)) for name in arrays)
    assert [one.max_visible for one in meta.ratios.values()] == [one.max_visible for one in host.ratios.values()]


def make(*requests: tuple[int, int, int], columns: int = 8, ring_rows: int = WINDOW + 6) -> Step:
    tables = np.arange(len(requests) * columns, dtype=np.int32).reshape(len(requests), columns)
    return Step(list(requests), tables, ring_rows, 3 * ring_rows)


def test_a_step_of_no_requests_is_a_step():
    meta = make().plan()
    assert (meta.num_rows, meta.num_requests, meta.flat, meta.flat_rows) == (0, 0, False, 0)
    assert meta.cu_q.tolist() == [0] and meta.positions.shape == meta.window_base.shape == (0,)
    assert all(one.complete.shape == (0,) and one.max_visible == 0 for one in meta.ratios.values())


@pytest.mark.parametrize("others", [(), ((1, 0, 100),), ((1, 30, 2), (2, 0, 40))])
def test_a_request_without_tokens_changes_nothing_for_the_others(others):
    step = make((0, 0, 0), *others, (7, 12, 0))
    meta = step.plan()
    run_window_storage(step, meta)
    assert (meta.window_modulo > 0).all()


def test_a_block_that_is_not_given_leaves_the_row_unstored():
    step = make((0, 14, 4))
    step.tables[0, 1] = -1
    found = step.plan().ratios[2]
    assert found.complete.tolist() == [1, 3] and found.slots.tolist() == [7, -1]


def plan_raw(cu_q=(0, 2), starts=(0,), slots=(0,), tables=((0,),)) -> StepMeta:
    arrays = [np.array(one, np.int32) for one in (cu_q, starts, slots, tables)]
    return plan_step(*arrays, window=8, ring_rows=14, slot_rows=14, ratios=(1,), block_tokens=16)


@pytest.mark.parametrize("change, message", [
    ({"cu_q": (1, 2)}, "must begin with 0"),
    ({"cu_q": (0, -1)}, "never fall"),
    ({"cu_q": ()}, "must begin with 0"),
    ({"starts": (0, 0)}, "tells of 1 requests; starts has 2"),
    ({"starts": (-1,)}, "must not be negative"),
    ({"slots": (-1,)}, "must not be negative"),
    ({"starts": (15,)}, "position 16 needs block 1, but block_tables has 1 columns"),
])  # fmt: skip
def test_arrays_that_are_no_step_are_refused(change, message):
    plan_raw()
    with pytest.raises(BadCall, match=message):
        plan_raw(**change)
