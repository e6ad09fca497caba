"""Lowers the Triton kernels at V4.1's tiles for two Ascend 950 chips, without an NPU and without CANN.

    python tools/ascend/lower_triton.py --quick                a part of the kernels
    python tools/ascend/lower_triton.py --report FILE          all of them, and store the result

A tile that is too large must fail with `overflow`, and is tried in every run. Exits 1 if a kernel that should be
lowered was not, or if the large tile was. `lower_kernels.py` says how it is done and what it cannot show.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[1])]
from ascend_venvs import lowering_python  # noqa: E402
from report import store  # noqa: E402

COMMAND = "python tools/ascend/lower_triton.py"
SOCS = ("Ascend950PR_9599", "Ascend950PR_9589")
QUICK = (
    "embedding_gather", "rms_norm", "rope", "stream_collapse", "hyper_connection_post", "dequantise fp8_32",
    "load_kv fp8_32", "unpermute", "permute", "linear router", "linear wq_a",
)  # fmt: skip
"""What the tests lower: eleven problems, two with a matrix product on the cube, about a minute of processor time."""
TOO_LARGE = ("quantise fp8_32", "columns=32768")


def lower(arguments: list[str]) -> list[dict]:
    """The rows of `lower_kernels.py`. RuntimeError with its output if it does not finish."""
    command = [str(lowering_python()), str(Path(__file__).with_name("lower_kernels.py")), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"lower_kernels.py failed:\n{done.stderr[-4000:]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only a part of the kernels")
    parser.add_argument("--soc", action="append", choices=SOCS, help="default both")
    parser.add_argument("--report", type=Path, help="where to store the JSON")
    options = parser.parse_args(arguments)
    socs = options.soc or list(SOCS)
    rows = lower([*socs, *(QUICK if options.quick else ())])
    wrong = [row for row in rows if row["objections"]]
    kernels = {row["kernel"] for row in rows if not row["objections"]}
    print(f"{len(rows) - len(wrong)} of {len(rows)} lowered: {len(kernels)} kernels for {', '.join(socs)}")
    for row in wrong:
        print(f"  {row['problem']} ({row['kernel']}) for {row['soc']}: {'; '.join(row['objections'])}")
    large = lower([socs[0], *TOO_LARGE])
    refused = all("overflow" in " ".join(row["objections"]) for row in large)
    print(f"too large a tile: {large[0]['objections'] or 'was lowered'}")
    if options.report:
        store(options.report, " ".join([COMMAND, *arguments]), {"kernels": rows, "too_large": large})
    return 0 if not wrong and refused else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
