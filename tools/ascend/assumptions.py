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
GRADES = ("assumed", "prose", "example")
HEAD = """# What the twin assumes about an Ascend 950

Written by `tools/ascend/assumptions.py` from `kernels_ascendc/twin/include/twin/instructions.def`; change that file
instead. Pages are listed in docs/ascend-sources.md. Grades: `example`, a published input with its output is among the
tests; `prose`, the page says it in words; `assumed`, it does not, or the page was not read. Nothing here was compared
with a chip.

The order is that in which to ask a chip (docs/ascend-bringup.md): what everything else rests on comes first, and in
each part what is least sure. `run_probes.py compare ... --only NAME` asks about a part.
"""
PARTS = {
    "sync": ("Copies, flags and barriers: every other probe loads and stores by these", "sync"),
    "scalar": ("Queues and scalar accesses", "scalar"),
    "vector": ("Vectors in memory", "vector, --only other"),
    "register": ("Vectors in registers", "reg, --only math"),
    "cube": ("The cube", "cube"),
}
_SYNC = ("SetFlag", "WaitFlag", "PipeBarrier", "SyncAll", "CrossCoreSetFlag", "CrossCoreWaitFlag", "DataCopy", "DataCopyPad")
_REGISTER = ("LoadAlign", "StoreAlign", "LoadUnAlign", "StoreUnAlign", "LocalMemBar")
_CUBE = ("Nd2Nz", "Dn2Nz")


def part_of(name: str, pipe: str) -> str:
    """The key of PARTS to which an instruction belongs."""
    if name in _SYNC:
        return "sync"
    if name in _CUBE or pipe in ("MTE1", "M", "FIX"):
        return "cube"
    if name in _REGISTER or name.startswith("Reg"):
        return "register"
    return "vector" if pipe == "V" else "scalar"


def page() -> str:
    """The text of the page."""
    entries = ENTRY.findall(TABLE.read_text())
    rules = [entry for entry in entries if entry[0] == "RULE"]
    ops = [entry for entry in entries if entry[0] == "OP" and entry[1] not in ("None", "Wait", "Arrive", "Await")]
    count = {grade: sum(op[3] == grade for op in ops) for grade in ("example", "prose", "assumed")}
    lines = [HEAD, "## Rules", "", "| Rule | Grade | Page | What the twin does |", "|---|---|---|---|"]
    for _, name, _, grade, source, note in sorted(rules, key=lambda rule: GRADES.index(rule[3])):
        lines.append(f"| {name} | {grade} | {source} | {note} |")
    lines += ["", "## Instructions", "", f"{len(ops)} instructions: " + ", ".join(f"{n} {g}" for g, n in count.items()) + "."]
    for part, (title, only) in PARTS.items():
        mine = [op for op in ops if part_of(op[1], op[2]) == part]
        lines += ["", f"### {title} (`--only {only}`)", ""]
        lines += ["| Instruction | Pipe | Grade | Page | Not settled, or worth knowing |", "|---|---|---|---|---|"]
        for _, name, pipe, grade, source, note in sorted(mine, key=lambda op: GRADES.index(op[3])):
            lines.append(f"| {name} | {pipe} | {grade} | {source} | {note} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(0 if PAGE.read_text() == page() else f"{PAGE.name} is out of date")
    PAGE.write_text(page())
