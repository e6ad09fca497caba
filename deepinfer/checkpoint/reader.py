"""Opening a checkpoint strictly: everything is compared before anything is allocated, and every problem is listed.

Three kinds of input: `full` shards (the only one that can run), `headers` (sparse files with true headers, whose data
may be short or a hole) and `index` (config.json and the index; shapes and types are assumed from the configuration).
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
import torch

from deepinfer.checkpoint.header import ShardHeader, StoredTensor, read_header
from deepinfer.checkpoint.index import SINGLE_FILE, ShardIndex, find_shards
from deepinfer.checkpoint.integrity import check_sums, scale_problem
from deepinfer.checkpoint.tensors import DTYPE_BYTES, IGNORED_NAME, TensorSpec, expected_tensors
from deepinfer.errors import (
    BadIndex,
    CheckpointError,
    ConfigError,
    DuplicateTensor,
    MissingTensor,
    NotRunnable,
    UnexpectedTensor,
    WrongDtype,
    WrongShape,
)
from deepinfer.model_config import ModelConfig

Mode = Literal["full", "headers", "index"]
# What a stored type is read as: codes and scales stay bytes, so that no float8 type is needed.
TORCH_DTYPE = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F8_E4M3": torch.uint8,
    "F8_E8M0": torch.uint8,
    "I8": torch.uint8,
}


class TensorEntry(msgspec.Struct, frozen=True):
    """Where a tensor lies. `offset` is in bytes from the start of the shard's file; -1 where only assumed."""

    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    shard: str
    offset: int


