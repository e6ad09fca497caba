"""The toy chip's own software, as a vendor would ship it: a C runtime and the chip as the torch device `toychip`.

`import toychip` registers the device. Its memory is really apart: the host faults wherever it touches a device address.
"""

import sys
from pathlib import Path

import torch

FOLDER = Path(__file__).parent
RUNTIME = FOLDER / "libtoychip.so"
"""The C runtime (runtime.h)."""


def device_count() -> int:
    """Toy chips in this machine."""
    return 1


def is_available() -> bool:
    """Whether the chip can be used."""
    return True


def is_initialized() -> bool:
    """The chip needs no initialising."""
    return True


def current_device() -> int:
    """Index of the current chip."""
    return 0


def aten_ops() -> list[str]:
    """The aten ops that the chip has kernels for, without overloads."""
    lines = (FOLDER / "aten_ops.txt").read_text(encoding="ascii").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def _register() -> None:
    library = FOLDER / "libtoychip_torch.so"
    if not library.is_file():
        raise ImportError(f"{library} is not built; install examples/toychip with a C++ compiler at hand")
    torch.utils.rename_privateuse1_backend("toychip")
    torch.ops.load_library(str(library))
    torch._register_device_module("toychip", sys.modules[__name__])
    torch.ops.toychip.allow(aten_ops())


_register()
