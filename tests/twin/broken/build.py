"""Broken kernels: copies of the real sources with one text replaced, compiled into a twin of their own.

The copies are made from today's sources, so a replacement whose text is gone is an error, and a mistake stays a mistake of the
kernel that ships.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from deepinfer_hal.card import Case

ROOT = Path(__file__).parents[3]
KERNELS = ROOT / "kernels_ascendc"


@dataclass(frozen=True)
class Bug:
    """A mistake: `old` becomes `new` in `file`, which the kernel source of the op, `source`, is or includes.

    by: who notices, the "twin" by a report or a "case" of the card by its result; says: a regular expression of the message.
    cases: parts of the ids of the card's cases to run, all of the card's cases by default. more: cases to run before those.
    cores: cube cores.
    """

    name: str
    what: str
    op: str
    source: str
    file: str
    old: str
    new: str
    by: str
    says: str
    cases: tuple[str, ...] = ()
    cores: int = 2
    more: tuple[Case, ...] = ()

    @property
    def symbol(self) -> str:
        """The name of its C function behind `di_`."""
        return f"broken_{self.name}"


class Outdated(ValueError):
    """A replacement does not fit the sources any more."""


def sources_of(bug: Bug) -> dict[str, str]:
    """The bug's files by name: its source, and the headers beside the kernels. Raises Outdated."""
    texts = {path.name: path.read_text() for path in (*KERNELS.glob("*.h"), KERNELS / bug.source)}
    found = texts[bug.file].count(bug.old) if bug.file in texts else 0
    if found != 1:
        raise Outdated(f"{bug.name}: {bug.file} holds {found} times, not once: {bug.old}")
    texts[bug.file] = texts[bug.file].replace(bug.old, bug.new)
    exported = re.compile(rf"(DI_EXPORT int di_){bug.op}\(")
    text, replaced = exported.subn(rf"\g<1>{bug.symbol}(", texts[bug.source])
    if replaced != 1:
        raise Outdated(f"{bug.name}: {bug.source} exports di_{bug.op} {replaced} times")
    texts[bug.source] = re.sub(r"DI_EXPORT (int|void) di_(?!broken_)", rf"[[maybe_unused]] static \1 {bug.symbol}_other_", text)
    return texts


def write_sources(bugs: tuple[Bug, ...], folder: Path) -> None:
    """Every bug's sources in a folder of its own, written only where they changed; nothing else stays there."""
    wanted = {folder / bug.name / name: text for bug in bugs for name, text in sources_of(bug).items()}
    for path in folder.glob("*/*"):
        if path not in wanted:
            path.unlink()
    for path, text in wanted.items():
        if not path.exists() or path.read_text() != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


def build(bugs: tuple[Bug, ...], folder: Path) -> Path:
    """Compiles the bugs with the twin into `folder`; gives the module's file. Takes some minutes of one core the first time."""
    write_sources(bugs, folder / "sources")
    import pybind11

    subprocess.run(
        [
            "cmake",
            "-S",
            KERNELS,
            "-B",
            folder / "build",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DTWIN_KERNEL_FOLDERS={folder / 'sources'}",
            "-DTWIN_KERNEL_OPTIMISE=-O0",
            "-DTWIN_OPTIMISE=-O1",
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    subprocess.run(
        ["cmake", "--build", folder / "build", "--parallel", os.environ.get("TWIN_JOBS", "2")],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return next((folder / "build").glob("_twin*.so"))


def load(path: Path) -> ModuleType:
    """The broken kernels' module in place of the real twin. Only for a process that has not loaded that."""
    import deepinfer_ascend

    name = "deepinfer_ascend._twin"
    if name in sys.modules:
        raise RuntimeError("the real twin is loaded already")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[name] = deepinfer_ascend._twin = module
    return module
