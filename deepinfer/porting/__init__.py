"""Writes new backends: installable packages outside this tree that pass their own tests from the first minute on.

The files are templates under `torch_device/` (a chip that torch knows) and `c_runtime/` (a chip with only a C runtime).
`@NAME@`, `@CLASS@`, `@PACKAGE@`, `@TORCH_DEVICE@` and `@TORCH_MODULE@` are filled in, in paths too.
"""

from __future__ import annotations

import importlib.util
import keyword
from pathlib import Path

from deepinfer_hal.registry import backend_names

from deepinfer.errors import ConfigError

SUFFIX = ".template"


def new_backend(
    name: str, target: Path, *, torch_device: str = "cpu", torch_module: str = "", with_torch_device: bool = True
) -> list[Path]:
    """Writes the package of backend `name` into the folder `target`, and returns its files.

    torch_device: the device's name in torch; torch_module: what to import so that torch knows it ("" = nothing).
    with_torch_device=False: the host-memory template. ConfigError for an unfit or taken name, or a folder that is not empty.
    """
    if not (name.isascii() and name.isidentifier() and name == name.lower()) or keyword.iskeyword(name):
        raise ConfigError("name", f"{name!r} must be a lower-case Python identifier such as mychip")
    if taken := _taken(name):
        raise ConfigError("name", f"{name!r} {taken}; choose another, such as mychip")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError("dir", f"{target} exists and is not an empty folder; give a new one")
    values = {
        "NAME": name, "CLASS": f"{name.capitalize()}Backend", "PACKAGE": f"deepinfer_{name}", "TORCH_DEVICE": torch_device,
        "TORCH_MODULE": torch_module,
    }  # fmt: skip
    source = Path(__file__).parent / ("torch_device" if with_torch_device else "c_runtime")
    written = []
    for template in sorted(source.rglob("*" + SUFFIX)):
        path = target / _filled(str(template.relative_to(source)).removesuffix(SUFFIX), values)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_filled(template.read_text(encoding="utf-8"), values), encoding="utf-8")
        written.append(path)
    return written


def _taken(name: str) -> str:
    """Why a new backend may not have this name, "" if it may: installing it would overwrite a package that is there."""
    if name == "auto":
        return "stands for whichever backend is there"
    if name in backend_names():
        return "is an installed backend"
    return f"needs a package deepinfer_{name}, and there is one" if importlib.util.find_spec(f"deepinfer_{name}") else ""


def _filled(text: str, values: dict[str, str]) -> str:
    for key, value in values.items():
        text = text.replace(f"@{key}@", value)
    return text


def backend_lines(folder: Path) -> int:
    """Lines of backend Python in a port's folder: those that are not blank, tests and what pip builds left out."""
    files = [path for path in folder.rglob("*.py") if not {"tests", "build"} & set(path.relative_to(folder).parts)]
    return sum(1 for path in files for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
