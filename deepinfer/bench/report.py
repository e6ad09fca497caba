"""A benchmark's stored result: what was run, on what, with which versions, and what came out."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import deepinfer
from deepinfer.errors import ConfigError

_PACKAGES = ("torch", "triton", "numpy", "tokenizers", "msgspec")


def make_report(kind: str, settings: dict[str, Any], results: dict[str, Any]) -> dict[str, Any]:
    """One JSON document; `settings` are those of the engine."""
    return {
        "benchmark": kind,
        "command": shlex.join(["deepinfer", *sys.argv[1:]]),
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {
            "deepinfer": deepinfer.__version__,
            "python": platform.python_version(),
            **{name: _version(name) for name in _PACKAGES},
        },
        "host": {"platform": platform.platform(), "processor": _processor(), "cpu_count": os.cpu_count()},
        "settings": settings,
        "results": results,
    }


def write_report(path: Path, report: dict[str, Any]) -> None:
    """Stores the report; ConfigError if the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError("report", f"{path} cannot be written: {error.strerror}") from None


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "unknown"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
