"""Workspaces of a device's streams, for kernels behind the C ABI."""

from __future__ import annotations

import torch


class StreamWorkspaces:
    """A workspace of `nbytes` for each stream of a device, made at the stream's first call and kept for as long as the process
    lives, so that captured graphs find it where it was. A stream that is captured must have been warmed up."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self._device, self._nbytes, self._made = device, nbytes, {}

    def __call__(self, stream: int | None) -> tuple[int, int]:
        """Pointer and bytes: what `CLibrary` passes on."""
        if stream not in self._made:
            self._made[stream] = torch.empty(self._nbytes, dtype=torch.uint8, device=self._device)
        room = self._made[stream]
        return room.data_ptr(), room.numel()
