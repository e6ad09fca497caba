"""Assembles every Triton kernel at V4.1's tiles for sm_90a and sm_100a, without a GPU, and checks the PTX.

    python tools/cuda/assemble_triton.py                       Triton 3.6.0 and the newest release, both targets
    python tools/cuda/assemble_triton.py --report FILE         ... and store the result
    python tools/cuda/assemble_triton.py --from FILE --evidence FILE   what a stored result shows of SM100, for the support table
    python tools/cuda/assemble_triton.py --target sm103        sm_103a, with the tiles of sm_100a
    python tools/cuda/assemble_triton.py --triton 3.6.0 --target sm100 --kernel "linear wq_a" features=64

The last form changes a tile: with 64 rows of weights, `tl.dot_scaled` becomes kind::f16 on SM100 and the check fails.
Exits 1 and names the kernels if one does not compile, spills, traps, or has another matrix instruction than design
section 5 asks for.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[1])]
from report import store  # noqa: E402
from triton_venvs import NEWEST, WRITTEN_FOR, triton_python  # noqa: E402


def assemble(version: str, target: str, kernels: list[str], changes: list[str]) -> list[dict]:
    """The rows of `triton_compile.py`. RuntimeError with its output if it does not finish."""
    command = [
        str(triton_python(version)),
        str(Path(__file__).with_name("triton_compile.py")),
        target,
        *kernels,
        *changes,
    ]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(f"triton_compile.py {target} with Triton {version} failed:\n{done.stderr[-4000:]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def evidence(rows: list[dict], report: str) -> dict:
    """Ops all of whose kernels assembled for sm_100a with every release, for `deepinfer hal table`."""
    made = [row for row in rows if row["target"] == "sm100"]
    bad = {row["problem"].split()[0] for row in made if row["objections"]}
    versions = sorted({row["triton"] for row in made})
    return {
        "kind": "deepinfer-hal-evidence", "backend": "cuda", "device": "SM100", "level": "assembles",
        "ops": sorted({row["problem"].split()[0] for row in made} - bad),
        "source": f"PTX and machine code for sm_100a by Triton {' and '.join(versions)}, checked ({report})",
    }  # fmt: skip


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--triton", action="append", help="a version; default both")
    parser.add_argument("--target", action="append", choices=("sm90", "sm100", "sm103"), help="default sm90 and sm100")
    parser.add_argument("--kernel", action="append", default=[], help="a problem by name; default all")
    parser.add_argument("--report", type=Path, help="where to store the JSON")
    parser.add_argument("--from", type=Path, dest="stored", help="a stored report to read instead of assembling")
    parser.add_argument("--evidence", type=Path, help="where to store what it shows of SM100")
    parser.add_argument("changes", nargs="*", help="field=value of the target, e.g. features=64")
    options = parser.parse_args(arguments)
    if options.stored:
        rows = json.loads(options.stored.read_text(encoding="utf-8"))["kernels"]
        found = evidence(rows, options.stored.as_posix())
        options.evidence.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        return 0
    rows = []
    for version in options.triton or (WRITTEN_FOR, NEWEST):
        for target in options.target or ("sm90", "sm100"):
            made = assemble(version, target, options.kernel, options.changes)
            wrong = [row for row in made if row["objections"]]
            print(
                f"Triton {version}, {target}: {len(made) - len(wrong)} of {len(made)} kernels assemble as they should"
            )
            for row in wrong:
                print(f"  {row['problem']} ({row['kernel']}): {'; '.join(row['objections'])}")
            rows += made
    if options.report:
        command = shlex.join(["python", "tools/cuda/assemble_triton.py", *arguments])
        store(options.report, command, {"kernels": rows})
    return 1 if not rows or any(row["objections"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
