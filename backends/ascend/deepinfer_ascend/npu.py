"""What an Ascend NPU needs on this machine, and what of it is missing: by name, version wanted and version found.

Nothing here has run with an NPU: the state of the device `npu` is `written`. Nothing here imports torch_npu but
`devices`, which `probe` calls once all parts are there.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from deepinfer_hal.parts import Part

TORCH_NPU_WANTED = "2.13"
CANN_WANTED = (9, 0)
SOCS = ("Ascend950",)

_DRIVER_INFO = Path("/usr/local/Ascend/driver/version.info")
_TOOLKITS = ("/usr/local/Ascend/cann", "/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/latest")
_DEVICES = Path("/dev")


def _version_in(path: Path) -> str | None:
    try:
        match = re.search(r"^(?:Version|version)\s*=\s*\[?([\w.\-]+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return None
    return match.group(1) if match else "a version file without a version"


def _driver() -> Part:
    found = _version_in(_DRIVER_INFO)
    return Part("driver", "the Ascend HDK driver", found or f"none ({_DRIVER_INFO} is absent)", found is not None)


def _device_nodes() -> Part:
    nodes = sorted(path.name for path in _DEVICES.glob("davinci[0-9]*"))
    return Part("device nodes", f"{_DEVICES}/davinci0 or another", ", ".join(nodes) or "none", bool(nodes))


def toolkit_version() -> str | None:
    """CANN's version as its files tell it, or None."""
    folders = [folder for folder in (os.environ.get("ASCEND_HOME_PATH"), *_TOOLKITS) if folder]
    names = ("version.cfg", "compiler/version.info", "runtime/version.info")
    versions = [_version_in(Path(folder, name)) for folder in folders for name in names]
    return next((version for version in versions if version), None)


def _toolkit() -> Part:
    found = toolkit_version()
    numbers = tuple(int(part) for part in re.findall(r"\d+", found or "")[:2])
    wanted = ".".join(map(str, CANN_WANTED))
    return Part("CANN", f"{wanted} or later", found or "none (ASCEND_HOME_PATH is not set)", numbers >= CANN_WANTED)


def torch_npu_version() -> str | None:
    """torch_npu's version as it was installed, or None."""
    try:
        return importlib.metadata.version("torch_npu")
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch_npu() -> Part:
    ours, found = torch.__version__.partition("+")[0], torch_npu_version()
    wanted = f"{TORCH_NPU_WANTED}.* beside torch {ours}"
    if found is None:
        return Part("torch_npu", wanted, "none (it is not installed)", False)
    pair = _minor(found) == _minor(ours)
    told = found if pair else f"{found}, which belongs to torch {_minor(found)}"
    return Part("torch_npu", wanted, told, pair and _minor(found) == TORCH_NPU_WANTED)


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def parts() -> list[Part]:
    """Driver, device nodes, toolkit and torch binding, in the order in which they are installed."""
    return [_driver(), _device_nodes(), _toolkit(), _torch_npu()]


def unavailable_reason() -> str | None:
    """Why no NPU can be used, naming every part that is missing; None if one can be asked for."""
    missing = [str(part) for part in parts() if not part.ok]
    return "; ".join(missing) or None


def soc_part(names: Sequence[str]) -> Part:
    """Whether one of these chips is one that the kernels are built for."""
    wanted = f"{' or '.join(SOCS)}*, which dav-3510 code runs on"
    return Part("SoC", wanted, ", ".join(dict.fromkeys(names)) or "none", any(name.startswith(SOCS) for name in names))


@dataclass(frozen=True)
class NpuDevice:
    """One NPU as torch_npu tells it: its index there, name, bytes of memory, cube and vector cores."""

    index: int
    name: str
    memory_bytes: int
    cube_cores: int
    vector_cores: int


def devices() -> list[NpuDevice]:
    """Every device that torch_npu sees, of whatever chip; none while a part is missing. Imports torch_npu."""
    if unavailable_reason():
        return []
    import torch_npu

    return [_describe(index, torch_npu.npu.get_device_properties(index)) for index in range(torch_npu.npu.device_count())]


def _describe(index: int, properties: Any) -> NpuDevice:
    cores = properties.cube_core_num, properties.vector_core_num
    return NpuDevice(index, properties.name, properties.total_memory, *cores)


def usable(found: Sequence[NpuDevice]) -> list[NpuDevice]:
    """The Ascend 950s among them."""
    return [device for device in found if device.name.startswith(SOCS)]
