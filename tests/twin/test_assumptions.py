"""The page of assumptions says what the twin's table says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_is_up_to_date():
    subprocess.run([sys.executable, str(ROOT / "tools/ascend/assumptions.py"), "--check"], check=True)


def test_what_is_least_sure_comes_first_in_every_part():
    page = (ROOT / "docs/ascend-assumptions.md").read_text(encoding="utf-8")
    order = ("assumed", "prose", "example")
    parts = page.split("\n#")[1:]
    found = [[order.index(grade) for grade in re.findall(r"\| (assumed|prose|example) \|", part)] for part in parts]
    assert sum(bool(grades) for grades in found) == 6 and all(grades == sorted(grades) for grades in found)
