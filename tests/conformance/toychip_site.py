"""Builds and installs examples/toychip into a folder of its own, once for each state of its sources.

Tests run in processes that have that folder on their path: a second accelerator in this process would be what `auto`
finds in all other tests.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "examples" / "toychip"
BUILT = ROOT / "build" / "toychip"
PARTS = (ROOT, ROOT / "hal", ROOT / "backends" / "cpu")
PIP_INSTALL = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--upgrade", "--target")


def require_compiler() -> None:
    """Skips the calling test where there is no C++ compiler."""
    if not (os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")):
        pytest.skip("the toy chip needs a C++ compiler")


@functools.cache
def toychip_site() -> Path:
    """The folder to put on PYTHONPATH. Builds it if the sources changed (half a minute on two cores)."""
    target = BUILT / _digest()
    if not target.is_dir():
        BUILT.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILT) as scratch:
            source, site = Path(scratch) / "source", Path(scratch) / "site"
            shutil.copytree(SOURCE, source, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
            subprocess.run([sys.executable, *PIP_INSTALL, str(site), str(source)], check=True, env=environment())
            try:
                site.rename(target)
            except OSError:  # another process was faster
                assert target.is_dir()
    return target


def environment(*folders: Path) -> dict[str, str]:
    """The environment of a process that finds this tree and these folders, and runs on one thread."""
    path = os.pathsep.join(str(folder) for folder in (*folders, *PARTS))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def run_python(code: str, *folders: Path) -> subprocess.CompletedProcess:
    """Runs a program in a process of its own."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment(*folders), capture_output=True, text=True, timeout=200, cwd=ROOT)


def _digest() -> str:
    files = sorted(path for path in SOURCE.rglob("*") if path.suffix in (".py", ".cpp", ".h", ".txt", ".toml"))
    hashed = hashlib.sha256(f"{torch.__version__} {sys.version}".encode())
    for path in [*files, ROOT / "hal" / "include" / "deepinfer" / "hal.h"]:
        if "build" not in path.relative_to(ROOT).parts:
            hashed.update(path.name.encode() + path.read_bytes())
    return hashed.hexdigest()[:16]
