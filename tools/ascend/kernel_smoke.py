"""One case of every op with an AscendC kernel, for its values alone: kernel_smoke.py [BACKEND] [OP ...]

The step between "the instructions are as assumed" and the whole conformance suite. BACKEND: ascend:0 (default) or
ascend:twin. Runs in the suite's worker processes, so a kernel that takes the device down does not take the others along.
Exit 0: all that ran are right; 1: some are not; 2: nothing ran.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / part) for part in (".", "hal", "backends/ascend", "backends/cpu", "backends/triton")]

from deepinfer_ascend import error_codes  # noqa: E402
from deepinfer_hal.card import get_card  # noqa: E402
from deepinfer_hal.conformance import Plan, run_suite  # noqa: E402
from deepinfer_hal.conformance.execute import first_with_rows  # noqa: E402
from deepinfer_hal.errors import BackendUnavailable  # noqa: E402
from deepinfer_hal.registry import open_backend  # noqa: E402

CHECKS = ("values", "discrete", "untouched")


def main(arguments: list[str]) -> int:
    spec, ops = (arguments or ["ascend:0"])[0], arguments[1:]
    try:
        backend, index = open_backend(spec)
    except BackendUnavailable as error:
        print(f"error: {error}")
        return 2
    served = sorted({kernel.op for kernel in backend.kernels(index) if kernel.provider == "ascendc"})
    served = [op for op in served if not ops or op in ops]
    if not served:
        print(f"{spec} has no AscendC kernel to try")
        return 2
    cases = tuple(filter(None, (first_with_rows(card, card.enumerate_cases()) for card in map(get_card, served))))
    plan = Plan(spec=spec, ops=tuple(served), cases=cases, checks=CHECKS)
    run = run_suite(plan, listen=lambda result: print(result.line(), flush=True))
    for result in run.results:
        for text in result.failures.values():
            for meaning in error_codes.explain(text):
                print("\n".join(meaning.lines()))
    counts = ", ".join(f"{count} {verdict}" for verdict, count in run.counts().items())
    print(f"{spec}: {len(served)} ops, {counts} in {run.seconds:.0f} s")
    return run.exit_status()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
