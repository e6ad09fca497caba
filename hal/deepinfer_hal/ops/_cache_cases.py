"""What the cases of the cache and attention cards share: random rows, poisoned stores, rope tables, request lists."""

from __future__ import annotations

import torch

from deepinfer_hal import row_layout
from deepinfer_hal.ops._common import dtype_of, normal, strided

POISON = 0xFF
"""A byte that makes NaN of a row in every format, so a read of an unused row shows."""


def values(g: torch.Generator, shape: tuple[int, ...], dtype: str = "f32", padding: int = 0) -> torch.Tensor:
    """Normal values; with padding > 0 a view of rows that are that much longer."""
    dense = normal(g, *shape, dtype=dtype_of(dtype))
    return strided(dense, padding) if padding else dense


def empty_cache(blocks: int, format: str, width: int, block_rows: int, gap: int = 0) -> torch.Tensor:
    """uint8 [blocks, block_bytes] full of POISON, `gap` bytes between blocks."""
    size = row_layout.block_bytes(format, width, block_rows)
    return torch.full((blocks, size + gap), POISON, dtype=torch.uint8)[:, :size]


def fill_rows(
    g: torch.Generator, cache: torch.Tensor, slots: torch.Tensor, format: str, width: int, block_rows: int
) -> None:
    """Random rows at the distinct valid slots, the rest stays poison."""
    slots = torch.unique(slots[slots >= 0])
    row_layout.write_rows(cache, slots, torch.randn(slots.shape[0], width, generator=g), format, block_rows)


def distinct_slots(g: torch.Generator, n: int, total: int, skip_every: int = 0) -> torch.Tensor:
    """int32 [n] distinct slots below `total`; every `skip_every`-th is -1."""
    slots = torch.randperm(total, generator=g)[:n].to(torch.int32)
    if skip_every:
        slots[skip_every - 1 :: skip_every] = -1
    return slots


def paged_cache(
    g: torch.Generator, lengths: list[int], format: str, width: int, params: dict
) -> tuple[torch.Tensor, torch.Tensor]:
    """(block_table int32 [R, Bmax], cache): the first lengths[r] rows of each request filled, blocks shuffled."""
    block_rows = params["block_rows"]
    per_request = max([-(-n // block_rows) for n in lengths] + [1])
    blocks = max(len(lengths), 1) * per_request
    table = torch.randperm(blocks, generator=g).to(torch.int32).reshape(-1, per_request)[: len(lengths)]
    cache = empty_cache(blocks, format, width, block_rows, gap=64)
    for r, n in enumerate(lengths):
        row = torch.arange(n)
        slots = table[r].long()[row // block_rows] * block_rows + row % block_rows
        fill_rows(g, cache, slots, format, width, block_rows)
    return table, cache


def rope_table(positions: int, rope_dim: int) -> torch.Tensor:
    """float32 [positions, rope_dim]: cosines, then sines, of no model's base: a kernel that computes angles itself shows."""
    frequency = 7321.0 ** (-torch.arange(0, rope_dim, 2) / rope_dim)
    angle = torch.arange(positions)[:, None] * frequency
    return torch.cat((angle.cos(), angle.sin()), dim=1).float()


def parse_requests(text: str) -> list[tuple[int, int]]:
    """"130+3,0+1" -> [(130, 3), (0, 1)]: first position and number of token rows of each request of a step."""
    return [tuple(int(n) for n in part.split("+")) for part in text.split(",") if part]


def token_rows(requests: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """int32 (positions [T], row_to_req [T], cu_q [R+1]) of a step's row list."""
    positions = [p for first, n in requests for p in range(first, first + n)]
    row_to_req = [r for r, (_, n) in enumerate(requests) for _ in range(n)]
    starts = [0]
    for _, n in requests:
        starts.append(starts[-1] + n)
    return ints(positions), ints(row_to_req), ints(starts)


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def on(device: torch.device | str, args: dict) -> dict:
    """The arguments on `device`; padded views stay padded views."""
    return {k: _move(v, device) if isinstance(v, torch.Tensor) else v for k, v in args.items()}


def _move(value: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    if torch.device(device) == value.device:
        return value
    if value.is_contiguous():
        return value.to(device)
    moved = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    return moved.copy_(value)
