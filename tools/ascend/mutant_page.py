"""Writes docs/ascend-mutants.md from the stored report, the reasons of its survivors and the list of broken kernels.

python tools/ascend/mutant_page.py [--check]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / part) for part in ("hal", "tests/twin", "tools/ascend")]

from broken.bugs import BUGS  # noqa: E402
from mutants import CAUGHT  # noqa: E402
from surviving_mutants import SURVIVORS  # noqa: E402

REPORT, PAGE = ROOT / "reports/ascend/mutation.json", ROOT / "docs/ascend-mutants.md"

HEAD = """# Mutants of the AscendC kernels

Made by `python tools/ascend/mutant_page.py` from `reports/ascend/mutation.json`; edit the tools, not this page. Everything
here ran on the twin, nothing on an NPU.

## Mechanical mutants

`{command}` runs every kernel once more for each of its mutants, without compiling anything: the twin leaves out, or changes,
one instruction of the kernel's source every time it is reached. It took {seconds} s for {mutants} mutants of {sites} sites.

| kind | changed |
|---|---|
| SetFlag, WaitFlag | left out; event id one up, one down; the whole flag left out at all its ends |
| CrossCoreSetFlag, CrossCoreWaitFlag | the same |
| PipeBarrier, SyncAll, LocalMemBar | left out |
| EnQue, DeQue, FreeTensor | left out |
| InitBuffer | one buffer more, one less |
| UpdateMask, CreateMask, SetVectorMask | the full mask instead; only where the mask is ever partial |

A site is a line of a kernel, by the launched function that reaches it; a helper that takes `DI_CALLER` has one for each use.
For a kernel a few small conformance cases run, so chosen that its sites are reached several times on a core, on one and on
two cube cores, and with another seed; what survives them meets all other cases, cases with bad rows, and cases of several ranks.
The unchanged kernels report nothing in any of them, or the run stops.

A mutant is caught if the twin reports something or a result has other bits. It counts as named if the report holds the site's
file and line (`site`), or the ends of what it orders (`ends`): the other half of the pair, two unordered instructions of
which the earlier is on the pipe that sets or the later on the pipe that waits, the flag whose id was taken, or the
barrier that is missing. `elsewhere` is a report of something else, `value` a wrong result without a report. The bar is 95 %
named; `tests/twin/test_kernel_mutants.py` holds the stored report to it, and a sample of mutants runs in CI.

"""


def table(report: dict) -> list[str]:
    """The counts by kernel."""
    outcomes = (*CAUGHT, "survived", "crashed", "hung")
    lines = [f"| kernel | sites | mutants | {' | '.join(outcomes)} | named |", f"|---|{'---|' * (len(outcomes) + 3)}"]
    for name, row in [*sorted(report["kernels"].items()), ("all", report["total"])]:
        counts = [row["outcomes"].get(outcome, 0) for outcome in outcomes]
        share = (counts[0] + counts[1]) / row["mutants"]
        cells = " | ".join(str(n) if n else "" for n in counts)
        lines.append(f"| {name} | {row['sites']} | {row['mutants']} | {cells} | {share:.1%} |")
    return lines


def survivors(report: dict) -> list[str]:
    """Each reason with the mutants that it stands for."""
    left = [r for r in report["results"] if r["outcome"] not in ("site", "ends")]
    lines = ["| mutants | outcome | why |", "|---|---|---|"]
    for why in dict.fromkeys(entry.why for entry in SURVIVORS):
        entries = [entry for entry in SURVIVORS if entry.why == why]
        found = [r for r in left if next((e.why for e in SURVIVORS if e.matches(r)), None) == why]
        if not found or not entries:
            continue
        places = [f"`{r['kernel']} {Path(r['file']).name}:{r['line']} {r['kind']} {r['detail']} {r['change']}`" for r in found]
        outcomes = ", ".join(sorted({r["outcome"] for r in found}))
        lines.append(f"| {'<br>'.join(places)} | {outcomes} | {why} |")
    return lines


def bugs() -> list[str]:
    """The broken kernels and who catches them."""
    lines = ["| mistake | op | file | caught by |", "|---|---|---|---|"]
    for bug in BUGS:
        by = "a report of the twin" if bug.by == "twin" else "a conformance case"
        lines.append(f"| {bug.name}: {bug.what} | {bug.op} | {bug.file} | {by} |")
    return lines


def page(report: dict) -> str:
    """The whole page."""
    total = report["total"]
    head = HEAD.format(command=report["command"], seconds=report["seconds"], mutants=total["mutants"], sites=total["sites"])
    left = "## Not named, and why\n\n"
    broken = (
        "## Whole kernels with one mistake\n\n"
        f"{len(BUGS)} mistakes as ports make them. `tests/twin/broken/bugs.py` holds each as one replaced text in the sources\n"
        "that ship, so they stay in step: a replacement that does not fit any more fails in CI. `pytest -m full\n"
        "tests/twin/test_broken_kernels.py` compiles them and checks who catches each, and what the message says.\n\n"
    )
    parts = [head + "\n".join(table(report)), left + "\n".join(survivors(report)), broken + "\n".join(bugs())]
    return "\n\n".join(parts) + "\n"


def main() -> int:
    text = page(json.loads(REPORT.read_text()))
    if "--check" in sys.argv[1:]:
        return int(PAGE.read_text() != text)
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
