"""Makes the virtual environments of checks whose packages must not meet the project's own (another Triton, torch_npu).

An environment is kept under `$DEEPINFER_CACHE` (default ~/.cache/deepinfer), keyed by its packages and by the Python
that made it, and used again while that key is the same. It sees the maker's packages after its own, so torch, numpy
and pytest are not installed twice.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

_READY = "ready.txt"
WITHOUT_INDEX = "Without a package index leave these tests out: pytest -m 'not full and not index'."


class EnvironmentFailed(RuntimeError):
    """pip could not make the environment; the message ends with pip's own words."""


def cache_folder() -> Path:
    """Where environments and other reusable results of the tools are kept."""
    return Path(os.environ.get("DEEPINFER_CACHE", "~/.cache/deepinfer")).expanduser()


def environment(name: str, packages: list[str], *, with_dependencies: bool = False) -> Path:
    """The Python of the environment that has `packages` (pip requirements), made on first use.

    Raises EnvironmentFailed with pip's message. Half-made environments are removed. Of several processes that want one
    environment at once, the first makes it and the others wait.
    """
    shared = sysconfig.get_paths()["purelib"]
    key = hashlib.sha256("\n".join([sys.version, shared, str(with_dependencies), *packages]).encode()).hexdigest()[:10]
    folder = cache_folder() / "venvs" / f"{name}-{key}"
    python = folder / "bin" / "python"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / f"{folder.name}.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / _READY).exists():
            _make(name, folder, shared, packages, with_dependencies)
    return python


def _make(name: str, folder: Path, shared: str, packages: list[str], with_dependencies: bool) -> None:
    python = folder / "bin" / "python"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        _run(name, [sys.executable, "-m", "venv", str(folder)])
        (_site_packages(folder) / "maker.pth").write_text(f"{shared}\n", encoding="utf-8")
        flags = [] if with_dependencies else ["--no-deps"]
        _run(name, [str(python), "-m", "pip", "install", "-q", "--retries", "1", *flags, *packages])
    except EnvironmentFailed:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    (folder / _READY).write_text("\n".join(packages) + "\n", encoding="utf-8")


def _site_packages(folder: Path) -> Path:
    return next((folder / "lib").glob("python*/site-packages"))


def _run(name: str, command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = f"{done.stdout}{done.stderr}".rstrip()
        raise EnvironmentFailed(f"environment {name}: {' '.join(command)} failed:\n{said}\n{WITHOUT_INDEX}")
