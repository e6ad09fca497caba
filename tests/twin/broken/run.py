"""Runs broken kernels on their cards' cases and prints what caught each: run.py MODULE [NAME]..., JSON by name on stdout."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / part) for part in ("hal", "backends/cpu", "backends/ascend", "tests/conformance", "tests/twin")]

import torch  # noqa: E402
from deepinfer_hal.card import get_card  # noqa: E402

from broken.bugs import BUGS  # noqa: E402
from broken.build import Bug, load  # noqa: E402

SECONDS = 120  # a bug's time


def caught(bug: Bug, module) -> dict:
    """What the first case that is not right says: by whom it was caught, and the message."""
    from deepinfer_ascend import twin
    from deepinfer_ascend.backend import TWIN_INDEX, AscendBackend
    from harness import Mismatch, run_case

    card = get_card(bug.op)
    kinds = "".join(twin._KINDS[arg.kind] for arg in card.signature)
    kernel = module.bind(bug.symbol, kinds, list(card.arg_names))
    stream = module.Stream(cores=bug.cores)

    def run(*args, **named):
        kernel(*args, **named, stream=stream)

    def prepare(role, canonical):
        return AscendBackend().prepare_weight(TWIN_INDEX, role, canonical)

    wanted = [case for case in card.enumerate_cases() if not bug.cases or any(part in case.id for part in bug.cases)]
    for case in (*bug.more, *wanted):
        try:
            run_case(card, case, run, prepare=prepare)
        except Mismatch as error:
            by = "twin" if "raised BackendError" in str(error) else "case"
            return {"by": by, "case": case.id, "message": str(error)}
    return {"by": "nobody", "case": "", "message": ""}


def in_child(bug: Bug, module) -> dict:
    """`caught`, in a child process."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(SECONDS)
            os.write(writing, json.dumps(caught(bug, module)).encode()[:60000])
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    return json.loads(text) if text else {"by": "nobody", "case": "", "message": f"ended with status {status}"}


def main() -> None:
    torch.set_num_threads(1)
    module = load(Path(sys.argv[1]))
    from deepinfer_ascend import twin

    twin.module()
    print(json.dumps({bug.name: in_child(bug, module) for bug in BUGS if bug.name in sys.argv[2:] or len(sys.argv) == 2}))


if __name__ == "__main__":
    main()
