"""Whole kernels with one mistake each are caught, by a report of the twin or by a conformance case; broken/bugs.py lists them.

Compiling them takes about a minute of one core, so the run is marked `full`; that each still fits today's sources is not.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "hal"), str(HERE)]

from broken.bugs import BUGS  # noqa: E402
from broken.build import Outdated, build, sources_of  # noqa: E402


def test_there_are_at_least_25_and_each_has_its_own_name():
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 25


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_fits_the_sources_of_today(bug):
    texts = sources_of(bug)
    assert bug.new in texts[bug.file]
    assert f"di_{bug.symbol}(" in texts[bug.source]


def test_a_replacement_that_does_not_fit_is_an_error():
    (bug, *_) = BUGS
    gone = type(bug)(**{**bug.__dict__, "old": "no such text"})
    with pytest.raises(Outdated, match="holds 0 times, not once: no such text"):
        sources_of(gone)


@pytest.mark.full
def test_each_is_caught_by_whom_the_list_names():
    module = build(BUGS, ROOT / "build/broken")
    run = subprocess.run([sys.executable, HERE / "broken/run.py", module], check=True, capture_output=True, text=True)
    found = json.loads(run.stdout)
    assert set(found) == {bug.name for bug in BUGS}
    wrong = {
        bug.name: found[bug.name]
        for bug in BUGS
        if found[bug.name]["by"] != bug.by or not re.search(bug.says, found[bug.name]["message"])
    }
    assert not wrong