class Checkpoint:
    """An opened checkpoint: its configuration, where its tensors lie, and what is wrong with it.

    `tensors` has the expected tensors that were found, by canonical name; `problems` is empty for a sound checkpoint;
    `assumed` is True if shapes and types were taken from the configuration (mode `index`).
    """

    def __init__(
        self,
        folder: Path,
        mode: Mode,
        config: ModelConfig,
        specs: dict[str, TensorSpec],
        tensors: dict[str, TensorEntry],
        problems: list[CheckpointError],
    ) -> None:
        self.folder = folder
        self.mode = mode
        self.config = config
        self.specs = specs
        self.tensors = tensors
        self.problems = problems
        self.assumed = mode == "index"
        self._mapped: tuple[str, mmap.mmap] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors found."""
        return sum(entry.nbytes for entry in self.tensors.values())

    def require_ok(self) -> Checkpoint:
        """Raise the first problem, its message followed by all others; return self if there is none."""
        if self.problems:
            first = self.problems[0]
            first.problems = tuple(self.problems)
            if len(self.problems) > 1:
                shown = [f"  - {type(one).__name__}: {one.args[0]}" for one in self.problems[1:20]]
                rest = len(self.problems) - 1 - len(shown)
                lines = [str(first.args[0]), f"and {len(self.problems) - 1} more:", *shown]
                first.args = ("\n".join([*lines, *([f"  - ... {rest} not shown"] if rest else [])]),)
            raise first
        return self

    def require_runnable(self) -> Checkpoint:
        """Like `require_ok`, and the mode must be `full`."""
        if self.mode != "full":
            raise NotRunnable(f"was opened from its {self.mode} only, without values: run it from full shards")
        return self.require_ok()

    def read(self, name: str) -> torch.Tensor:
        """The raw tensor: uint8 for codes and scales, bfloat16 or float32 otherwise.

        A view of the shard's mapping where alignment allows. Only the mapping of the shard last read is held here; a
        tensor that is kept keeps its own shard mapped. Raises MissingTensor, NotRunnable.
        """
        self.require_runnable()
        entry = self.tensors.get(name)
        if entry is None:
            raise MissingTensor("not in this checkpoint", tensor=name)
        dtype = TORCH_DTYPE[entry.dtype]
        if not entry.nbytes:
            return torch.empty(entry.shape, dtype=dtype)
        raw = torch.frombuffer(self._mapping(entry.shard), dtype=torch.uint8, count=entry.nbytes, offset=entry.offset)
        if entry.offset % DTYPE_BYTES[entry.dtype]:
            raw = raw.clone()
        return raw.view(dtype).view(entry.shape)

    def iter_shards(self) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        """(shard, its tensors by name in the order of their data), one shard mapped at a time."""
        self.require_runnable()
        by_shard: dict[str, list[str]] = {}
        for name, entry in self.tensors.items():
            by_shard.setdefault(entry.shard, []).append(name)
        for shard in sorted(by_shard):
            names = sorted(by_shard[shard], key=lambda name: self.tensors[name].offset)
            yield shard, {name: self.read(name) for name in names}
        self.close()

    def close(self) -> None:
        """Let go of the mapping; tensors already read stay valid."""
        self._mapped = None

    def _mapping(self, shard: str) -> mmap.mmap:
        if self._mapped is None or self._mapped[0] != shard:
            self._mapped = None
            with open(self.folder / shard, "rb") as stream:
                self._mapped = (shard, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY))
        return self._mapped[1]


def open_checkpoint(folder: str | Path, mode: Mode = "full", verify_sums: bool | None = None) -> Checkpoint:
    """Compare a checkpoint with its configuration. No tensor is read but scales, which are looked through for NaN.

    verify_sums: check the folder's SHA256SUMS, if it has one, in mode `full`; None does so up to 1 GiB of files.
    Raises ConfigError for a bad config.json; everything else is a CheckpointError in the result's `problems`.
    """
    if mode not in ("full", "headers", "index"):
        raise ConfigError("mode", f"{mode!r} is not full, headers or index")
    folder = Path(folder)
    config = ModelConfig.from_folder(folder)
    specs = expected_tensors(config)
    problems: list[CheckpointError] = []
    index = find_shards(folder, mode, problems)
    if index is None:
        return Checkpoint(folder, mode, config, specs, {}, problems)
    if mode == "index":
        found = _assume(index, specs, problems)
    else:
        headers = _read_headers(folder, index, mode, problems)
        _compare_with_index(index, headers, problems)
        found = _collect(headers, problems)
    checkpoint = Checkpoint(folder, mode, config, specs, _match(found, specs, problems), problems)
    if mode == "full" and not problems:
        problems += check_sums(folder, verify_sums)
    if mode == "full" and not problems:
        problems += _check_scales(checkpoint)
    return checkpoint


def canonical_name(stored: str) -> str:
    """Without the optional `model.` prefix."""
    return stored.removeprefix("model.")


def _read_headers(
    folder: Path, index: ShardIndex, mode: Mode, problems: list[CheckpointError]
) -> dict[str, ShardHeader]:
    headers = {}
    for shard in index.shards:
        try:
            headers[shard] = read_header(str(folder / shard), shard, allow_short_data=mode == "headers")
        except CheckpointError as error:
            problems.append(error)
    return headers


def _compare_with_index(index: ShardIndex, headers: dict[str, ShardHeader], problems: list[CheckpointError]) -> None:
    """The index must give each tensor's shard, all of them, and the bytes of the data."""
    if index.weight_map is None or len(headers) < len(index.shards):
        return
    stored = {tensor.name: shard for shard, header in headers.items() for tensor in header.tensors}
    for name, shard in index.weight_map.items():
        if stored.get(name) != shard:
            where = f"is in {stored[name]}" if name in stored else "is in no shard"
            problems.append(BadIndex(f"said to be in {shard}, but {where}", file=index.file, tensor=name))
    for name in stored.keys() - index.weight_map.keys():
        problems.append(BadIndex(f"is in {stored[name]}, but not in the index", file=index.file, tensor=name))
    total = sum(tensor.nbytes for header in headers.values() for tensor in header.tensors)
    if index.total_size not in (None, total):
        problems.append(
            BadIndex(
                f"metadata.total_size is {index.total_size}, the shards hold {total}", file=index.file, nbytes=total
            )
        )


