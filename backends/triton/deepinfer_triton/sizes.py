"""Sizes of tiles and grids on the host. Triton's functions of these names serve kernels too, for which they unwrap constants:
several microseconds a call."""

from __future__ import annotations


def cdiv(count: int, size: int) -> int:
    """Pieces of `size` that cover `count`."""
    return -(-count // size)


def next_power_of_2(count: int) -> int:
    """The least power of two that is `count` or more; 0 for 0."""
    return 1 << (count - 1).bit_length() if count > 0 else 0
