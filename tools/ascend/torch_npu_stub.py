"""A stand-in for the C libraries of CANN, just enough for `import torch_npu` on a machine without it.

The undefined acl, HCCL, profiler and runtime symbols of torch_npu's libraries become functions that return 0, in the
libraries that the loader asks for. Nothing of CANN is used and nothing can run on it: it serves schemas and meta
kernels.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

LIBRARIES = ("libascendcl", "libhccl", "libacl_op_compiler", "libge_runner", "libgraph", "libacl_tdt_channel")
_NEEDERS = ("lib/libtorch_npu.so", "lib/libtensorpipe.so", "lib/libnpu_profiler.so")
_OURS = re.compile(r"(acl|Hccl|Msprof|rt(?=[A-Z]))\w+")


def missing_symbols(torch_npu: Path) -> list[str]:
    """C symbols that torch_npu's libraries expect of CANN, sorted."""
    found: set[str] = set()
    for library in [*(torch_npu / name for name in _NEEDERS), *torch_npu.glob("_C*.so")]:
        listed = _nm(library)
        names = (line.split()[-1].split("@")[0] for line in listed.splitlines() if line.strip())
        found.update(name for name in names if _OURS.fullmatch(name))
    return sorted(found)


def _nm(library: Path) -> str:
    command = ["nm", "-D", "--undefined-only", str(library)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def build(torch_npu: Path, folder: Path) -> list[str]:
    """Makes the stand-in libraries and the folders that torch_npu looks for; returns the symbols filled in."""
    symbols = missing_symbols(torch_npu)
    (folder / "lib").mkdir(parents=True, exist_ok=True)
    for name in ("runtime", "compiler", "opp"):
        (folder / name).mkdir(exist_ok=True)
    source = folder / "stub.c"
    for library in LIBRARIES:
        body = (
            "".join(f"long {symbol}(void) {{ return 0; }}\n" for symbol in symbols) if library == LIBRARIES[0] else ""
        )
        source.write_text(body or "typedef int nothing;\n", encoding="utf-8")
        out = folder / "lib" / f"{library}.so"
        subprocess.run([os.environ.get("CC", "cc"), "-shared", "-fPIC", "-o", str(out), str(source)], check=True)
    return symbols


def environment_of(folder: Path, torch: Path) -> dict[str, str]:
    """The variables under which torch_npu imports with the stand-in."""
    return {
        **os.environ,
        "ASCEND_HOME_PATH": str(folder),
        "ASCEND_OPP_PATH": str(folder / "opp"),
        "LD_LIBRARY_PATH": f"{folder / 'lib'}:{torch / 'lib'}",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }
