"""Which items the workers of a conformance run take, and in which order."""

import random

from deepinfer_hal.conformance.plan import CARD, SYSTEM, Item
from deepinfer_hal.conformance.schedule import BATCH, Schedule


def items_of(op, count, symbol=None):
    return [Item(CARD, op, f"{op}(n={i})", symbol or f"example::{op}") for i in range(count)]


def group_of(name, count):
    return [Item(SYSTEM, "model", f"model({name}={i})", group=name) for i in range(count)]


def ids(items):
    return [item.id for item in items]


def test_every_kernel_begins_before_any_goes_on_so_that_a_run_that_ends_early_has_seen_all():
    schedule = Schedule([*items_of("rope", 9), *items_of("rope", 9, "other::rope"), *items_of("linear", 9)], 2)
    first = [schedule.take(worker) for worker in (0, 1, 0)]
    assert {item.symbol for batch in first for item in batch} == {"example::rope", "other::rope", "example::linear"}
    assert all(len(batch) == BATCH and len({item.symbol for item in batch}) == 1 for batch in first)


def test_a_worker_goes_on_with_what_it_has_begun_where_most_is_left():
    schedule = Schedule([*items_of("rope", 12), *items_of("linear", 9), *items_of("quantise", 30)], 2)
    assert [schedule.take(worker)[0].op for worker in (0, 0, 1)] == ["rope", "linear", "quantise"]
    assert [schedule.take(0)[0].op for _ in range(4)] == ["rope", "linear", "rope", "linear"]


def test_a_worker_that_has_nothing_left_of_its_own_helps_the_others():
    schedule = Schedule([*items_of("rope", BATCH), *items_of("linear", 9), *items_of("quantise", 30)], 3)
    for worker in (0, 1, 2):
        schedule.take(worker)
    assert schedule.take(0)[0].op == "quantise"


def test_groups_come_first_and_whole_and_composites_made_of_parts_come_next():
    parts = items_of("moe_layer", 2, "composite(example)")
    schedule = Schedule([*items_of("linear", 2), *parts, *group_of("layers", 11)], 3)
    assert ids(schedule.take(0)) == ids(group_of("layers", 11))
    assert ids(schedule.take(1)) == ids(parts)
    assert ids(schedule.take(2)) == ids(items_of("linear", 2))
    assert schedule.take(0) == []


def test_groups_have_half_of_the_workers_until_nothing_else_is_left():
    schedule = Schedule([*group_of("layers", 5), *group_of("model", 5), *items_of("linear", 2 * BATCH)], 2)
    assert ids(schedule.take(0)) == ids(group_of("layers", 5))
    assert [schedule.take(1)[0].op for _ in range(2)] == ["linear", "linear"]
    assert ids(schedule.take(1)) == ids(group_of("model", 5))


def test_one_worker_runs_groups_at_last():
    schedule = Schedule([*group_of("layers", 5), *items_of("linear", 6)], 1)
    assert [schedule.take(0)[0].op for _ in range(3)] == ["linear", "linear", "model"]


def test_what_is_given_back_comes_first_of_its_kernel():
    linear, layers = items_of("linear", 6), group_of("layers", 3)
    schedule = Schedule([*linear, *layers], 2)
    assert schedule.take(0) == layers and schedule.take(1) == linear[:BATCH]
    schedule.give_back(layers[1:])
    schedule.give_back(linear[1:BATCH])
    assert schedule.take(0) == layers[1:]
    assert schedule.take(1) == linear[1 : 1 + BATCH]


def test_whoever_takes_them_every_item_is_taken_once():
    draw = random.Random(5)
    everything = [*group_of("layers", 7), *(item for i in range(20) for item in items_of(f"op{i}", draw.randrange(1, 30)))]
    schedule, taken = Schedule(everything, 5), []
    while batch := schedule.take(draw.randrange(5)):
        done = draw.randrange(1, len(batch) + 1)
        taken += batch[:done]
        schedule.give_back(batch[done:])
    assert sorted(ids(taken)) == sorted(ids(everything))
