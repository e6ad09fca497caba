"""What sequences hold while they run: paged cache blocks and state slots."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Pool:
    """Ids 0 .. size - 1, handed out lowest first at the start and most recently freed first later."""

    def __init__(self, size: int, what: str) -> None:
        self.size, self._what = size, what
        self._free = list(range(size - 1, -1, -1))
        self._taken = bytearray(size)

    @property
    def available(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """`count` ids. Asking for more than `available` is the caller's mistake and a RuntimeError."""
        if count > len(self._free):
            raise RuntimeError(f"{count} {self._what} asked of {len(self._free)} free ones")
        ids = [self._free.pop() for _ in range(count)]
        for i in ids:
            self._taken[i] = 1
        return ids

    def free(self, ids: Iterable[int]) -> None:
        """Returns ids; one that is not taken is a RuntimeError."""
        for i in ids:
            if not self._taken[i]:
                raise RuntimeError(f"{self._what} {i} was freed twice")
            self._taken[i] = 0
            self._free.append(i)

    def check(self, held: Iterable[Sequence[int]]) -> None:
        """RuntimeError unless every id is free or in exactly one of `held`, and nowhere twice."""
        everything = sorted([*self._free, *(i for ids in held for i in ids)])
        if everything != list(range(self.size)):
            raise RuntimeError(f"{self._what}: {len(everything)} accounted for of {self.size}, or one counted twice")


class BlockPool(Pool):
    """Paged cache blocks of `block_tokens` tokens each; block 0 is a block like any other."""

    def __init__(self, num_blocks: int, block_tokens: int = 128) -> None:
        super().__init__(num_blocks, "blocks")
        self.block_tokens = block_tokens

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_tokens)


class SlotPool(Pool):
    """State slots: window rings, carries and a row of the token history, one per running sequence."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots, "slots")
