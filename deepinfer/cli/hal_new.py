"""`deepinfer hal new`: writes a backend package to start a port from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def hal_new(
    name: Annotated[str, typer.Argument(help="Name of the backend, such as mychip.")],
    dir: Annotated[Path, typer.Argument(help="A folder that does not exist yet.")],
    torch_device: Annotated[str | None, typer.Option(help="The chip's device in torch; default: the host's.")] = None,
    torch_module: Annotated[str, typer.Option(help="Module to import so that torch knows that device.")] = "",
    no_torch_device: Annotated[bool, typer.Option("--no-torch-device", help="For a chip with only a C runtime.")] = False,
) -> int:
    """An installable package with a backend that runs every op and passes its own tests; docs/porting.md tells the rest."""
    from deepinfer.porting import backend_lines, new_backend

    if no_torch_device and (torch_device or torch_module):
        raise typer.BadParameter("--no-torch-device goes with neither --torch-device nor --torch-module")
    device = torch_device or "cpu"
    files = new_backend(name, dir, torch_device=device, torch_module=torch_module, with_torch_device=not no_torch_device)
    for path in files:
        print(path)
    print(f"{backend_lines(dir)} lines of backend Python; next: pip install -e {dir} && deepinfer hal ladder --backend {name}")
    return 0
