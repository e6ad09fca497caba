"""Kernels and backends that are wrong on purpose: every one is caught, for the reason that it names, and no right one is."""

from collections import Counter
from pathlib import Path

import pytest
from deepinfer_hal.card import get_card
from deepinfer_hal.conformance import CHECKS, CORE, run_op
from deepinfer_hal.conformance.cases import parse_case
from deepinfer_hal.conformance.device_cases import device_cases

from tests.conformance.mutants import contract, devices, page, processes, ranks
from tests.conformance.mutants.catalogue import KERNEL_MUTANTS

DOCS = Path(__file__).parents[2] / "docs" / "mutants.md"
OTHERS = (*devices.MUTANTS, *ranks.MUTANTS, *processes.MUTANTS)
ALONE = {mutant.killed_by[0]: mutant for mutant in reversed(KERNEL_MUTANTS) if len(mutant.killed_by) == 1}
RIGHT = {(mutant.case, mutant.right, "memory" in mutant.killed_by): mutant for mutant in KERNEL_MUTANTS}


def name_of(mutant):
    return mutant.name


@pytest.mark.parametrize("mutant", KERNEL_MUTANTS, ids=name_of)
def test_a_mutant_fails_the_checks_that_it_names_and_no_other(mutant):
    result = mutant.run()
    assert result.verdict == "fail", f"{mutant.name} survives: {mutant.why}"
    assert set(result.failures) == set(mutant.killed_by), result.failures


@pytest.mark.parametrize("check", CHECKS)
def test_without_this_check_a_mutant_lives(check):
    result = ALONE[check].run(check)
    assert result.verdict != "fail", result.failures


@pytest.mark.parametrize("mutant", RIGHT.values(), ids=lambda mutant: mutant.case)
def test_the_kernel_that_a_mutant_was_made_from_passes(mutant):
    result = mutant.run_right()
    assert result.verdict == "pass", result.failures


def test_a_kernel_that_claims_too_little_is_unsupported_and_no_failure():
    case = parse_case(contract.COLLAPSE)
    (result,) = run_op(get_card(case.op), contract.cautious(), CORE, cases=[case])
    assert (result.verdict, result.reason) == ("unsupported", "not measured on this device yet")


# ------------------------------------------------------------------------------------------ devices, ranks, processes


@pytest.mark.parametrize("mutant", devices.MUTANTS, ids=name_of)
def test_a_wrong_device_fails_its_case_and_no_other(mutant):
    assert mutant.run() == mutant.killed_by, mutant.why


def test_a_right_device_fails_no_case_and_every_case_has_a_mutant():
    assert devices.failures(devices.Streaming()) == ()
    assert {id for mutant in devices.MUTANTS for id in mutant.killed_by} == {case.id for case in device_cases()}


@pytest.mark.parametrize("mutant", ranks.MUTANTS, ids=name_of)
def test_wrong_ranks_fail_the_cases_that_they_name_and_no_other_op(mutant):
    assert set(mutant.run()) == set(mutant.killed_by), mutant.why


def test_right_ranks_fail_no_case_and_every_case_has_a_mutant_that_only_it_catches():
    assert ranks.failures(ranks.Ranked(), tuple(ranks.CASES)) == ()
    assert {mutant.killed_by[0] for mutant in ranks.MUTANTS if len(mutant.killed_by) == 1} == set(ranks.CASES)


def test_kernels_that_end_or_stop_their_process_are_told_apart_and_the_run_goes_on():
    results = processes.run_all()
    for mutant in processes.MUTANTS:
        result = results[mutant.case]
        assert (result.verdict,) == mutant.killed_by, mutant.name
        assert mutant.told in " ".join(result.failures.values()), mutant.name
    assert results[processes.RIGHT_CASE].verdict == "pass"


# ---------------------------------------------------------------------------------------------------- the data


def test_every_mutant_has_a_name_of_its_own_and_a_sentence():
    counts = Counter(mutant.name for mutant in (*KERNEL_MUTANTS, *OTHERS))
    assert [name for name, times in counts.items() if times > 1] == []
    assert all(mutant.why.endswith(".") for mutant in (*KERNEL_MUTANTS, *OTHERS))


def test_the_page_of_mutants_is_current():
    written = DOCS.read_text(encoding="utf-8")
    assert written == page.page(), "run: python -m tests.conformance.mutants.page docs/mutants.md"
