"""Is the content of the files what it was? Scales that are no numbers, and the folder's SHA256SUMS if it has one.

One wrong bit in a scale gives another number, which no format rule can notice: only the checksums do.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import torch

from deepinfer.errors import BadScale, CheckpointError, ChecksumMismatch, MissingFile

SUMS_FILE = "SHA256SUMS"
VERIFY_UP_TO_BYTES = 1 << 30
UE8M0_NAN = 255
_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *]([^/\\]+)")
_CHUNK = 1 << 26


def scale_problem(name: str, scales: torch.Tensor, shard: str) -> BadScale | None:
    """A BadScale if any ue8m0 byte is 255 (NaN). `scales` is uint8 of any shape; looked through in pieces."""
    flat = scales.reshape(-1)
    for start in range(0, flat.numel(), _CHUNK):
        piece = flat[start : start + _CHUNK]
        if int(piece.max()) == UE8M0_NAN:
            at = start + int((piece == UE8M0_NAN).nonzero()[0])
            return BadScale(
                f"scale {at} of {flat.numel()} is byte 255, which is NaN in ue8m0: fetch the file again",
                file=shard,
                tensor=name,
                nbytes=flat.numel(),
            )
    return None


def check_sums(folder: Path, verify: bool | None) -> list[CheckpointError]:
    """Problems of the files that the folder's SHA256SUMS lists (lines as `sha256sum` writes them).

    verify: None hashes only if the files have at most 1 GiB together; False never does.
    """
    sums = folder / SUMS_FILE
    if verify is False or not sums.is_file():
        return []
    wanted = {}
    for line in sums.read_bytes().decode("utf-8", "replace").splitlines():
        found = _LINE.fullmatch(line)
        if found is None:
            return [CheckpointError(f"{ascii(line)[:60]} is not a line of sha256sum", file=SUMS_FILE)]
        wanted[found.group(2)] = found.group(1).lower()
    absent = [name for name in wanted if not (folder / name).is_file()]
    if absent:
        return [MissingFile(f"{SUMS_FILE} lists it, but it is not in the folder", file=name) for name in absent]
    if verify is None and sum((folder / name).stat().st_size for name in wanted) > VERIFY_UP_TO_BYTES:
        return []
    return [
        ChecksumMismatch(
            f"its SHA-256 is not the one in {SUMS_FILE}: fetch the file again",
            file=name,
            nbytes=(folder / name).stat().st_size,
        )
        for name, digest in wanted.items()
        if _sha256(folder / name) != digest
    ]


def _sha256(path: Path) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
