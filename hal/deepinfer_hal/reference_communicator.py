"""The reference communicator: torch.distributed moves the bytes, a TCP store lets ranks meet and tells who is missing.

`ReferenceCommunicator.open` makes a gloo group and stages other devices' tensors through the host, so it serves any
torch device. A vendor's process group serves as well: a subclass makes it, and names the device that it moves.

Before each transfer all ranks meet at the store (`exchange`), so a rank that is late, dead or in another call is named
before anything moves. A rank that dies later breaks the transfer, and its silent heart names it.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from deepinfer_hal.communicator import Communicator, SingleRank, World
from deepinfer_hal.errors import CommunicatorError, CommunicatorMismatch, CommunicatorTimeout
from deepinfer_hal.heartbeat import Hearts

_LONGEST_POLL_SECONDS = 0.02


def serve_store(host: str = "127.0.0.1", port: int = 0) -> dist.TCPStore:
    """The store at which ranks meet, at `.port` (chosen freely if 0); keep it for as long as there are ranks.

    Whoever reaches the port can write to the store: serve it on an address that only the ranks reach.
    """
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False)


class ReferenceCommunicator(Communicator):
    """See the module docstring.

    world: of two ranks or more. store: a connection of this rank alone, in which no other world has keys. group: a process
    group of all ranks in the world's order. hearts: started. carrier: the device whose tensors the group moves.
    """

    shares_devices = True

    def __init__(self, world: World, store: dist.Store, group: Any, hearts: Hearts, carrier: torch.device) -> None:
        super().__init__(world)
        self._store, self._group, self._hearts, self._carrier = store, group, hearts, carrier
        self._calls, self._call = 0, ""
        self._broken = ""

    @classmethod
    def open(cls, world: World, device: torch.device) -> Communicator:
        """Joins the world at its store. One rank alone needs neither store nor torch.distributed."""
        if world.size == 1:
            return SingleRank(world)
        store, watched = (dist.PrefixStore(world.name, _connect(world, use)) for use in ("calls", "hearts"))
        hearts = Hearts(watched, world.rank, world.size, world.deadline_s)
        joined = cls(world, store, None, hearts, cls._carrier_of(device))
        hearts.start()
        joined.exchange("open", ())
        with joined._transfer():
            joined._group = cls._process_group(store, world)
        return joined

    @classmethod
    def _carrier_of(cls, device: torch.device) -> torch.device:
        """The device whose tensors the group moves: the host, or a vendor's own for its group."""
        return torch.device("cpu")

    @classmethod
    def _process_group(cls, store: dist.Store, world: World) -> Any:
        """The group that moves the bytes; a vendor's communicator makes its own here."""
        return _gloo(dist.PrefixStore("gloo", store), world)

    # -- meeting

    def begin(self, call: str) -> None:
        """Says what this rank does next, for a kernel that meets other ranks by itself. CommunicatorError if it is broken."""
        if self._broken:
            raise CommunicatorError(f"{call}: this communicator of rank {self.rank} is broken since {self._broken}")
        self._call = call
        self._hearts.note(call)

    def give_up(self, call: str, missing: Sequence[int]) -> NoReturn:
        """Raises the CommunicatorTimeout of a kernel that missed ranks in a call, with what is known of them."""
        self._call = call
        self._give_up(self._reasons(missing))

    def exchange(self, call: str, numbers: Sequence[int]) -> list[tuple[int, ...]]:
        self.begin(call)
        self._calls += 1
        self._call = f"{call} (call {self._calls})"
        self._hearts.note(self._call)
        deadline = time.monotonic() + self.deadline_s
        with self._store_errors():
            self._store.set(self._key(self.rank), json.dumps([call, list(numbers)]))
            self._wait_for_all(deadline)
            answers = [json.loads(text) for text in self._store.multi_get([self._key(r) for r in range(self.world_size)])]
            if self._calls > 1:  # all have read what was said one call ago, or they would not be here
                self._store.delete_key(self._key(self.rank, self._calls - 1))
        self._compare([one[0] for one in answers])
        return [tuple(one[1]) for one in answers]

    def _key(self, rank: int, call: int | None = None) -> str:
        return f"call/{call or self._calls}/{rank}"

    def _wait_for_all(self, deadline: float) -> None:
        """Returns when every rank has come to this call. CommunicatorTimeout as soon as one cannot, or at the deadline."""
        waiting, pause = [rank for rank in range(self.world_size) if rank != self.rank], 0.0005
        while True:
            passed = time.monotonic() > deadline
            gone = {rank: why for rank in waiting if (why := self._hearts.gone(rank))}  # before the keys: it may have come first
            waiting = [rank for rank in waiting if not self._store.check([self._key(rank)])]
            if not waiting:
                return
            gone = {rank: why for rank, why in gone.items() if rank in waiting}
            if gone or passed:
                self._give_up(gone if gone and not passed else self._reasons(waiting))
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL_SECONDS)

    def _reasons(self, missing: Sequence[int]) -> dict[int, str]:
        def reason(rank: int) -> str:
            doing, limit = self._hearts.doing(rank), f"within {self.deadline_s:g} s"
            return f"did not join {limit}" if doing is None else f"is alive but did not come {limit} (last seen in {doing})"

        return {rank: self._hearts.gone(rank) or reason(rank) for rank in missing}

    def _give_up(self, missing: dict[int, str], cause: BaseException | None = None) -> NoReturn:
        """Takes this rank out of the world, so that nobody waits for it, and raises.

        A rank that left because it missed another is not at fault: the one that it missed is.
        """
        for rank in list(missing):
            for other in self._hearts.lost(rank):
                missing.pop(rank, None)
                missing.setdefault(other, f"was missed by rank {rank}")
        told = "; ".join(f"rank {rank} {why}" for rank, why in missing.items())
        message = f"{self._call}: rank {self.rank} of {self.world_size} waited, but {told}"
        self._break(message, tuple(missing))
        with contextlib.suppress(RuntimeError):
            self._store.delete_key(self._key(self.rank))
        raise CommunicatorTimeout(message, tuple(sorted(missing))) from cause

    def _break(self, message: str, lost: tuple[int, ...] = ()) -> None:
        self._broken = message
        self._hearts.stop(message, lost)

    def _compare(self, calls: list[str]) -> None:
        if len(set(calls)) == 1:
            return
        usual = Counter(calls).most_common(1)[0][0]
        others = tuple(rank for rank, call in enumerate(calls) if call != usual)
        told = "; ".join(f"rank {rank} called {call}" for rank, call in enumerate(calls))
        raise CommunicatorMismatch(f"ranks must make the same call, but in call {self._calls} {told}", others)

    # -- moving bytes

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        if x.numel() == 0:
            return
        there = self._carry(out)
        self._move(lambda: self._group.allgather([list(there.unbind(0))], [self._carry(x)]))
        self._bring(there, out)

    def all_to_all(
        self, x: torch.Tensor, send_bytes: Sequence[int], out: torch.Tensor, receive_bytes: Sequence[int]
    ) -> None:
        there = self._carry(out)
        self._move(lambda: self._group.alltoall_base(there, self._carry(x), list(receive_bytes), list(send_bytes)))
        self._bring(there, out)

    def broadcast(self, x: torch.Tensor, root: int) -> None:
        if x.numel() == 0:
            return
        there, options = self._carry(x), dist.BroadcastOptions()
        options.rootRank = root
        self._move(lambda: self._group.broadcast([there], options))
        if self.rank != root:
            self._bring(there, x)

    def _carry(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.device.type == self._carrier.type else x.to(self._carrier)

    def _bring(self, there: torch.Tensor, out: torch.Tensor) -> None:
        if there.data_ptr() != out.data_ptr():
            out.copy_(there)

    def _move(self, start: Callable[[], Any]) -> None:
        with self._transfer():
            start().wait(timedelta(seconds=self.deadline_s))

    @contextlib.contextmanager
    def _transfer(self) -> Iterator[None]:
        """Turns the transport's error into one that names ranks, once a heart tells which, or at the deadline."""
        deadline = time.monotonic() + self.deadline_s
        try:
            yield
        except RuntimeError as error:
            others = [rank for rank in range(self.world_size) if rank != self.rank]
            while not (gone := {rank: why for rank in others if (why := self._hearts.gone(rank))}):
                if time.monotonic() > deadline:
                    message = f"{self._call}: the transfer failed though every rank is alive: {error}"
                    self._break(message)
                    raise CommunicatorTimeout(message) from error
                time.sleep(_LONGEST_POLL_SECONDS)
            self._give_up(gone, error)

    # -- the end

    @contextlib.contextmanager
    def _store_errors(self) -> Iterator[None]:
        try:
            yield
        except CommunicatorError:
            raise
        except RuntimeError as error:
            where = f"{self.world.host}:{self.world.port}"
            message = f"{self._call}: the store at {where} is gone, or the process that kept it: {error}"
            for use in ("calls", "hearts"):
                _connections.pop((self.world.host, self.world.port, use), None)
            self._break(message)
            raise CommunicatorError(message) from error

    def close(self) -> None:
        if not self._broken:
            self._break("it was closed")
        self._group = None


_connections: dict[tuple[str, int, str], dist.TCPStore] = {}
"""Kept for the next world of this process: opening one looks up names, which takes seconds where a name server is slow."""


def _connect(world: World, use: str) -> dist.TCPStore:
    """This process's connection to the world's store for one use. CommunicatorError if nothing answers there."""
    key = (world.host, world.port, use)
    if key not in _connections:
        limit = timedelta(seconds=world.deadline_s)
        try:
            _connections[key] = dist.TCPStore(world.host, world.port, is_master=False, timeout=limit, wait_for_workers=False)
        except RuntimeError as error:
            raise CommunicatorError(
                f"rank {world.rank} finds no store at {world.host}:{world.port} within {world.deadline_s:g} s; the process that "
                f"starts the ranks must serve it: {error}"
            ) from error
    return _connections[key]


def connect_to_store(world: World) -> None:
    """Opens this process's connections ahead of time, so that `open` need not."""
    for use in ("calls", "hearts"):
        _connect(world, use)


def _gloo(store: dist.Store, world: World) -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=world.deadline_s)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=world.address)]
    return dist.ProcessGroupGloo(store, world.rank, world.size, options)
