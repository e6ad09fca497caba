"""Which shards a checkpoint folder has: from its index, or one single file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from deepinfer.errors import BadIndex, CheckpointError, MissingFile, MissingShard
from deepinfer.strict_json import parse_object

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MAX_INDEX_BYTES = 1 << 28


class ShardIndex(msgspec.Struct, frozen=True):
    """`weight_map` is None for a single file. `shards` are file names in ascending order."""

    file: str
    shards: tuple[str, ...]
    weight_map: dict[str, str] | None = None
    total_size: int | None = None


def find_shards(folder: Path, mode: str, problems: list[CheckpointError]) -> ShardIndex | None:
    """The folder's index, or None with the reason added to `problems`. Every shard that it names but is absent is one
    more problem, in the modes that need shards."""
    if not (folder / INDEX_FILE).is_file():
        if mode != "index" and (folder / SINGLE_FILE).is_file():
            return ShardIndex(SINGLE_FILE, (SINGLE_FILE,))
        other = "" if mode == "index" else f" or {SINGLE_FILE}"
        problems.append(MissingFile(f"not in {folder.name or folder}{other and f', nor{other[3:]}'}", file=INDEX_FILE))
        return None
    try:
        index = parse_index((folder / INDEX_FILE).read_bytes())
    except OSError as error:
        problems.append(CheckpointError(f"cannot be read: {error.strerror}", file=INDEX_FILE))
        return None
    except CheckpointError as error:
        problems.append(error)
        return None
    if mode == "index":
        return index
    absent = [shard for shard in index.shards if not (folder / shard).is_file()]
    for shard in absent:
        example = next(name for name, where in (index.weight_map or {}).items() if where == shard)
        problems.append(MissingShard(f"not in the folder, but {INDEX_FILE} names it", file=shard, tensor=example))
    return ShardIndex(
        index.file, tuple(shard for shard in index.shards if shard not in absent), index.weight_map, index.total_size
    )


def parse_index(raw: bytes) -> ShardIndex:
    """Raises BadIndex unless it is `{"metadata": {...}, "weight_map": {tensor: file name}}`."""

    def bad(message: str, tensor: str | None = None) -> BadIndex:
        return BadIndex(message, file=INDEX_FILE, tensor=tensor)

    if len(raw) > MAX_INDEX_BYTES:
        raise bad(f"has {len(raw)} bytes, the limit is {MAX_INDEX_BYTES}")
    try:
        content = parse_object(raw)
    except ValueError as error:
        raise bad(f"is not valid JSON: {error}") from None
    if not isinstance(content.get("weight_map"), dict) or not content["weight_map"]:
        raise bad("has no weight_map")
    if unknown := content.keys() - {"metadata", "weight_map"}:
        raise bad(f"has the unknown key {ascii(min(unknown))[:60]}; only metadata and weight_map belong there")
    for name, shard in content["weight_map"].items():
        if not (name.isascii() and name.isprintable()):
            raise bad(f"tensor name {ascii(name)[:60]} is not printable ASCII")
        if not _is_plain_file_name(shard):
            raise bad(f"{ascii(shard)[:60]} is not the name of a .safetensors file in this folder", name)
    return ShardIndex(
        INDEX_FILE,
        tuple(sorted(set(content["weight_map"].values()))),
        content["weight_map"],
        _total_size(content.get("metadata"), bad),
    )


def _total_size(metadata: Any, bad: Any) -> int | None:
    if metadata is None:
        return None
    if not isinstance(metadata, dict):
        raise bad("metadata is not an object")
    total = metadata.get("total_size")
    if isinstance(total, float) and total.is_integer():
        total = int(total)
    if total is not None and (type(total) is not int or not 0 <= total < 1 << 62):
        raise bad(f"metadata.total_size {ascii(total)[:60]} is not a number of bytes")
    return total


def _is_plain_file_name(shard: Any) -> bool:
    """A name inside the folder: an index must not make the reader open other files."""
    if not isinstance(shard, str) or not shard.isascii() or not shard.isprintable() or len(shard) > 255:
        return False
    return shard.endswith(".safetensors") and "/" not in shard and "\\" not in shard and not shard.startswith(".")
