"""Where text goes: results on standard output, everything else on standard error."""

from __future__ import annotations

import json
import sys
from typing import Any

_PIPE_WIDTH = 200


def print_json(value: Any) -> None:
    """One JSON document on standard output, keys in the order given."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def note(text: str) -> None:
    """A remark for people, out of the way of results."""
    print(text, file=sys.stderr)


def table(*columns: str) -> Any:
    """A borderless rich table."""
    from rich.table import Table

    return Table(*columns, box=None, pad_edge=False)


def print_rich(renderable: Any) -> None:
    """A rich table or text on standard output; where that is no terminal, without colours and wide enough for a line."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    Console(highlight=False, soft_wrap=True, width=width).print(renderable)
