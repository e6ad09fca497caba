"""Checks every torch_npu call of the Ascend backend without an NPU: `python tools/ascend/check_torch_npu.py [report.json]`.

Makes the environment (torch_npu over this Python's torch) and a stand-in for CANN's C libraries on first use, then runs
`npu_calls.py` there. Exits 1 and names the calls if one is wrong or a mutant went unnoticed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[1])]
import torch_npu_stub  # noqa: E402
from ascend_venvs import torch_npu_python  # noqa: E402
from report import store  # noqa: E402
from virtual_environment import cache_folder  # noqa: E402

COMMAND = "python tools/ascend/check_torch_npu.py"


def run() -> dict:
    """The report of `npu_calls.py`. RuntimeError with its output if it does not finish."""
    python = torch_npu_python()
    package = next((python.parents[1] / "lib").glob("python*/site-packages/torch_npu"))
    folder = cache_folder() / "cann-stub-torch_npu"
    symbols = torch_npu_stub.build(package, folder)
    done = subprocess.run(
        [str(python), str(Path(__file__).with_name("npu_calls.py"))], capture_output=True, text=True, check=False,
        env=torch_npu_stub.environment_of(folder, Path(torch.__file__).parent),
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"npu_calls.py failed:\n{done.stdout}{done.stderr}")
    return {**json.loads(done.stdout.splitlines()[-1]), "stub_symbols": len(symbols)}


def failures(report: dict) -> list[str]:
    """Sentences for everything that makes the check fail."""
    found = list(report["runtime_objections"])
    found += [f"mutant not noticed: {what}" for what in report["runtime_mutants_missed"]]
    for row in report["vendor_ops"]:
        found += [f"{row['op']}: {objection}" for objection in row["objections"]]
        found += [f"{row['op']}: mutant not noticed: {what}" for what in row.get("mutants_missed", [])]
    return found


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, nargs="?", help="where to store the JSON")
    options = parser.parse_args(arguments)
    report = run()
    if options.report:
        store(options.report, COMMAND, report)
    wrong = failures(report)
    caught = sum(row.get("mutants", 0) - len(row.get("mutants_missed", [])) for row in report["vendor_ops"])
    caught += report["runtime_mutants"] - len(report["runtime_mutants_missed"])
    checked = f"{len(report['vendor_ops'])} vendor ops, {len(report['runtime_calls'])} runtime calls"
    print(f"torch_npu {report['torch_npu']}: {checked}, {caught} mutants caught, {len(wrong)} failures")
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
