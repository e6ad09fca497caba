"""Copies of the committed tiny checkpoint, and the edits that tests make to them."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

TINY = Path(__file__).parents[1] / "oracle" / "tiny"
INDEX = "model.safetensors.index.json"
SHARDS = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]


def copy_tiny(folder: Path) -> Path:
    """Configuration, index and shards, writable."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ["config.json", INDEX, *SHARDS]:
        shutil.copyfile(TINY / name, folder / name)
    return folder


def edit_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def split_shard(path: Path) -> tuple[dict[str, Any], bytes]:
    """(header, data) of a safetensors file."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def join_shard(path: Path, header: dict[str, Any] | bytes, data: bytes) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)


def edit_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    header, data = split_shard(path)
    change(header)
    join_shard(path, header, data)


def tensor_place(folder: Path, name: str) -> tuple[Path, int, int]:
    """(file, first byte, bytes) of a tensor's data."""
    for shard in SHARDS:
        header, data = split_shard(folder / shard)
        if name in header:
            begin, end = header[name]["data_offsets"]
            start = (folder / shard).stat().st_size - len(data)
            return folder / shard, start + begin, end - begin
    raise KeyError(name)


def poke(path: Path, offset: int, value: int) -> None:
    with open(path, "r+b") as stream:
        stream.seek(offset)
        stream.write(bytes([value]))


def write_sums(folder: Path) -> None:
    """SHA256SUMS over all files but itself, as sha256sum writes it."""
    names = sorted(path.name for path in folder.iterdir())
    lines = [f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
    (folder / "SHA256SUMS").write_text("".join(lines))
