"""Windows: memory of every rank that all ranks may touch, through which ep_dispatch and ep_combine go.

On the way out rows are pulled: a rank copies its tokens into its own window and raises a flag in the windows of all others;
whoever has seen all flags reads tokens where they lie. On the way back rows are pushed, since their places are known. Ids, counts
and flags are pushed, since all ranks need them. A window has two halves, used in turn: who has seen the flags of call n + 1 knows
that nobody still reads what was written for call n, so call n + 2 may write there. A call that fails on one rank for want of room
fails on all of them, since all decide from the same numbers.

Layout in bytes: flags, one word a rank; headers, `HEADER_WORDS` words for each half and rank (tag of the call, and two numbers);
ids, `IDS_ROOM` words for each half and rank; then two halves of rows.
"""

from __future__ import annotations

import abc
import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from deepinfer_hal.communicator import Communicator
from deepinfer_hal.errors import BackendError, BadCall, CommunicatorError, Unsupported

MOST_RANKS = 64
HEADER_WORDS = 8
HEADERS_AT = 4 * MOST_RANKS
IDS_AT = HEADERS_AT + 2 * MOST_RANKS * HEADER_WORDS * 4
IDS_ROOM = 1 << 15
"""(token, choice) pairs that a rank may send in one call."""

STATE_WORDS = 8
"""Of a rank's own state: number of the last call; 1 once a rank was missed; status of the last call and its four numbers."""

OK, MISSING, MISMATCH, NO_ROOM, NO_WINDOW_ROOM, NOT_BACK = range(6)


def window_layout(nbytes: int, ranks: int) -> tuple[int, int]:
    """Where rows begin in a window of nbytes, and the bytes of each half. BadCall if it has no room for rows."""
    first = IDS_AT + 2 * ranks * IDS_ROOM * 4
    half = (nbytes - first) // 2 // 256 * 256
    if half < 256 or ranks > MOST_RANKS:
        raise BadCall(f"a window of {nbytes} bytes has no room for the rows of {ranks} ranks; at most {MOST_RANKS} share one")
    return first, half


Read = Callable[[torch.Tensor], Callable[[], list[int]]]
"""Called where the stream has come to: gives what waits for the integers that a device tensor has there, but not for ever."""


class Windows:
    """The windows of a world, as one rank reaches them.

    addresses: of every rank's window of nbytes, by rank; they are zero until all ranks have made this. device: whose kernels
    use them. read: see `Read`.
    """

    def __init__(self, rank: int, addresses: Sequence[int], nbytes: int, device: torch.device, read: Read) -> None:
        self.rank, self.ranks, self._read = rank, len(addresses), read
        self.rows_at, self.half = window_layout(nbytes, self.ranks) if self.ranks > 1 else (0, 0)
        self.bases = torch.tensor(list(addresses), dtype=torch.int64, device=device)
        self.state = torch.zeros(STATE_WORDS, dtype=torch.int32, device=device)

    def places(self) -> dict[str, int]:
        """The constants of a kernel that uses the windows."""
        return {"W": self.ranks, "ROWS_AT": self.rows_at, "HALF": self.half}

    def meeting(self, comm: Communicator, op: str, call: str) -> Callable[[], None]:
        """Called after a meeting's kernel: gives what waits for its status and raises what it ended in. So the kernels after it,
        which write nothing if it failed, may be started before the wait. Where the stream is being captured, or calls are
        recorded on meta tensors, nothing is known yet, and nothing is raised."""
        if self.state.is_meta or (self.state.is_cuda and torch.cuda.is_current_stream_capturing()):
            return lambda: None
        status = self._read(self.state)
        return lambda: self._settle(comm, op, call, status())

    def _settle(self, comm: Communicator, op: str, call: str, status: Sequence[int]) -> None:
        _, _, code, a, b, c, d, _ = status
        if code == MISSING:
            missing = [rank for rank in range(self.ranks) if ((b & 0xFFFFFFFF) << 32 | (a & 0xFFFFFFFF)) >> rank & 1]
            comm.give_up(call, missing)
        if code == MISMATCH:
            comm.exchange(call, ())  # compares the texts, and names who is in another call
            raise CommunicatorError(f"{op}: ranks are in calls that differ in what only their tags tell")
        if code == NO_ROOM:
            raise BadCall(f"{op}: rank {a} is sent {b} rows, but its out has room for {c}")
        if code == NO_WINDOW_ROOM:
            raise Unsupported(f"{op}: rank {a} needs room for {b} rows in its window, which has room for {c}")
        if code == NOT_BACK:
            raise BadCall(f"{op}: choice {b} of token {a} went to row {d} of rank {c}, but it did not come back")
        if code != OK:
            raise BackendError(f"{op}: the status of the meeting is {code}, which means nothing here")


