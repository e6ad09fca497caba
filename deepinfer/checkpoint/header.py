"""The header of one safetensors file, parsed with every length checked before it is used.

Layout: 8 bytes little-endian length, that many bytes of JSON `{name: {dtype, shape, data_offsets}}`, then the data.
Accepted only if the tensors fill the data region without gap or overlap and every size follows from dtype and shape.
"""

from __future__ import annotations

import errno
import os
from typing import Any

import msgspec

from deepinfer.errors import BadHeader, CheckpointError, MissingShard, OversizedShard, TruncatedShard
from deepinfer.strict_json import parse_object

MAX_HEADER_BYTES = 100_000_000
MAX_DATA_BYTES = 1 << 48
MAX_DIMENSIONS = 8
# The types of safetensors in bits. That a type is known here does not make it right for a tensor.
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64,
}  # fmt: skip


class StoredTensor(msgspec.Struct, frozen=True):
    """A tensor as its header describes it. `offset` counts bytes from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class ShardHeader(msgspec.Struct, frozen=True):
    """All tensors of one file, in the order of their data. `data_end` is the file's size if nothing is missing."""

    file: str
    tensors: tuple[StoredTensor, ...]
    data_start: int
    data_end: int


def read_header(path: str, file: str, allow_short_data: bool = False) -> ShardHeader:
    """Parse the header of the file at `path`; `file` is its name in messages.

    Raises MissingShard, BadHeader, TruncatedShard or OversizedShard. With `allow_short_data` the data region may end
    early or be a hole: the header alone must be whole.
    """
    try:
        with open(path, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            length = _header_length(stream.read(8), size, file)
            raw = stream.read(length)
            is_hole = size > 8 + length and _is_hole(stream.fileno(), 8 + length)
    except FileNotFoundError:
        raise MissingShard("no such file in the folder", file=file) from None
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", file=file) from None
    header = parse_header(raw, file)
    if size > header.data_end:
        raise OversizedShard(f"ends at byte {size}, its header describes {header.data_end}", file=file, nbytes=size)
    if size < header.data_end and not allow_short_data:
        cut = next(t for t in header.tensors if t.offset + t.nbytes > size)
        raise TruncatedShard(
            f"ends at byte {size}, inside a tensor that reaches {cut.offset + cut.nbytes}; the header describes "
            f"{header.data_end}: fetch the file again",
            file=file,
            tensor=cut.name,
            nbytes=size,
        )
    if is_hole and not allow_short_data:
        raise TruncatedShard(
            "has a header, but its data is one hole: it can be planned with mode headers, not run",
            file=file,
            nbytes=size,
        )
    return header


def _is_hole(descriptor: int, start: int) -> bool:
    """True if the file system stores nothing from `start` on. A block shared with the header counts as stored."""
    try:
        os.lseek(descriptor, start, os.SEEK_DATA)
    except OSError as error:
        return error.errno == errno.ENXIO
    return False


def _header_length(prefix: bytes, size: int, file: str) -> int:
    if len(prefix) < 8:
        raise TruncatedShard(f"has {size} bytes, less than the 8 of a header's length", file=file, nbytes=size)
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        raise BadHeader(f"header length {length} exceeds the limit of {MAX_HEADER_BYTES}", file=file, nbytes=length)
    if length > size - 8:
        raise TruncatedShard(f"ends at byte {size}, inside its header of {length} bytes", file=file, nbytes=size)
    if length < 2:
        raise BadHeader(f"header length {length} is below 2, the shortest JSON object", file=file, nbytes=length)
    return length


def parse_header(raw: bytes, file: str) -> ShardHeader:
    """Parse the JSON of a header. Raises BadHeader."""
    if raw[:1] != b"{":
        raise BadHeader("header does not start with '{'", file=file)
    try:
        content = parse_object(raw)
    except ValueError as error:
        raise BadHeader(f"header is not valid JSON: {error}", file=file) from None
    metadata = content.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise BadHeader("__metadata__ is not an object of strings", file=file)
    start = 8 + len(raw)
    tensors = sorted((_tensor(name, entry, start, file) for name, entry in content.items()), key=_data_order)
    reached = start
    for tensor in tensors:
        if tensor.offset != reached:
            what = "a gap before" if tensor.offset > reached else "an overlap at"
            raise BadHeader(
                f"{what} its data: begins at {tensor.offset - start}, the one before ends at {reached - start}",
                file=file,
                tensor=tensor.name,
                nbytes=tensor.nbytes,
            )
        reached += tensor.nbytes
    return ShardHeader(file, tuple(tensors), start, reached)


def _data_order(tensor: StoredTensor) -> tuple[int, int]:
    return tensor.offset, tensor.nbytes


def _tensor(name: str, entry: Any, start: int, file: str) -> StoredTensor:
    def bad(message: str) -> BadHeader:
        return BadHeader(message, file=file, tensor=name)

    if not (name.isascii() and name.isprintable()):
        raise BadHeader(f"tensor name {ascii(name)[:60]} is not printable ASCII", file=file)
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise bad("entry is not {dtype, shape, data_offsets}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise bad(f"dtype {dtype!r} is not a safetensors type")
    if not _are_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        raise bad(f"shape {str(shape)[:60]} is not a list of at most {MAX_DIMENSIONS} sizes")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise bad(f"data_offsets {str(offsets)[:60]} are not [begin, end] with 0 <= begin <= end")
    nbytes = DTYPE_BITS[dtype] // 8
    for size in shape:
        nbytes *= size
    if nbytes > MAX_DATA_BYTES:
        raise bad(f"shape {shape} needs more than {MAX_DATA_BYTES} bytes")
    if offsets[1] - offsets[0] != nbytes:
        raise BadHeader(
            f"data_offsets span {offsets[1] - offsets[0]} bytes, {dtype} {shape} needs {nbytes}",
            file=file,
            tensor=name,
            nbytes=nbytes,
        )
    return StoredTensor(name, dtype, tuple(shape), start + offsets[0], nbytes)


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(one) is int and 0 <= one <= MAX_DATA_BYTES for one in value)
