"""Checks every AscendC kernel and probe with clang, against the manifest's declarations and with real address spaces.

    python tools/ascend/check_kernels.py [FILE.asc ...]

Each source is read twice in clang's CUDA mode. The device's pass makes `__gm__`, `__ubuf__`, ... different address spaces
and rejects what an `__aicore__` function may not call; what it says about functions of the host is left to the host's pass,
where address spaces are empty. Every kernel that a launch names is instantiated. Only syntax and types are checked: it is
not the vendor's compiler. Makes the environment with clang on first use; exits 1 and prints clang's words if a kernel is
wrong.
"""

from __future__ import annotations

import concurrent.futures
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[1])]
import api_manifest  # noqa: E402
from ascend_venvs import clang_python  # noqa: E402
from kernel_source import KERNELS, PROBES, ROOT, read  # noqa: E402

HEADERS = Path(__file__).with_name("clang")
PASSES = {
    "device": ["-fcuda-is-device", "-triple", "nvptx64-nvidia-cuda", "-DDI_DEVICE_PASS"],
    "host": ["-triple", "x86_64-unknown-linux-gnu"],
}
_ERROR = re.compile(r"^(?P<path>[^\s:][^:\n]*):(?P<line>\d+):\d+: (?:fatal )?error: (?P<text>.*)$", re.MULTILINE)
_CALLER = re.compile(r"^(?P<path>[^\s:][^:\n]*):(?P<line>\d+):\d+: note: in instantiation of .* requested here$", re.MULTILINE)


@dataclass(frozen=True)
class Finding:
    """One error of clang's, at the line of a source that it stands on."""

    path: Path
    line: int
    which: str
    text: str

    def __str__(self) -> str:
        return f"{self.path.name}:{self.line}: {self.which} pass: {self.text}"


class Clang:
    """clang with the declarations of the manifest; use it as a context, which holds the generated header."""

    def __init__(self) -> None:
        package = next((clang_python().parents[1] / "lib").glob("python*/site-packages/ziglang"))
        self._program = [str(package / "zig"), "clang", "-cc1"]
        self._folder = tempfile.TemporaryDirectory(prefix="di_check_")
        (Path(self._folder.name) / "api.h").write_text(api_manifest.header(api_manifest.load()), encoding="utf-8")
        folders = [HEADERS, self._folder.name, KERNELS, PROBES, ROOT / "hal" / "include"]
        self._flags = [f"-I{folder}" for folder in folders] + [
            "-x", "cuda", "-std=c++17", "-fsyntax-only", "-ferror-limit", "0", "-ffreestanding", "-nostdsysteminc",
            "-internal-isystem", str(package / "lib" / "include"),
        ]  # fmt: skip

    def __enter__(self) -> Clang:
        return self

    def __exit__(self, *error: object) -> None:
        self._folder.cleanup()

    def check(self, path: Path) -> list[Finding]:
        """Everything that is wrong with a source, both passes. RuntimeError if clang itself fails."""
        hosts = _host_lines(path)
        return [
            Finding(where, line, which, text)
            for which in PASSES
            for where, line, text in self._errors(path, which)
            if which == "host" or line not in hosts.get(where.name, ())
        ]

    def _errors(self, path: Path, which: str) -> list[tuple[Path, int, str]]:
        command = [*self._program, *PASSES[which], *self._flags, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=KERNELS)
        found = [_place(m, done.stderr) for m in _ERROR.finditer(done.stderr)]
        if done.returncode and not found:
            raise RuntimeError(f"clang failed on {path.name}:\n{done.stderr[-2000:]}")
        return found


def _place(error: re.Match[str], said: str) -> tuple[Path, int, str]:
    """Where an error stands; one inside the declarations is the caller's, which clang names in a note behind it."""
    if Path(error["path"]).name == "api.h" and (note := _CALLER.search(said, error.end())):
        return Path(note["path"]), int(note["line"]), error["text"]
    return Path(error["path"]), int(error["line"]), error["text"]


def _host_lines(path: Path) -> dict[str, set[int]]:
    """Lines inside of the host's functions, by file."""
    lines: dict[str, set[int]] = {}
    for file in (path, *KERNELS.glob("*.h"), *PROBES.glob("*.h")):
        for function in read(file).functions:
            if not function.is_device:
                lines.setdefault(file.name, set()).update(range(function.first_line, function.last_line + 1))
    return lines


def check(paths: list[Path]) -> list[Finding]:
    """Findings of several sources, two at a time."""
    with Clang() as clang, concurrent.futures.ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        found = [finding for findings in pool.map(clang.check, paths) for finding in findings]
    return list(dict.fromkeys(found))  # what a header has wrong is said once


def sources() -> list[Path]:
    """The kernels and the twin's probes, most of which the bring-up builds for a device."""
    return [*sorted(KERNELS.glob("*.asc")), *sorted(PROBES.glob("*.asc"))]


def main(arguments: list[str]) -> int:
    paths = [Path(argument).resolve() for argument in arguments] or sources()
    found = check(paths)
    print("\n".join(str(finding) for finding in found) or f"{len(paths)} sources, no objections")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
