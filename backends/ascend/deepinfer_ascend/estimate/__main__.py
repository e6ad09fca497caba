"""python -m deepinfer_ascend.estimate: estimates of AscendC kernels at V4.1's shapes, from the twin's traces."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

from deepinfer_hal.errors import DeepInferError

from deepinfer_ascend import twin
from deepinfer_ascend.estimate import CHIPS, as_text, estimate, find_chip, find_problem, problems
from deepinfer_ascend.estimate.costs import TABLE


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m deepinfer_ascend.estimate",
        description="Estimate of a kernel's time on an Ascend 950, from a trace of the twin. Nothing is measured on a chip.",
    )
    p.add_argument("--op", help="op by the name of its card, e.g. sparse_attention; more than one separated by commas")
    p.add_argument("--shape", help="shape by name (default: the first of the op); 'list' prints the names")
    p.add_argument("--soc", default="950DT", help=f"sheet of the chip: {', '.join(CHIPS)} (default: %(default)s)")
    p.add_argument("--no-sensitivity", action="store_true", help="leave out the table of costs 25 %% lower and higher")
    p.add_argument("--json", type=Path, metavar="FILE", help="also write the estimates to a file, keeping other ones in it")
    p.add_argument("--timeline", type=Path, metavar="FILE", help="write the first cores' replay for a browser's trace viewer")
    p.add_argument("--costs", action="store_true", help="print the cost table with its sources and stop")
    return p


def store(path: Path, found: list[dict], command: str) -> None:
    """Adds estimates to a file; those of the same op, shape and chip are replaced."""
    key = ("op", "shape", "chip")
    kept = json.loads(path.read_text())["estimates"] if path.exists() else []
    new = {tuple(e[k] for k in key) for e in found}
    rest = [e for e in kept if tuple(e[k] for k in key) not in new]
    every = sorted(rest + [{"command": command, **e} for e in found], key=lambda e: tuple(e[k] for k in key))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"what": "estimate", "estimates": every}, indent=1) + "\n")


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.costs:
        for entry in TABLE:
            print(f"{entry.name:18s} {entry.value:8g} {entry.unit:38s} {entry.source}")
        return 0
    if not options.op:
        parser().error("--op is needed")
    if twin.module() is None:
        print(twin.unavailable_reason(), file=sys.stderr)
        return 1
    found = []
    try:
        chip = find_chip(options.soc)
        for op in options.op.split(","):
            if options.shape == "list":
                print("\n".join(f"{op} --shape {p.shape}: {p.cut}" for p in problems(op)))
                continue
            problem = find_problem(op, options.shape or problems(op)[0].shape)
            found.append(estimate(problem, chip, not options.no_sensitivity, options.timeline))
            print(as_text(found[-1]))
    except DeepInferError as error:
        print(f"no estimate: {error}", file=sys.stderr)
        return 2
    if options.json is not None and found:
        store(options.json, found, "python -m deepinfer_ascend.estimate " + shlex.join(arguments or sys.argv[1:]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
