"""Ranks on the twin: threads of one process, each with a modelled chip and a window that the others' kernels may touch.

`TwinRank` is the communicator of the twin. Ranks meet in memory (`meeting.py`); collectives are copies there. ep_dispatch and
ep_combine are AscendC kernels: each rank hands in its call, and the last to come runs all of them at the same time. A rank
that does not come is missed by the kernels of the others, whose deadline names it.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from deepinfer_hal.card import OpCard
from deepinfer_hal.communicator import Communicator, SingleRank, World
from deepinfer_hal.errors import BackendError, BadCall, CommunicatorError, CommunicatorTimeout, Unsupported
from deepinfer_hal.ops._communication import spell

from deepinfer_ascend import twin
from deepinfer_ascend.meeting import Meeting, join

WINDOW_BYTES = 1 << 23
FLAG_KINDS = 2
"""Of di_ranks.h: counts, rows."""

_OWN = dict.fromkeys(("windows", "status", "memory"), "t") | dict.fromkeys(
    ("rank", "ranks", "call", "tag", "deadline", "window"), "i"
)
"""What a kernel is given before the card's arguments."""
_CYCLES_PER_SECOND = 1_000_000_000
_WHAT = ("counts", "rows")


class TwinRank(Communicator):
    """One of several ranks; `open` joins those of this process that open the same world."""

    shares_devices = True
    in_process = True

    def __init__(self, world: World, meeting: Meeting) -> None:
        super().__init__(world)
        self._meeting = meeting

    @classmethod
    def open(cls, world: World, device: torch.device) -> Communicator:
        if world.size == 1:
            return SingleRank(world)
        meeting = join(world, lambda: _Chips(world.size))
        joined = cls(world, meeting)
        joined.exchange("open", ())
        return joined

    def exchange(self, call: str, numbers: Sequence[int]) -> list[tuple[int, ...]]:
        def collect(said: Mapping[int, tuple[int, ...]]) -> dict[int, list[tuple[int, ...]]]:
            everyone = [said[rank] for rank in range(self.world_size)]
            return dict.fromkeys(said, everyone)

        return self._meet(call, tuple(numbers), collect)

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        def copy(said: Mapping[int, Any]) -> dict[int, None]:
            for _, there in said.values():
                for rank, (mine, _) in said.items():
                    there[rank] = mine
            return dict.fromkeys(said)

        self._meet("all_gather", (x, out), copy)

    def all_to_all(self, x: torch.Tensor, send_bytes: Sequence[int], out: torch.Tensor, receive_bytes: Sequence[int]) -> None:
        def copy(said: Mapping[int, Any]) -> dict[int, None]:
            pieces = {rank: mine.split(list(sizes)) for rank, (mine, sizes, _) in said.items()}
            for rank, (_, _, there) in said.items():
                there.copy_(torch.cat([pieces[other][rank] for other in sorted(said)]))
            return dict.fromkeys(said)

        self._meet("all_to_all", (x, send_bytes, out), copy)

    def broadcast(self, x: torch.Tensor, root: int) -> None:
        def copy(said: Mapping[int, torch.Tensor]) -> dict[int, None]:
            for rank, there in said.items():
                if rank != root:
                    there.copy_(said[root])
            return dict.fromkeys(said)

        self._meet("broadcast", x, copy)

    def close(self) -> None:
        self._meeting.leave(self.rank, "has left")

    def _meet(self, call: str, said: Any, action: Callable[[Mapping[int, Any]], Mapping[int, Any]]) -> Any:
        return self._meeting.meet(self.rank, call, said, self.deadline_s, action)

    def run(self, kernel: Any, op: str, call: str, args: Mapping[str, Any]) -> None:
        """This rank's part of a kernel that all ranks run at the same time. Raises what its status says."""
        status = torch.zeros(8, dtype=torch.int32)
        own = _own(self, self._meeting.shared, call)
        launch = functools.partial(kernel, status=status, memory=None, **own, **args)
        self._meeting.meet(self.rank, call, launch, self.deadline_s, self._meeting.shared.run, partly=True)
        missing = _missing(status)
        if missing:
            told = self._meeting.give_up(self.rank, missing)
            what = f"{op}: the kernel of rank {self.rank} waited for the {_WHAT[int(status[3])]}, but {told}"
            raise CommunicatorTimeout(what, self._meeting.missed_by(self.rank))
        raise_status(op, status)


