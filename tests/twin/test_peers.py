"""Ranks of the twin: windows, flag words that order, and every planted mistake between ranks reported with its place."""

from __future__ import annotations

import probes
import pytest
import torch
from deepinfer_hal.errors import BackendError

pytestmark = pytest.mark.skipif(probes.missing() is not None, reason=str(probes.missing()))

ITEMS, WINDOW = 64, 4096
NAMES = ["windows", "x", "y", "status", "others", "rank", "ranks", "mistake", "call", "window_bytes", "deadline"]
SECOND = 1_000_000_000
"""Cycles of the clock that kernels read."""

MISTAKES = {
    1: ("flag before the data", r"race in global memory: DataCopy at \S*SOURCE.*rank 1.*DataCopy at \S*SOURCE.*rank 0"),
    2: ("no barrier between data and flag", r"race in global memory: DataCopy at \S*SOURCE.*DataCopy at \S*SOURCE"),
    3: (
        "a flag never written",
        r"deadlock: vector core 0 of rank 0 waits at \S*SOURCE for flag 0 of rank 1 in the window of rank 0, which rank 1 has "
        r"not written",
    ),
    4: ("no wait for the flags", r"race in global memory: "),
    5: ("the slot of another rank", r"race in global memory: .*rank 0.*rank 1|reads 256 bytes of the window"),
    6: (
        "past the end of a window",
        r"bytes \[3968, 4224\) were meant in the window of rank \d, which has 4096",
    ),
    7: ("a tensor of another rank", r"outside of every tensor of the call; of other ranks' memory only windows may be touched"),
    8: ("the flag of another rank", r"writes flag 0 of rank 0 in the window of rank \d; only rank 0 may"),
    9: ("a flag written by the scalar unit", r"a flag in a window is read and written by DataCopy"),
    10: ("a slot that nobody writes", r"DataCopy at \S*SOURCE.*reads 256 bytes of the window of rank \d at \d+ of which some"),
    11: ("two flags at once", r"takes bytes \[0, 64\) of the window of rank \d: its first 64 bytes are flags"),
}


def send(ranks: int, mistake: int = 0, *, seed: int = 1, calls: int = 1, absent: tuple[int, ...] = (), deadline: int = 0):
    """Every rank sends 64 integers to all; what each received after the last call, and whom its deadline named."""
    world = probes.twin.module().World(ranks, window_bytes=WINDOW, flag_kinds=1, seed=seed)
    kernel = probes.twin.module().bind("probe_peer", "ttttt" + "i" * 6, NAMES)
    windows = torch.tensor([world.window(rank) for rank in range(ranks)])
    x = [torch.arange(ITEMS, dtype=torch.int32) + 1000 * rank for rank in range(ranks)]
    y = [torch.zeros(ranks * ITEMS, dtype=torch.int32) for _ in range(ranks)]
    others = torch.tensor([x[0].data_ptr()])
    status = [torch.zeros(8, dtype=torch.int32) for _ in range(ranks)]
    for call in range(1, calls + 1):
        for rank in set(range(ranks)) - set(absent):
            kernel(windows, x[rank] + call, y[rank], status[rank], others, rank, ranks, mistake, call, WINDOW, deadline,
                   stream=world.stream(rank))  # fmt: skip
            y[rank].zero_()
        world.run()
    return x, y, status


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_receive_what_each_sent_for_any_seed_and_in_every_call(ranks):
    for seed in (1, 2, 3):
        x, y, _ = send(ranks, seed=seed, calls=3)
        for received in y:
            assert torch.equal(received, torch.cat([part + 3 for part in x]))


@pytest.mark.parametrize("which", MISTAKES, ids=lambda which: MISTAKES[which][0].replace(" ", "-"))
def test_a_mistake_between_ranks_is_reported(which):
    message = MISTAKES[which][1].replace("SOURCE", r"probe_peer\.asc:\d+")
    for seed in (1, 2, 3):
        with pytest.raises(BackendError, match=message):
            send(2, which, seed=seed)


def test_a_rank_that_was_never_launched_is_named():
    with pytest.raises(BackendError, match=r"rank 0 waits .* for flag 0 of rank 2 .* rank 2 was not launched"):
        send(3, absent=(2,))


def test_a_kernel_with_a_deadline_gives_up_and_says_for_whom_it_waited():
    _, _, status = send(3, absent=(1,), deadline=2 * SECOND)
    assert [int(one[0]) for one in status] == [2, 0, 2]


def test_a_world_works_on_after_a_report():
    with pytest.raises(BackendError):
        send(2, 3)
    x, y, _ = send(2)
    assert torch.equal(y[0], torch.cat([part + 1 for part in x]))


@pytest.mark.parametrize(
    ("ranks", "settings"), [(0, {}), (37, {}), (2, {"cores": 19}), (2, {"window_bytes": 32}), (2, {"window_bytes": 100})]
)
def test_a_world_that_the_model_cannot_hold_is_refused(ranks, settings):
    with pytest.raises(ValueError, match="world has 1 to 36 ranks|more than the 36|cannot hold"):
        probes.twin.module().World(ranks, **settings)
