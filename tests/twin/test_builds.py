"""A kernel's bits depend on no optimisation level and on no instruction level of the machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / part) for part in ("tools", "tools/ascend", "backends/ascend")]

import stored_outputs  # noqa: E402
from deepinfer_ascend import twin  # noqa: E402

pytestmark = pytest.mark.skipif(twin.module() is None, reason=str(twin.unavailable_reason()))
REPORT = ROOT / "reports" / "ascend" / "stored_outputs.json"


@pytest.fixture(scope="module")
def here():
    return stored_outputs.hashes()


def test_every_op_with_a_kernel_writes_something(here):
    assert {case.split("(")[0] for case in here} == set(stored_outputs.ops())
    assert len({one["outputs"] for one in here.values()}) > len(stored_outputs.ops())


def test_every_instruction_level_gives_the_same_bits(here):
    assert "base" in stored_outputs.levels()
    for level in stored_outputs.levels():
        assert stored_outputs.differences(here, stored_outputs.hashes(level)) == [], level


def test_a_bit_that_differs_and_a_missing_case_are_told():
    one = {"a()": {"inputs": "1", "outputs": "2"}, "b()": {"inputs": "1", "outputs": "2"}}
    other = {"a()": {"inputs": "1", "outputs": "3"}, "c()": {"inputs": "1", "outputs": "2"}}
    assert stored_outputs.differences(one, other) == ["b(): only one side has it", "c(): only one side has it", "a(): 2 and 3"]


@pytest.mark.index
@pytest.mark.timeout(900)
def test_a_twin_built_without_optimisation_gives_the_same_bits(here, tmp_path):
    built = stored_outputs.hashes_of(stored_outputs.build("-O0", tmp_path))
    assert stored_outputs.differences(here, built) == []


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_a_fully_optimised_twin_and_the_stored_report_agree(here, tmp_path):
    built = stored_outputs.hashes_of(stored_outputs.build("-O3", tmp_path))
    assert stored_outputs.differences(here, built) == []
    stored = json.loads(REPORT.read_text(encoding="utf-8"))
    assert stored["differences"] == [] and set(stored["builds"]) == set(stored_outputs.BUILDS)
    assert stored_outputs.differences(here, stored["kernels"]) == [], f"make the report again: {stored_outputs.COMMAND}"
