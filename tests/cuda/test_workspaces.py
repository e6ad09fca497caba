"""Which workspace a call gets: that of its stream, or memory of its graph's own, since a graph may run on any stream."""

from __future__ import annotations

import threading
import time
import weakref

import pytest
import torch
from deepinfer_cuda import native
from deepinfer_cuda.workspaces import Workspaces
from deepinfer_hal.errors import BackendError

CPU = torch.device("cpu")


class Captures(dict):
    """By stream: the number of the capture it is in."""

    def __call__(self, stream: int) -> int:
        return self.get(stream, 0)


@pytest.fixture
def captures():
    return Captures()


@pytest.fixture
def rooms(captures):
    return Workspaces(CPU, 4096, captures)


def test_a_stream_keeps_its_workspace_and_shares_it_with_no_other(rooms):
    first, second = rooms(8), rooms(16)
    assert first[1] == second[1] == 4096 and first[0] != second[0]
    assert rooms(8) == first and rooms(16) == second and rooms(None) not in (first, second)


def test_threads_that_ask_first_at_once_get_the_one_that_is_kept(captures):
    met = threading.Barrier(2)

    class Slow(Workspaces):
        def _room(self, stream):
            room = super()._room(stream)
            met.wait(10)  # both have made one
            return room

    rooms, got = Slow(CPU, 4096, captures), []
    threads = [threading.Thread(target=lambda: got.append(rooms(8))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got[0] == got[1] == rooms(8)


def test_a_captured_call_does_not_get_the_workspace_of_its_stream(rooms, captures):
    eager = rooms(8)
    captures[8] = 3
    captured = rooms(8)
    assert captured[0] != eager[0] and captured[1] == eager[1] == 4096
    captures[8] = 0
    assert rooms(8) == eager


def test_a_stream_that_was_captured_first_has_a_workspace_of_its_own_afterwards(rooms, captures):
    captures[8] = 3
    rooms(8)
    captures[8] = 0
    assert rooms(8) == rooms(8) and rooms(8)[0] != rooms(16)[0]


def test_nothing_of_a_captures_memory_is_kept(captures, monkeypatch):
    """What is kept of a pool whose graphs are gone would stop torch from capturing into it again."""
    given, empty = [], torch.empty

    def noted(*size, **known):
        made = empty(*size, **known)
        given.append(weakref.ref(made))
        return made

    monkeypatch.setattr(torch, "empty", noted)
    rooms = Workspaces(CPU, 4096, captures)
    rooms(8)
    captures.update({8: 3, 16: 3})
    rooms(8), rooms(16), rooms(8)
    assert [one() is None for one in given] == [False, True, True, True]


def test_no_memory_for_a_workspace_is_said_with_its_size(captures, monkeypatch):
    def refuse(*size, **known):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 256.00 MiB.\nGPU 0 has ...")

    rooms = Workspaces(CPU, 256 << 20, captures)
    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(BackendError, match="no 256 MiB left for the kernels' workspace on stream 0x8.*CUDA out of memory"):
        rooms(8)
    monkeypatch.undo()
    assert rooms(8)[1] == 256 << 20  # what was refused once is asked for again


def test_calls_of_two_threads_take_turns_whoever_asked_for_the_kernels():
    device, inside, most = torch.device("cuda", 0), [], []

    def fn(*args):
        inside.append(args)
        time.sleep(0.002)
        most.append(len(inside))
        inside.pop()

    calls = [native._one_by_one(native._calling(device), fn) for _ in range(2)]
    threads = [threading.Thread(target=lambda call=call: [call() for _ in range(5)]) for call in calls]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert most == [1] * 10 and native._calling(device) is not native._calling(torch.device("cuda", 1))
