"""Recorded op calls of real model steps: one file, `NAME.trace`, whose calls are cases.

A trace is a zip of `index.json` and of byte blobs named by their SHA-256, so equal weights are stored once. Arguments
that share memory go on sharing it. Nothing in it is ever executed or unpickled.
"""

from __future__ import annotations

import functools
import hashlib
import json
import threading
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from deepinfer_hal.card import OpCard, get_card
from deepinfer_hal.conformance.arena import Layout, place
from deepinfer_hal.errors import BadCall
from deepinfer_hal.weights import CanonicalWeight, WeightHandle

SCHEMA = 1
SUFFIX = ".trace"

_DTYPES = {str(d).removeprefix("torch."): d for d in (
    torch.bfloat16, torch.float32, torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool,
    torch.float8_e4m3fn, torch.float8_e8m0fnu,
)}  # fmt: skip


class Recorder:
    """A dispatcher's observer that keeps the arguments of calls, as they were before the call.

    most_calls: of one op with the same shapes; most_bytes: of the tensors of one call, larger ones are passed over.
    """

    def __init__(self, most_calls: int = 2, most_bytes: int = 8 << 20) -> None:
        self.most_calls, self.most_bytes = most_calls, most_bytes
        self.calls: list[dict[str, Any]] = []
        self.blobs: dict[str, bytes] = {}
        self.passed_over: Counter[str] = Counter()
        self._seen: Counter[Any] = Counter()
        self._weights: dict[int, tuple[Any, dict[str, Any]]] = {}
        self._lock = threading.Lock()

    def __call__(self, card: OpCard, args: Mapping[str, Any], call: Callable[[], None]) -> None:
        with self._lock:
            self._keep(card, args)
        call()

    def _keep(self, card: OpCard, args: Mapping[str, Any]) -> None:
        if any(arg.kind == "comm" for arg in card.signature):
            return  # no call of one rank alone
        tensors = {name: value for name, value in args.items() if isinstance(value, torch.Tensor)}
        shapes = (card.name, *((name, tuple(t.shape), t.dtype) for name, t in tensors.items()))
        if self._seen[shapes] >= self.most_calls:
            return
        if sum(t.numel() * t.element_size() for t in tensors.values()) > self.most_bytes:
            self.passed_over[card.name] += 1
            return
        self._seen[shapes] += 1
        host = {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in args.items()}
        placed = place({name: host[name] for name in tensors}, guard=0)
        self.calls.append(
            {
                "op": card.name,
                "scalars": {a.name: args[a.name] for a in card.signature if a.kind in ("int", "float", "bool", "str")},
                "weights": {a.name: self._weight(args[a.name]) for a in card.signature if a.kind == "weight" and args[a.name]},
                "storages": [
                    {"blob": self._blob(arena.image), "tensors": {n: _layout(layout) for n, layout in arena.layouts.items()}}
                    for arena in placed.arenas
                ],
            }
        )

    def _weight(self, handle: WeightHandle) -> dict[str, Any]:
        if id(handle) not in self._weights:
            stored = handle.canonical()
            parts = {name: getattr(stored, name) for name in ("values", "scales")}
            entry = {"role": handle.role, "format": stored.format}
            for name, part in parts.items():
                if part is not None:
                    host = part.cpu().contiguous()
                    blob = self._blob(host.reshape(-1).view(torch.uint8))
                    entry[name] = {"blob": blob, "shape": list(host.shape), "dtype": _name(host.dtype)}
            self._weights[id(handle)] = (handle, entry)
        return self._weights[id(handle)][1]

    def _blob(self, data: torch.Tensor) -> str:
        content = data.numpy().tobytes()
        digest = hashlib.sha256(content).hexdigest()
        self.blobs[digest] = content
        return digest

    def save(self, path: str | Path, about: Mapping[str, Any]) -> None:
        """Writes the file; `about` says what was recorded. BadCall for another suffix."""
        if Path(path).suffix != SUFFIX:
            raise BadCall(f"a trace file is named *{SUFFIX}, got {Path(path).name}")
        index = {"schema": SCHEMA, "about": dict(about), "calls": self.calls}
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("index.json", json.dumps(index))
            for digest, content in self.blobs.items():
                archive.writestr(digest, content)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _layout(layout: Layout) -> list[Any]:
    return [_name(layout.dtype), list(layout.shape), list(layout.stride), layout.offset]


@functools.lru_cache(maxsize=4)
def _index(path: str) -> dict[str, Any]:
    try:
        with zipfile.ZipFile(path) as archive:
            index = json.loads(archive.read("index.json"))
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise BadCall(f"trace {path} cannot be read: {error}") from None
    if index.get("schema") != SCHEMA:
        raise BadCall(f"trace {path} has schema {index.get('schema')}, this suite reads {SCHEMA}")
    return index


def trace_ids(path: str | Path) -> dict[str, str]:
    """Case id -> op of every call of a trace. BadCall if the file is no trace."""
    name = Path(path).name
    return {f"{name}#{number}:{call['op']}": call["op"] for number, call in enumerate(_index(str(path))["calls"])}


def load_call(path: str | Path, id: str) -> dict[str, Any]:
    """Host arguments of one recorded call, by name; weights in the checkpoint's layout. BadCall for a wrong id or file."""
    ids = list(trace_ids(path))
    if id not in ids:
        raise BadCall(f"trace {path} has no call {id!r}; it has {len(ids)}, from {ids[0] if ids else 'none'}")
    call = _index(str(path))["calls"][ids.index(id)]
    with zipfile.ZipFile(path) as archive:

        def blob(digest: str) -> torch.Tensor:
            content = archive.read(digest)
            if hashlib.sha256(content).hexdigest() != digest:
                raise BadCall(f"trace {path} is damaged: blob {digest[:12]} has other content")
            return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.zeros(0, dtype=torch.uint8)

        args: dict[str, Any] = dict.fromkeys(get_card(call["op"]).arg_names) | call["scalars"]
        for storage in call["storages"]:
            memory = blob(storage["blob"])
            for name, (dtype, shape, stride, offset) in storage["tensors"].items():
                args[name] = Layout(_DTYPES[dtype], tuple(shape), tuple(stride), offset).view(memory)
        for name, entry in call["weights"].items():
            parts = {}
            for part in {"values", "scales"} & set(entry):
                about = entry[part]
                parts[part] = blob(about["blob"]).view(_DTYPES[about["dtype"]]).reshape(about["shape"])
            args[name] = WeightHandle(entry["role"], CanonicalWeight(entry["format"], **parts))
    return args
