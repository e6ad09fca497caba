"""Write docs/ascend-assumptions.md from the twin's table of instructions: assumptions.py [--check]."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "kernels_ascendc/twin/include/twin/instructions.def"
PAGE = ROOT / "docs/ascend-assumptions.md"
NOT_INSTRUCTIONS = ("None", "Wait", "Arrive", "Await", "VectorFunction")  # rows of traces
ENTRY = re.compile(r'^TWIN_(OP|RULE)\("?([^",]+)"?, (?:(\w+), )?(\w+), "([^"]*)", "([^"]*)"\)$', re.MULTILINE)
HEAD = """# What the twin assumes about an Ascend 950

Written by `tools/ascend/assumptions.py` from `kernels_ascendc/twin/include/twin/instructions.def`; change that file
instead. Pages are listed in docs/ascend-sources.md. Grades: `example`, a published input with its output is among the
tests; `prose`, the page says it in words; `assumed`, it does not, or the page was not read. Nothing here was compared
with a chip.
"""


def page() -> str:
    """The text of the page."""
    entries = ENTRY.findall(TABLE.read_text())
    rules = [entry for entry in entries if entry[0] == "RULE"]
    ops = [entry for entry in entries if entry[0] == "OP" and entry[1] not in NOT_INSTRUCTIONS]
    count = {grade: sum(op[3] == grade for op in ops) for grade in ("example", "prose", "assumed")}
    lines = [HEAD, "## Rules", "", "| Rule | Grade | Page | What the twin does |", "|---|---|---|---|"]
    lines += [f"| {name} | {grade} | {source} | {note} |" for _, name, _, grade, source, note in rules]
    lines += [
        "",
        "## Instructions",
        "",
        f"{len(ops)} instructions: " + ", ".join(f"{n} {g}" for g, n in count.items()) + ".",
    ]
    lines += ["", "| Instruction | Pipe | Grade | Page | Not settled, or worth knowing |", "|---|---|---|---|---|"]
    order = {"assumed": 0, "prose": 1, "example": 2}
    for _, name, pipe, grade, source, note in sorted(ops, key=lambda op: order[op[3]]):
        lines.append(f"| {name} | {pipe} | {grade} | {source} | {note} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(0 if PAGE.read_text() == page() else f"{PAGE.name} is out of date")
    PAGE.write_text(page())
