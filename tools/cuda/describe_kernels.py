"""Writes the JSON file beside a library of CUDA C++ kernels: what it was built for, with which nvcc, from which sources.

    python tools/cuda/describe_kernels.py LIBRARY NVCC BUILD_FOLDER

Run after the library was linked; BUILD_FOLDER has the reports that checked_nvcc.py left.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "backends/cuda"), str(Path(__file__).resolve().parent)]

from deepinfer_cuda.kernel_sources import ARCHITECTURE, sources_digest  # noqa: E402
from ptxas_report import readable  # noqa: E402


def main(library: str, nvcc: str, build: str) -> int:
    told = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    version = re.search(r"V(\d+\.\d+\.\d+)", told)
    folder = ROOT / "kernels_cuda"
    names = {path.name for path in folder.glob("*.cu")}
    reports = [path for path in sorted(Path(build).rglob("*.ptxas.json")) if path.name.split(".cu.")[0] + ".cu" in names]
    kernels = {}
    for path in reports:
        for kernel in json.loads(path.read_text(encoding="utf-8")):
            if kernel["architecture"] != ARCHITECTURE:
                print(f"error: {path.name} is for {kernel['architecture']}, not {ARCHITECTURE}", file=sys.stderr)
                return 1
            about = {key: value for key, value in kernel.items() if key not in ("name", "architecture")}
            kernels[readable(kernel["name"])] = {"source": path.name.split(".cu.")[0] + ".cu", **about}
    document = {
        "architecture": ARCHITECTURE, "nvcc": version[1] if version else told.split("\n")[-1], "sources": sources_digest(folder),
        "kernels": kernels,
    }  # fmt: skip
    path = Path(library).with_suffix(".json")
    path.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
