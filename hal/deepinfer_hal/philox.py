"""The one random number generator: Philox4x32-10, counter-based, so that a draw is a pure function of what it is for.

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). The key is a 64-bit
seed. The counter is (absolute position of the token to be produced, purpose, token id / 4, 0); word `token id % 4` of
the block belongs to that id. u = ((word >> 8) + 0.5) * 2^-24 lies strictly between 0 and 1; Gumbel noise is
-log(-log(u)).
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

SAMPLE, ACCEPT, RESIDUAL = 0, 1, 2
"""Purposes: noise of a sampled token (target and draft alike), of accepting a draft, of the token after a rejection."""

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_HALF = 1 << 23


def philox4x32(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> tuple[Any, Any, Any, Any]:
    """Ten rounds over broadcastable int64 arrays, all torch or all numpy, that hold 32-bit words (0 .. 2^32 - 1).

    The 64-bit product wraps in int64; masking after the shift gives its upper word all the same.
    """
    for step in range(10):
        if step:
            k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        high0, high1 = (p0 >> 32) & _MASK, (p1 >> 32) & _MASK
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, p1 & _MASK, high0 ^ c3 ^ k1, p0 & _MASK
    return c0, c1, c2, c3


def uniform_at(seeds: torch.Tensor, positions: torch.Tensor, purpose: int, ids: torch.Tensor) -> torch.Tensor:
    """float32 u of one token id each: seeds i64, positions and ids integers, all of one shape; u stays below 1."""
    seeds, positions, ids = torch.broadcast_tensors(seeds.long(), positions.long(), ids.long())
    words = torch.stack(_blocks(seeds, positions, purpose, ids >> 2), dim=-1)
    top = words.gather(-1, (ids & 3)[..., None])[..., 0] >> 8
    return ((top.float() + 0.5) * 2.0**-24).clamp(max=1 - 2.0**-24)


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, purpose: int, vocab: int) -> torch.Tensor:
    """float32 [..., vocab] Gumbel noise of every token id; seeds i64 [...] (64-bit pattern), positions [...]."""
    group = torch.arange(-(-vocab // 4), dtype=torch.int64, device=seeds.device)
    words = torch.stack(_blocks(seeds.long()[..., None], positions.long()[..., None], purpose, group), dim=-1)
    return gumbel(words.flatten(-2)[..., :vocab])


def gumbel(words: torch.Tensor) -> torch.Tensor:
    """float32 -log(-log(u)) of 32-bit words.

    Above one half u needs 25 bits, one more than float32 has, but 1 - u does not: log1p keeps the largest noise finite.
    """
    top = words >> 8
    upper = top >= _HALF
    distance = (torch.where(upper, 2 * _HALF - 1 - top, top).float() + 0.5) * 2.0**-24
    negative_log = -torch.where(upper, torch.log1p(-distance), torch.log(distance))
    return -torch.log(negative_log)


def choice_seed(seed: int, index: int) -> int:
    """Seed (unsigned 64 bits) of choice `index` of n > 1: 8 bytes of SHA-256 over both as little-endian u64."""
    payload = (seed & (2**64 - 1)).to_bytes(8, "little") + index.to_bytes(8, "little")
    return int.from_bytes(hashlib.sha256(payload).digest()[:8], "little")


def signed_seed(seed: int) -> int:
    """The same 64 bits as an int64, which is how seeds travel in tensors."""
    seed &= 2**64 - 1
    return seed - 2**64 if seed >= 2**63 else seed


def _blocks(seeds: torch.Tensor, positions: torch.Tensor, purpose: int, group: torch.Tensor):
    zero = torch.zeros_like(group)
    return philox4x32(positions & _MASK, zero + purpose, group, zero, seeds & _MASK, (seeds >> 32) & _MASK)
