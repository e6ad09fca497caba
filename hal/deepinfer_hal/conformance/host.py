"""Facts of a run that a report carries: device, host, versions, and which sources of the suite ran."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import deepinfer_hal
from deepinfer_hal.backend import Backend

PACKAGE = Path(deepinfer_hal.__file__).parent

_VERSIONS = ("deepinfer", "torch", "numpy", "triton", "torch_npu", "hypothesis")


def describe_subject(backend: Backend, index: int) -> dict[str, Any]:
    """Backend, device, its driver and toolkit as `probe` tells them, and every kernel offered."""
    found = [info for info in backend.probe() if info.index == index]
    info = found[0] if found else None
    return {
        "backend": backend.name,
        "index": index,
        "device": info.name if info else "unknown",
        "memory_bytes": info.memory_bytes if info else 0,
        "emulated": bool(info and info.emulated),
        "details": {str(k): str(v) for k, v in info.details.items()} if info else {},
        "build": {str(k): str(v) for k, v in backend.describe_build().items()},
        "kernels": [
            {
                "op": kernel.op, "provider": kernel.provider, "symbol": kernel.symbol, "invariant": kernel.invariant,
                "capturable": kernel.capturable, "priority": kernel.priority,
            }
            for kernel in backend.kernels(index)
        ],
    }  # fmt: skip


def describe_host() -> dict[str, Any]:
    """Machine, processor, Python, and versions of the packages that matter."""
    versions = {}
    for name in _VERSIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "platform": platform.platform(),
        "machine": platform.machine(),
        "processor": _processor(),
        "cpu_count": os.cpu_count(),
        "python": platform.python_version(),
        "versions": versions,
    }


def describe_suite() -> dict[str, Any]:
    """HAL version, commit and cleanness of the sources (None where they are no checkout), and a digest of every file."""
    commit, clean = _git_state()
    version = ".".join(map(str, deepinfer_hal.HAL_VERSION))
    return {"hal_version": version, "commit": commit, "clean_tree": clean, "source_sha256": source_digest()}


def source_digest() -> str:
    """SHA-256 over the names and contents of the package's files."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*")):
        if path.suffix in (".py", ".json") and "__pycache__" not in path.parts:
            digest.update(path.relative_to(PACKAGE).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _git_state() -> tuple[str | None, bool | None]:
    commit, status = _git("rev-parse", "HEAD"), _git("status", "--porcelain")
    if commit is None or _git("ls-files", "--error-unmatch", "card.py") is None:
        return None, None
    return commit.strip(), status is not None and not status.strip()


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=PACKAGE, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
