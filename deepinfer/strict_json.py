"""JSON from files that may be damaged or hostile: one parser, one kind of error."""

from __future__ import annotations

import json
from typing import Any


def parse_object(raw: bytes) -> dict[str, Any]:
    """The object in `raw`. Raises ValueError for bad UTF-8, bad JSON, NaN or Infinity, a key that appears twice in one
    object, nesting beyond the interpreter's limit, and anything that is no object at the top."""
    try:
        content = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(content, dict):
        raise ValueError(f"holds a {type(content).__name__}, not an object")
    return content


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"key {ascii(twice)[:60]} appears twice in one object")
    return content


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
