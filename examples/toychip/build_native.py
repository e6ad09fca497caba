"""Compiles the three libraries of the toy chip: `python build_native.py FOLDER` (setup.py calls it too).

    toychip/libtoychip.so                        the chip's C runtime
    toychip/libtoychip_torch.so                  the chip as a torch device; needs torch's headers
    deepinfer_toychip/libdeepinfer_toychip.so    the port's kernels; no torch in it
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
COMMON = ("-std=c++20", "-fPIC", "-shared", "-Wall")
KERNELS = ("-O2", "-ftree-vectorize", "-ffp-contract=off")


def compiler() -> str:
    """The C++ compiler: $CXX, or c++, or g++."""
    found = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if not found:
        raise RuntimeError("the toy chip needs a C++ compiler; set CXX or install g++")
    return found


def build(target: Path) -> None:
    """Builds into `target`/toychip and `target`/deepinfer_toychip."""
    import torch
    from deepinfer_hal.c_abi import include_dir

    torch_folder = Path(torch.__file__).parent
    vendor, port = target / "toychip", target / "deepinfer_toychip"
    for folder in (vendor, port):
        folder.mkdir(parents=True, exist_ok=True)
    _run([*COMMON, "-O2", HERE / "toychip" / "runtime.cpp", "-o", vendor / "libtoychip.so"])
    link = [f"-L{vendor}", "-ltoychip"]
    torch_includes = [f"-I{torch_folder / 'include'}", f"-I{torch_folder / 'include' / 'torch' / 'csrc' / 'api' / 'include'}"]
    torch_part = [
        *COMMON, "-O1", "-DAT_PER_OPERATOR_HEADERS", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        *torch_includes, HERE / "toychip" / "torch_device.cpp", "-o", vendor / "libtoychip_torch.so", *link,
        f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10", "-Wl,-rpath,$ORIGIN",
    ]  # fmt: skip
    kernels = [
        *COMMON, *KERNELS, f"-I{include_dir()}", *sorted((HERE / "deepinfer_toychip" / "kernels").glob("*.cpp")), "-o",
        port / "libdeepinfer_toychip.so", *link, "-Wl,-rpath,$ORIGIN/../toychip",
    ]  # fmt: skip
    _run(torch_part)
    _run(kernels)


def _run(arguments: list) -> None:
    subprocess.run([compiler(), *map(str, arguments)], check=True)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