def _collect(
    headers: dict[str, ShardHeader], problems: list[CheckpointError]
) -> dict[str, tuple[StoredTensor | None, str]]:
    """Stored tensors by canonical name; one that comes twice is a problem."""
    found: dict[str, tuple[StoredTensor | None, str]] = {}
    for shard, header in headers.items():
        for tensor in header.tensors:
            name = canonical_name(tensor.name)
            if name in found:
                problems.append(
                    DuplicateTensor(f"already in {found[name][1]}", file=shard, tensor=name, nbytes=tensor.nbytes)
                )
            found[name] = (tensor, shard)
    return found


def _assume(
    index: ShardIndex, specs: dict[str, TensorSpec], problems: list[CheckpointError]
) -> dict[str, tuple[StoredTensor | None, str]]:
    found: dict[str, tuple[StoredTensor | None, str]] = {}
    for stored, shard in (index.weight_map or {}).items():
        name = canonical_name(stored)
        if name in found:
            problems.append(DuplicateTensor("named twice, with and without the prefix", file=index.file, tensor=name))
        found[name] = (None, shard)
    known = [specs[name].nbytes for name in found if name in specs]
    if len(known) == len(found) and index.total_size not in (None, sum(known)):
        problems.append(
            BadIndex(
                f"metadata.total_size is {index.total_size}, the configuration gives {sum(known)}",
                file=index.file,
                nbytes=sum(known),
            )
        )
    return found


def _match(
    found: dict[str, tuple[StoredTensor | None, str]], specs: dict[str, TensorSpec], problems: list[CheckpointError]
) -> dict[str, TensorEntry]:
    """Compare what was found with what must be there; returns the entries that are right."""
    entries = {}
    for name, spec in specs.items():
        if name not in found:
            if not spec.optional:
                problems.append(
                    MissingTensor(f"needed as {spec.dtype} {list(spec.shape)}", tensor=name, nbytes=spec.nbytes)
                )
            continue
        tensor, shard = found[name]
        if tensor is None:
            entries[name] = TensorEntry(spec.shape, spec.dtype, spec.nbytes, shard, -1)
        elif tensor.dtype != spec.dtype:
            problems.append(
                WrongDtype(f"is {tensor.dtype}, must be {spec.dtype}", file=shard, tensor=name, nbytes=spec.nbytes)
            )
        elif tensor.shape != spec.shape:
            problems.append(
                WrongShape(
                    f"is {list(tensor.shape)}, must be {list(spec.shape)}", file=shard, tensor=name, nbytes=spec.nbytes
                )
            )
        else:
            entries[name] = TensorEntry(spec.shape, spec.dtype, spec.nbytes, shard, tensor.offset)
    for name, (tensor, shard) in found.items():
        if name not in specs and not IGNORED_NAME.fullmatch(name):
            problems.append(
                UnexpectedTensor(
                    "not a tensor of this configuration",
                    file=shard,
                    tensor=name,
                    nbytes=tensor.nbytes if tensor else None,
                )
            )
    return entries


def _check_scales(checkpoint: Checkpoint) -> list[CheckpointError]:
    """All scales of a sound checkpoint, shard by shard."""
    problems = []
    scales = [name for name, entry in checkpoint.tensors.items() if entry.dtype == "F8_E8M0"]
    for name in sorted(scales, key=lambda name: (checkpoint.tensors[name].shard, checkpoint.tensors[name].offset)):
        problem = scale_problem(name, checkpoint.read(name), checkpoint.tensors[name].shard)
        if problem is not None:
            problems.append(problem)
    checkpoint.close()
    return problems


__all__ = ["SINGLE_FILE", "Checkpoint", "Mode", "TensorEntry", "canonical_name", "open_checkpoint"]
