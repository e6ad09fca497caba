"""Stores a tool's result under reports/ with the command that made it, so that a reader can make it again."""

from __future__ import annotations

import datetime
import json
import platform
from pathlib import Path
from typing import Any


def store(path: Path, command: str, result: dict[str, Any]) -> None:
    """Writes `result` as JSON with command, date and Python version."""
    header = {
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "python": platform.python_version(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**header, **result}, indent=1) + "\n", encoding="utf-8")
