"""Makes the virtual environments of checks whose packages must not meet the project's own (another Triton, torch_npu).

An environment is kept under `$DEEPINFER_CACHE` (default ~/.cache/deepinfer), keyed by its packages and by the Python
that made it, and used again while that key is the same. It sees the maker's packages after its own, so torch, numpy
and pytest are not installed twice.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

_READY = "ready.txt"


class EnvironmentFailed(RuntimeError):
    """pip could not make the environment; the message ends with pip's own words."""


def cache_folder() -> Path:
    """Where environments and other reusable results of the tools are kept."""
    return Path(os.environ.get("DEEPINFER_CACHE", "~/.cache/deepinfer")).expanduser()


def environment(name: str, packages: list[str], *, with_dependencies: bool = False) -> Path:
    """The Python of the environment that has `packages` (pip requirements), made on first use.

    Raises EnvironmentFailed with pip's message. Half-made environments are removed.
    """
    shared = sysconfig.get_paths()["purelib"]
    key = hashlib.sha256("\n".join([sys.version, shared, str(with_dependencies), *packages]).encode()).hexdigest()[:10]
    folder = cache_folder() / "venvs" / f"{name}-{key}"
    python = folder / "bin" / "python"
    if (folder / _READY).exists():
        return python
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        _run(name, [sys.executable, "-m", "venv", str(folder)])
        (_site_packages(folder) / "maker.pth").write_text(f"{shared}\n", encoding="utf-8")
        flags = [] if with_dependencies else ["--no-deps"]
        _run(name, [str(python), "-m", "pip", "install", "-q", *flags, *packages])
    except EnvironmentFailed:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    (folder / _READY).write_text("\n".join(packages) + "\n", encoding="utf-8")
    return python


def _site_packages(folder: Path) -> Path:
    return next((folder / "lib").glob("python*/site-packages"))


def _run(name: str, command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EnvironmentFailed(f"environment {name}: {' '.join(command)} failed:\n{done.stdout}{done.stderr}".rstrip())
