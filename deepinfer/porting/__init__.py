"""Writes new backends: installable packages outside this tree that pass their own tests from the first minute on.

The files are templates under `torch_device/` (a chip that torch knows) and `c_runtime/` (a chip with only a C runtime).
`@NAME@`, `@CLASS@`, `@PACKAGE@`, `@TORCH_DEVICE@` and `@TORCH_MODULE@` are filled in, in paths too.
"""

from __future__ import annotations

import keyword
from pathlib import Path

from deepinfer.errors import ConfigError

SUFFIX = ".template"


def new_backend(
    name: str, target: Path, *, torch_device: str = "cpu", torch_module: str = "", with_torch_device: bool = True
) -> list[Path]:
    """Writes the package of backend `name` into the folder `target`, and returns its files.

    torch_device: the device's name in torch; torch_module: what to import so that torch knows it ("" = nothing).
    with_torch_device=False: the host-memory template. Raises ConfigError for an unfit name or a folder that is not empty.
    """
    if not (name.isascii() and name.isidentifier() and name == name.lower()) or keyword.iskeyword(name):
        raise ConfigError("name", f"{name!r} must be a lower-case Python identifier such as mychip")
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


def _filled(text: str, values: dict[str, str]) -> str:
    for key, value in values.items():
        text = text.replace(f"@{key}@", value)
    return text


def backend_lines(folder: Path) -> int:
    """Lines of backend Python in a port's folder: those that are not blank, tests and what pip builds left out."""
    files = [path for path in folder.rglob("*.py") if not {"tests", "build"} & set(path.relative_to(folder).parts)]
    return sum(1 for path in files for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
