"""The communicator contract: what a group of ranks can do together, and the group of one rank.

A communicator moves bytes; what the bytes mean, and in which order they are added, is said once, in the cards of the
communication group. A backend that implements these few methods with its vendor's library has all of those cards
through their references, and may then offer kernels of its own for them.

Nothing waits forever: whatever waits for another rank ends within `deadline_s`, with an error that names the ranks
that died, left or did not come.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from deepinfer_hal.errors import BadCall

DEADLINE_SECONDS = 30.0


@dataclass(frozen=True)
class World:
    """A group of ranks and where they meet.

    rank: this one, 0 .. size-1. host, port: the TCP store at which all meet, kept by a process that outlives the ranks;
    name: worlds that share a store differ in it, also when one follows another. deadline_s: how long a rank waits for
    another, when they open the world and in every call. address: of this rank, which the other ranks must reach.
    """

    rank: int
    size: int
    host: str = "127.0.0.1"
    port: int = 0
    name: str = "world"
    deadline_s: float = DEADLINE_SECONDS
    address: str = "127.0.0.1"

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise BadCall(f"a world of {self.size} ranks has no rank {self.rank}; ranks are 0 .. size-1 of at least one")
        if not self.deadline_s > 0:
            raise BadCall(f"deadline_s must be positive, got {self.deadline_s}")


class Communicator(abc.ABC):
    """What the references of the communication cards ask of a group of ranks.

    Every rank makes the same calls in the same order. Tensors are contiguous uint8 on the rank's device. `exchange` comes
    before each transfer: there ranks meet and are compared, so a transfer finds all of them. After an error other than
    CommunicatorMismatch the communicator is broken, and every later call raises.

    shares_devices: whether two ranks may use one device. in_process: ranks are threads of one process, not processes.
    """

    shares_devices: ClassVar[bool] = False
    in_process: ClassVar[bool] = False

    def __init__(self, world: World) -> None:
        self.world = world

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def world_size(self) -> int:
        return self.world.size

    @property
    def deadline_s(self) -> float:
        return self.world.deadline_s

    @classmethod
    @abc.abstractmethod
    def open(cls, world: World, device: torch.device) -> Communicator:
        """Joins the other ranks. CommunicatorTimeout names those that did not come."""

    @abc.abstractmethod
    def exchange(self, call: str, numbers: Sequence[int]) -> list[tuple[int, ...]]:
        """Meets all ranks and gives every rank's host integers, by rank; so it is a barrier too.

        call: the op with all that must be equal on every rank, as text. Raises CommunicatorMismatch on every rank if one
        differs, CommunicatorTimeout if a rank does not come.
        """

    @abc.abstractmethod
    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """x [n] of every rank -> out [world, n]; n is equal on all ranks and may be 0."""

    @abc.abstractmethod
    def all_to_all(
        self, x: torch.Tensor, send_bytes: Sequence[int], out: torch.Tensor, receive_bytes: Sequence[int]
    ) -> None:
        """Piece r of x, of send_bytes[r], goes to rank r; out is the pieces from rank 0, 1, ..., of receive_bytes each."""

    @abc.abstractmethod
    def broadcast(self, x: torch.Tensor, root: int) -> None:
        """x [n] of rank `root` replaces x of every rank."""

    @abc.abstractmethod
    def close(self) -> None:
        """Leaves the world; may be called twice. Others that still wait for this rank are told that it left."""

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class SingleRank(Communicator):
    """The group of one rank: nothing to wait for, and a transfer is a copy."""

    shares_devices = True

    def __init__(self, world: World | None = None) -> None:
        super().__init__(world or World(0, 1))
        if self.world.size != 1:
            raise BadCall(f"one rank cannot stand for a world of {self.world.size}")

    @classmethod
    def open(cls, world: World, device: torch.device) -> Communicator:
        return cls(world)

    def exchange(self, call: str, numbers: Sequence[int]) -> list[tuple[int, ...]]:
        return [tuple(numbers)]

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        out[0] = x

    def all_to_all(
        self, x: torch.Tensor, send_bytes: Sequence[int], out: torch.Tensor, receive_bytes: Sequence[int]
    ) -> None:
        out.copy_(x)

    def broadcast(self, x: torch.Tensor, root: int) -> None:
        pass

    def close(self) -> None:
        pass
