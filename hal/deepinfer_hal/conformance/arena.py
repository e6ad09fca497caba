"""Arguments in guarded memory: each storage lies between sentinels, gaps between rows are sentinels too.

Tensors that share a storage go on sharing it, at the same distances, so aliases and views stay what they were. What a
kernel did is read back as one host image per storage, of which the arguments are views again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

GUARD_BYTES = 512
"""On each side of a storage; a multiple of every alignment that the HAL promises."""

SENTINEL = 0xFF
"""Reads as NaN in every float format, and as the padding index -1."""


def bits(x: torch.Tensor) -> torch.Tensor:
    """x as integers of the same width, so that NaN equals itself and -0 differs from 0."""
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return x if x.dtype == torch.bool else x.contiguous().view(width)


@dataclass(frozen=True)
class Layout:
    """Where a tensor lies in an arena: bytes from the storage's start, and strides in elements."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def view(self, storage: torch.Tensor) -> torch.Tensor:
        """The tensor over `storage`, uint8 [nbytes]."""
        size = self.dtype.itemsize
        room = storage[self.offset : self.offset + (storage.shape[0] - self.offset) // size * size]
        return room.view(self.dtype).as_strided(self.shape, self.stride, room.storage_offset() // size)

    def inside(self, nbytes: int) -> torch.Tensor:
        """bool [nbytes]: the bytes that belong to elements."""
        size = self.dtype.itemsize
        marks = torch.zeros(self.offset + (nbytes - self.offset) // size * size, dtype=torch.uint8)
        elements = marks[self.offset :].view(-1, size)
        elements[:, 0].as_strided(self.shape, [s * size for s in self.stride], self.offset).fill_(1)
        elements[:] = elements[:, :1]
        return torch.nn.functional.pad(marks, (0, nbytes - marks.shape[0])).bool()


@dataclass
class Arena:
    """One storage: `image` is its host content with guards before the run, `buffer` the device memory."""

    image: torch.Tensor
    buffer: torch.Tensor
    nbytes: int
    guard: int
    layouts: dict[str, Layout] = field(default_factory=dict)

    def body(self, whole: torch.Tensor) -> torch.Tensor:
        return whole[self.guard : self.guard + self.nbytes]


@dataclass
class Placed:
    """Arguments on a device, and the arenas they lie in."""

    args: dict[str, Any]
    arenas: list[Arena]

    def twin(self) -> Placed:
        """The same content in other memory of the device; weights and host scalars are shared."""
        args, arenas = dict(self.args), [replace(arena, buffer=arena.buffer.clone()) for arena in self.arenas]
        for arena in arenas:
            args |= {name: layout.view(arena.body(arena.buffer)) for name, layout in arena.layouts.items()}
        return Placed(args, arenas)

    def snapshot(self) -> list[torch.Tensor]:
        """All memory as it was before any run, on the device, so that `reset` need not cross over from the host."""
        return [arena.image.to(arena.buffer.device) for arena in self.arenas]

    def reset(self, images: list[torch.Tensor] | None = None) -> None:
        """All memory as it was before any run, or as in `images`, a snapshot."""
        for arena, image in zip(self.arenas, images or [arena.image for arena in self.arenas], strict=True):
            arena.buffer.copy_(image)

    def read(self) -> tuple[dict[str, Any], list[torch.Tensor]]:
        """Host copies: the arguments as views, and each arena's bytes. Host scalars and weights pass through."""
        values, images = dict(self.args), []
        for arena in self.arenas:
            image = arena.buffer.cpu() if arena.buffer.device.type != "cpu" else arena.buffer.clone()
            images.append(image)
            for name, layout in arena.layouts.items():
                values[name] = layout.view(arena.body(image))
        return values, images

    def damaged(self, images: list[torch.Tensor]) -> str | None:
        """Names the argument whose surroundings changed, and where; None if all sentinels stand."""
        for arena, image in zip(self.arenas, images, strict=True):
            changed = image != arena.image
            if not bool(changed.any()):
                continue
            for layout in arena.layouts.values():
                arena.body(changed)[layout.inside(arena.nbytes)] = False
            if bool(changed.any()):
                where = int(changed.nonzero()[0]) - arena.guard
                place = "before" if where < 0 else "after" if where >= arena.nbytes else "between the rows of"
                distance = -where if where < 0 else where - arena.nbytes + 1 if where >= arena.nbytes else where
                return f"a byte {place} {' / '.join(arena.layouts)} was written ({distance} bytes in)"
        return None


def place(
    args: Mapping[str, Any],
    device: torch.device | str = "cpu",
    *,
    guard: int = GUARD_BYTES,
    gaps: Mapping[str, int] | None = None,
) -> Placed:
    """Copies of the host tensors of `args` on `device`; other values pass through.

    gaps: argument -> elements to leave between its rows (an argument with a storage of its own only).
    """
    placed = Placed(dict(args), [])
    for names in _by_storage(args).values():
        gap = (gaps or {}).get(names[0], 0) if len(names) == 1 else 0
        layouts, nbytes = _layouts({name: args[name] for name in names}, gap)
        image = torch.full((nbytes + 2 * guard,), SENTINEL, dtype=torch.uint8)
        for name, layout in layouts.items():
            layout.view(image[guard : guard + nbytes]).copy_(args[name])
        buffer = image.clone() if torch.device(device).type == "cpu" else image.to(device)
        arena = Arena(image, buffer, nbytes, guard, layouts)
        placed.arenas.append(arena)
        for name, layout in layouts.items():
            placed.args[name] = layout.view(arena.body(buffer))
    return placed


def clone(args: Mapping[str, Any]) -> dict[str, Any]:
    """Host copies that share storages as `args` do, without guards."""
    return place(args, guard=0).args


def sharing(args: Mapping[str, Any]) -> list[list[str]]:
    """Names of the tensors of each storage: which arguments lie in one arena."""
    return list(_by_storage(args).values())


def _by_storage(args: Mapping[str, Any]) -> dict[Any, list[str]]:
    groups: dict[Any, list[str]] = {}
    for name, value in args.items():
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            groups.setdefault(storage.data_ptr() if storage.nbytes() else name, []).append(name)
    return groups


def _layouts(tensors: Mapping[str, torch.Tensor], gap: int) -> tuple[dict[str, Layout], int]:
    """Layouts that keep strides and distances, or leave `gap` elements between rows; and the bytes they need."""
    layouts, nbytes = {}, 0
    start = min(t.storage_offset() * t.element_size() for t in tensors.values())
    for name, t in tensors.items():
        size, stride, offset = t.element_size(), t.stride(), t.storage_offset() * t.element_size() - start
        if gap and t.dim() >= 2:
            steps = [1, t.shape[-1] + gap]
            for extent in reversed(t.shape[1:-1]):
                steps.append(steps[-1] * extent)
            stride, offset = tuple(reversed(steps[: t.dim()])), 2 * gap * size
        extent = sum((n - 1) * s for n, s in zip(t.shape, stride, strict=True)) + 1 if t.numel() else 0
        if t.dim() >= 1 and t.numel() and stride[0] > 0:
            extent = max(extent, t.shape[0] * stride[0])  # the last row's gap is memory too
        layouts[name] = Layout(t.dtype, tuple(t.shape), tuple(stride), offset)
        nbytes = max(nbytes, offset + extent * size)
    return layouts, -(-nbytes // 64) * 64
