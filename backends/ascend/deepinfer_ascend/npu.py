"""What an Ascend NPU needs on this machine, and what of it is missing: by name, version wanted and version found.

Nothing here has run with an NPU: the state of the device `npu` is `written`.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch

TORCH_NPU_WANTED = "2.13"
CANN_WANTED = (9, 0)
SOCS = ("Ascend950",)

_DRIVER_INFO = Path("/usr/local/Ascend/driver/version.info")
_TOOLKITS = ("/usr/local/Ascend/cann", "/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/latest")


@dataclass(frozen=True)
class Part:
    """One thing that an NPU needs: its name, what is wanted, what was found, and whether that will do."""

    name: str
    wanted: str
    found: str
    ok: bool

    def __str__(self) -> str:
        return f"{self.name}: wanted {self.wanted}, found {self.found}"


def _version_in(path: Path) -> str | None:
    try:
        match = re.search(r"^(?:Version|version)\s*=\s*\[?([\w.\-]+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return None
    return match.group(1) if match else "a version file without a version"


def _driver() -> Part:
    found = _version_in(_DRIVER_INFO)
    return Part("driver", "the Ascend HDK driver", found or f"none ({_DRIVER_INFO} is absent)", found is not None)


def _toolkit() -> Part:
    folders = [folder for folder in (os.environ.get("ASCEND_HOME_PATH"), *_TOOLKITS) if folder]
    names = ("version.cfg", "compiler/version.info", "runtime/version.info")
    versions = [_version_in(Path(folder, name)) for folder in folders for name in names]
    found = next((version for version in versions if version), None)
    numbers = tuple(int(part) for part in re.findall(r"\d+", found or "")[:2])
    wanted = ".".join(map(str, CANN_WANTED))
    return Part("CANN", f"{wanted} or later", found or "none (ASCEND_HOME_PATH is not set)", numbers >= CANN_WANTED)


def _torch_npu() -> Part:
    wanted = f"{TORCH_NPU_WANTED}.* beside torch {torch.__version__.partition('+')[0]}"
    try:
        found = importlib.metadata.version("torch_npu")
    except importlib.metadata.PackageNotFoundError:
        return Part("torch_npu", wanted, "none (it is not installed)", False)
    return Part("torch_npu", wanted, found, found.startswith(TORCH_NPU_WANTED))


def parts() -> list[Part]:
    """Driver, toolkit and torch binding, in the order in which they are installed."""
    return [_driver(), _toolkit(), _torch_npu()]


def unavailable_reason() -> str | None:
    """Why no NPU can be used, naming every part that is missing; None if one can be asked for."""
    missing = [str(part) for part in parts() if not part.ok]
    return "; ".join(missing) or None


def devices() -> list[tuple[str, int]]:
    """Name and memory of every Ascend 950 that torch_npu sees; other chips are left out. Imports torch_npu."""
    if unavailable_reason():
        return []
    import torch_npu

    found = []
    for index in range(torch_npu.npu.device_count()):
        properties = torch_npu.npu.get_device_properties(index)
        found.append((properties.name, properties.total_memory))
    return [one for one in found if one[0].startswith(SOCS)]
