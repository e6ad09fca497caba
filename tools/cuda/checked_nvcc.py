"""Compiles one CUDA source as CMake asks for it, refuses spills and local memory, and keeps what it made for the next build.

    python tools/cuda/checked_nvcc.py nvcc <arguments>          (CMAKE_CUDA_COMPILER_LAUNCHER)

Beside the object OBJECT it leaves OBJECT.ptxas.json, what ptxas said of each kernel. Objects are kept in a folder
(DEEPINFER_CACHE/cuda, default ~/.cache/deepinfer/cuda) under a key of the compiler's version, the arguments (so the
architecture), the source and every header that it may include. Calls that compile nothing are passed on as they are.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from ptxas_report import read_ptxas, readable  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
HEADERS = (*sorted((ROOT / "kernels_cuda").glob("*.cuh")), ROOT / "hal/include/deepinfer/hal.h")


def main(command: list[str]) -> int:
    source = next((Path(one) for one in command if one.endswith(".cu")), None)
    if "-o" not in command or "-c" not in command or source is None:
        return subprocess.run(command, check=False).returncode
    made = Path(command[command.index("-o") + 1])
    kept = _cache() / _key(command, source)
    if _restore(kept, made, command):
        print(f"{source.name}: as it was built before")
        return 0
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    reports = read_ptxas(done.stdout + done.stderr)
    _pass_on(done.stdout + done.stderr)
    if done.returncode:
        return done.returncode
    bad = [(kernel.name, kernel.objection) for kernel in reports if kernel.objection]
    for name, objection in bad:
        print(f"{source.name}: error: kernel {readable(name)} {objection}", file=sys.stderr)
    if bad:
        made.unlink(missing_ok=True)
        return 1
    _report_of(made).write_text(json.dumps([kernel.to_dict() for kernel in reports], indent=1) + "\n", encoding="utf-8")
    _keep(kept, made, command)
    return 0


def _pass_on(text: str) -> None:
    """What the compiler said but for ptxas's figures, which the report has."""
    for line in text.splitlines():
        told = "warning" in line or "error" in line or "Warning" in line
        if told or not (line.startswith("ptxas info") or "bytes stack frame" in line):
            print(line, file=sys.stderr)


def _report_of(made: Path) -> Path:
    return made.with_name(made.name + ".ptxas.json")


# ---------------------------------------------------------------------------------------------------- the cache


def _cache() -> Path:
    base = os.environ.get("DEEPINFER_CACHE") or Path.home() / ".cache" / "deepinfer"
    return Path(base) / "cuda"


def _key(command: list[str], source: Path) -> str:
    """Of compiler, arguments and contents; paths count relative to the tree, so that checkouts share what they have in common."""
    digest = hashlib.sha256(subprocess.run([command[0], "--version"], capture_output=True, check=False).stdout)
    outputs = {command[command.index(flag) + 1] for flag in ("-o", "-MF", "-MT") if flag in command}
    for one in command[1:]:
        digest.update(b"\0" + (b"" if one in outputs else one.replace(str(ROOT), "ROOT").encode()))
    for path in (source, *HEADERS):
        digest.update(b"\0" + path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _files(made: Path, command: list[str]) -> dict[str, Path]:
    """What a compilation leaves: the object, its report, and the dependencies that CMake asked for."""
    found = {"object": made, "report": _report_of(made)}
    if "-MF" in command:
        found["dependencies"] = Path(command[command.index("-MF") + 1])
    return found


def _restore(kept: Path, made: Path, command: list[str]) -> bool:
    files = _files(made, command)
    if not all((kept / name).is_file() for name in files):
        return False
    for name, path in files.items():
        if name == "dependencies":
            text = (kept / name).read_text(encoding="utf-8")
            path.write_text(text.replace("@ROOT@", str(ROOT)).replace("@OBJECT@", str(made)), encoding="utf-8")
        else:
            shutil.copyfile(kept / name, path)
    return True


def _keep(kept: Path, made: Path, command: list[str]) -> None:
    """All files at once, by a rename, so that a build beside this one finds all or none; a full disk costs nothing but time."""
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
            for name, path in _files(made, command).items():
                if name == "dependencies":
                    text = path.read_text(encoding="utf-8").replace(str(made), "@OBJECT@").replace(str(ROOT), "@ROOT@")
                    (Path(folder) / name).write_text(text, encoding="utf-8")
                else:
                    shutil.copyfile(path, Path(folder) / name)
            if not kept.exists():
                shutil.copytree(folder, f"{folder}.whole")
                os.rename(f"{folder}.whole", kept)
    except OSError as error:
        print(f"not kept for the next build: {error}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
