"""Host arrays to the device, all of a step's in one copy.

On a device with memory of its own they are packed into pinned host memory, which a few pieces serve in turn; a piece is filled
again only when its last copy is done. A device that is the host's own memory gets the arrays themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

ALIGNMENT_BYTES = 256
_PIECES = 8
"""More than a step uploads, so that the next one need not wait for its copies."""


def packed_offsets(arrays: Sequence[np.ndarray]) -> tuple[list[int], int]:
    """Byte offset of each array in a packed buffer, and the buffer's bytes."""
    offsets, end = [], 0
    for array in arrays:
        offsets.append(end)
        end += -(-array.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return offsets, end


def views_of(packed: torch.Tensor, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
    """Tensors like the arrays over a packed uint8 buffer."""
    offsets, _ = packed_offsets(arrays)
    return [
        packed[at : at + array.nbytes].view(torch.from_numpy(array[:0] if array.ndim else array).dtype).view(array.shape)
        for at, array in zip(offsets, arrays, strict=True)
    ]


def in_host_memory(device: torch.device) -> bool:
    """Whether numpy arrays are tensors of this device as they are."""
    return device.type == torch.from_numpy(np.empty(0)).device.type


class Staging:
    """Uploads of one device."""

    def __init__(self, backend: Any, index: int) -> None:
        self.backend, self.index, self.device = backend, index, backend.device(index)
        self._host: list[torch.Tensor | None] = [None] * _PIECES
        self._copied: list[Any] = [None] * _PIECES
        self._turn = 0

    def upload(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """Device tensors of the arrays, which must not change while they are in use."""
        arrays = [np.ascontiguousarray(array) for array in arrays]
        if in_host_memory(self.device):
            return [torch.from_numpy(array) for array in arrays]
        _, nbytes = packed_offsets(arrays)
        packed = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self.fill(packed, arrays)
        return views_of(packed, arrays)

    def fill(self, packed: torch.Tensor, arrays: Sequence[np.ndarray]) -> None:
        """Enqueues the copy of the arrays into a device buffer that `views_of` reads."""
        offsets, nbytes = packed_offsets(arrays)
        host, turn = self._piece(nbytes)
        content = host.numpy()
        for at, array in zip(offsets, arrays, strict=True):
            content[at : at + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self.backend.copy_async(packed[:nbytes], host[:nbytes])
        if self._copied[turn] is None:
            self._copied[turn] = self.backend.event(self.index)
        if self._copied[turn] is not None:
            self._copied[turn].record()

    def _piece(self, nbytes: int) -> tuple[torch.Tensor, int]:
        turn, self._turn = self._turn, (self._turn + 1) % _PIECES
        if self._copied[turn] is not None:
            self._copied[turn].synchronize()
        held = self._host[turn]
        if held is None or held.numel() < nbytes:
            self._host[turn] = held = self.backend.pinned_empty((max(nbytes, 1),), torch.uint8)
        return held, turn