def nanoseconds(comm: Communicator) -> int:
    """The world's deadline, as a meeting counts it."""
    return int(comm.deadline_s * 1_000_000_000)


def tag(call: str) -> int:
    """A call's text as a word that is equal on all ranks."""
    return zlib.crc32(call.encode()) & 0x7FFFFFFF


def windows_of(comm: Communicator, device: torch.device, call: str) -> Windows:
    """The windows of a communicator, for a call that begins. Unsupported, with its reason, if its ranks cannot reach each other's
    memory; CommunicatorError if it is broken."""
    if comm.world_size == 1:
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        return _alone(device, stream)
    found: Any = getattr(comm, "windows", f"a {type(comm).__name__} opens none")
    if hasattr(comm, "begin"):
        comm.begin(call)
    if not isinstance(found, Windows):
        raise Unsupported(f"ep_dispatch and ep_combine need windows into the memory of all ranks: {found}")
    return found


@functools.cache
def _alone(device: torch.device, stream: int) -> Windows:
    """The state of one rank on one stream; it has no window, since nobody else reads its rows."""
    return Windows(0, [0], 0, device, lambda state: state.tolist)


class SharedMemory(abc.ABC):
    """Memory of a device that other ranks' processes can map."""

    @abc.abstractmethod
    def make(self, nbytes: int) -> tuple[int, tuple[int, ...]]:
        """Zeroed memory of this rank: its address, and integers by which others find it. OSError if there is none to be had."""

    @abc.abstractmethod
    def map(self, handle: tuple[int, ...]) -> int:
        """Address at which this rank sees another's memory. OSError with the reason if it cannot."""

    @abc.abstractmethod
    def close(self) -> None:
        """Unmaps what was mapped, once nothing of this rank uses it; may be called twice."""

    @abc.abstractmethod
    def keep(self) -> None:
        """The world ended with no rank missed: what was made may serve this process's next world."""


def open_windows(
    comm: Any, memory: SharedMemory, nbytes: int, device: torch.device, read: Read
) -> Windows | str:
    """The windows of a communicator's ranks, of nbytes each, or why there are none; all ranks get the same answer in kind."""
    found, why, handle = [], "", ()
    try:
        address, handle = memory.make(nbytes)
    except OSError as error:
        why = f"rank {comm.rank} cannot make a window of {nbytes} bytes: {error}"
    for rank, other in enumerate(comm.exchange(f"show windows of {nbytes} bytes", handle)):
        try:
            if not other:
                raise OSError("it has no window")
            found.append(address if rank == comm.rank else memory.map(other))
        except OSError as error:
            why = why or f"rank {comm.rank} cannot reach the memory of rank {rank}: {error}"
    windows = None if why else Windows(comm.rank, found, nbytes, device, read)
    refused = [rank for rank, (reached,) in enumerate(comm.exchange("reach windows", (int(not why),))) if not reached]
    return why or (f"ranks {refused} cannot reach the memory of others" if refused else windows)