class _Chips:
    """The modelled chips of a world, and how many kernels they ran together."""

    def __init__(self, ranks: int) -> None:
        self.world = twin.module().World(ranks, window_bytes=WINDOW_BYTES, flag_kinds=FLAG_KINDS)
        self.ranks, self.window_bytes = ranks, WINDOW_BYTES
        self._calls = 0

    def window(self, rank: int) -> int:
        return self.world.window(rank)

    def run(self, launches: Mapping[int, Callable[..., None]]) -> dict[int, None]:
        """The kernels of the ranks that came."""
        self._calls += 1
        for rank, launch in sorted(launches.items()):
            launch(call=self._calls, stream=self.world.stream(rank))
        self.world.run()
        return dict.fromkeys(launches)


def _own(comm: Communicator, chips: Any, text: str) -> dict[str, Any]:
    return {
        "windows": torch.tensor([chips.window(rank) for rank in range(chips.ranks)]),
        "rank": comm.rank,
        "ranks": comm.world_size,
        "tag": zlib.crc32(text.encode()) & 0x7FFFFFFF,
        "deadline": int(comm.deadline_s * _CYCLES_PER_SECOND),
        "window": chips.window_bytes,
    }


class _Alone:
    """The window of a rank without others: plain memory, for no flag is needed."""

    ranks, window_bytes = 1, WINDOW_BYTES

    def __init__(self) -> None:
        self.memory = torch.zeros(WINDOW_BYTES, dtype=torch.uint8)

    def window(self, rank: int) -> int:
        return self.memory.data_ptr()


@functools.cache
def _alone() -> _Alone:
    return _Alone()


def bind(card: OpCard) -> Callable[..., None]:
    """ep_dispatch or ep_combine as a callable that takes the card's arguments; `stream=` where there is one rank."""
    names = [name for name in card.arg_names if name != "comm"]
    kinds = _OWN | {arg.name: twin.kind(arg) for arg in card.signature if arg.name != "comm"}
    kernel = twin.module().bind(card.name, "".join(kinds.values()), list(kinds))

    def call(*values: Any, stream: Any = None, **named: Any) -> None:
        args = card.bind_args(values, named)
        comm = args.pop("comm")
        text = _text(card.name, args)
        given = {name: args[name] for name in names}
        if isinstance(comm, TwinRank):
            return comm.run(kernel, card.name, text, given)
        if comm.world_size != 1:
            raise BadCall(f"{card.name}: comm is a {type(comm).__name__}, which has no windows on the twin; open a TwinRank")
        status, alone = torch.zeros(8, dtype=torch.int32), _alone()
        given |= {"stream": stream} if stream else {}
        kernel(status=status, memory=alone.memory, call=1, **_own(comm, alone, text), **given)
        raise_status(card.name, status)

    return call


def _text(op: str, args: Mapping[str, Any]) -> str:
    """A call with all that must be equal on every rank, as the reference spells it."""
    if op == "ep_combine":
        return f"ep_combine({spell(args['rows'], rows=False)})"
    weighed = "yes" if args["weights"] is not None else "no"
    x, k = spell(args["x"], rows=False), args["ids"].shape[1]
    return f"ep_dispatch({x}, k={k}, experts={args['experts']}, weights={weighed})"


def _missing(status: torch.Tensor) -> list[int]:
    code, low, high = (int(word) for word in status[:3])
    mask = (low & 0xFFFFFFFF) | (high & 0xFFFFFFFF) << 32
    return [rank for rank in range(64) if mask >> rank & 1] if code == 1 else []


def raise_status(op: str, status: torch.Tensor) -> None:
    """The error that a kernel's status words (RankStatus of di_ranks.h) stand for, or nothing."""
    code, a, b, c, d = (int(word) for word in status[:5])
    if code == 0:
        return
    if code == 1:
        missing = _missing(status)
        raise CommunicatorTimeout(f"{op}: no {_WHAT[c]} came from {_names(missing)} within the deadline", tuple(missing))
    if code == 2:
        raise CommunicatorError(f"{op}: other ranks are in another call")
    if code == 3:
        raise BadCall(f"{op}: rank {a} is sent {b} rows, but its out has room for {c}")
    if code == 4:
        raise Unsupported(f"{op}: rank {a} is sent {b} rows, but a window has room for {c}")
    if code == 5:
        raise BadCall(f"{op}: choice {b} of token {a} went to row {d} of rank {c}, but it did not come back")
    if code == 6:
        raise BadCall(f"{op}: row {b} of rank {a} names a source that is no rank")
    raise BackendError(f"{op}: the kernel's status is {code}, which means nothing here")


def _names(ranks: Sequence[int]) -> str:
    return ", ".join(f"rank {rank}" for rank in ranks)
