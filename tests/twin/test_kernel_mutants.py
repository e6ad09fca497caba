"""Mutants of the AscendC kernels: each change of a flag, barrier, queue step, buffer count or mask is noticed by the twin."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "backends/ascend"), str(ROOT / "tests/conformance"), str(ROOT / "tools/ascend")]

import mutant_cases  # noqa: E402
import mutant_page  # noqa: E402
import mutate  # noqa: E402
from deepinfer_ascend import twin  # noqa: E402
from mutants import CHANGES, Mutant, Partners, mutants_of, names, summary  # noqa: E402
from surviving_mutants import SURVIVORS, reason  # noqa: E402

pytestmark = pytest.mark.skipif(twin.module() is None, reason=str(twin.unavailable_reason()))
REPORT = ROOT / "reports/ascend/mutation.json"
NAMED = ("site", "ends")
BAR = 0.95
"""The share of mutants that a report must name."""
SAMPLE = ((("rms_norm",), 5), (("select_topk",), 6), (("linear", "grouped_linear", "grouped_gemm"), 25), (("copy_rows",), 1))
"""Ops that share kernels, and of which n-th mutants a quick run makes."""


@pytest.fixture(scope="module", params=SAMPLE, ids=lambda sample: sample[0][0])
def sample(request):
    """Results of some mutants of an op's kernels. That the unchanged kernels report nothing is checked on the way."""
    ops, every = request.param
    found = list(mutant_cases.explore(ops))
    kernels = sorted({kernel for f in found for kernel in f.kernels})
    return [result for _, _, results in mutate.mutate(kernels, found, 2, every) for result in results]


def test_a_sample_of_mutants_is_named_by_reports(sample):
    assert len(sample) >= 4
    not_named = [r for r in sample if r["outcome"] not in NAMED and reason(r) is None]
    assert not not_named


def test_kernels_are_themselves_again_after_a_mutant():
    (found, *_) = mutant_cases.explore(["copy_rows"])
    site = next(s for s in found.sites if s.kind == "EnQue")
    (ready, *_) = mutant_cases.make_ready([found])
    (fresh, *_) = mutant_cases.make_ready([found])
    twin.module().mutate([site], "drop")
    try:
        report, _ = ready.run()
    finally:
        twin.module().stop_mutation()
    assert "deadlock: DeQue at" in report
    assert fresh.run() == ("", True)


def test_each_use_of_a_helper_that_sets_flags_is_a_site_of_its_own():
    sites = [s for f in mutant_cases.explore(["select_topk"]) for s in f.sites if s.kind == "SetFlag"]
    assert len({s.line for s in sites}) >= 4
    assert {Path(s.file).name for s in sites} == {"select.asc"}


def test_a_report_names_a_site_by_its_line_its_partner_or_the_pipes_it_orders():
    flag = Mutant("k", "/a/k.asc", 12, "SetFlag", "MTE2_V", "forget")
    race = "race (write, then read): DataCopy at /a/k.asc:3 (pipe MTE2 of x) and Add at /a/k.asc:20 (pipe V of x) touch"
    assert names("deadlock at /a/k.asc:12 on x", flag, Partners()) == "site"
    assert names("deadlock at /a/k.asc:120 on x", flag, Partners()) == "elsewhere"
    assert names("WaitFlag at /a/k.asc:14", flag, Partners([("/a/k.asc:12", "/a/k.asc:14", "MTE2_V")])) == "ends"
    assert names(race, flag, Partners()) == "ends"
    assert names(race.replace("pipe V", "pipe M"), flag, Partners()) == "ends"
    assert names(race.replace("pipe MTE2", "pipe S").replace("pipe V", "pipe M"), flag, Partners()) == "elsewhere"


def test_a_mask_that_is_always_full_and_no_other_site_is_left_out():
    class Site:
        kernel, file, line, detail, highest = "k", "k.asc", 1, "", 0

    def sites(kind):
        site = Site()
        site.kind = kind
        return [site]

    assert mutants_of(sites("mask"), Partners()) == []
    assert all(len(mutants_of(sites(kind), Partners())) == len(CHANGES[kind]) for kind in CHANGES if kind != "mask")


def test_a_flag_is_forgotten_at_all_the_places_that_set_it():
    class Site:
        def __init__(self, line, detail):
            self.kernel, self.file, self.line, self.kind, self.detail = "k", "k.asc", line, "SetFlag", detail

    partners = Partners([("k.asc:1", "k.asc:5", "V_MTE2"), ("k.asc:9", "k.asc:5", "V_MTE2"), ("k.asc:1", "k.asc:7", "MTE3_V")])
    found = mutants_of([Site(1, "V_MTE2"), Site(9, "V_MTE2"), Site(1, "MTE3_V")], partners)
    forgotten = [mutant.places for mutant, _ in found if mutant.change == "forget"]
    assert sorted(forgotten) == [("k.asc:1",), ("k.asc:1", "k.asc:9")]


@pytest.mark.full
def test_reports_name_nearly_all_mutants_of_every_kernel():
    found = [*mutant_cases.explore(twin.ops()), *mutant_cases.explore_ranks()]
    kernels = sorted({kernel for f in found for kernel in f.kernels})
    results = [result for _, _, some in mutate.mutate(kernels, found, 2) for result in some]
    check(results)


def check(results):
    """The bar holds, and what no report names has its reason."""
    named = sum(result["outcome"] in NAMED for result in results)
    assert named >= BAR * len(results)
    without_reason = [r for r in results if r["outcome"] not in NAMED and reason(r) is None]
    assert not without_reason


@pytest.mark.skipif(not REPORT.exists(), reason="no stored report")
def test_the_stored_report_keeps_the_bar_and_every_reason_has_its_survivor():
    report = json.loads(REPORT.read_text())
    check(report["results"])
    again = summary(report["results"])
    assert (report["total"], report["kernels"]) == (again["total"], again["kernels"])
    survivors = [r for r in report["results"] if r["outcome"] not in NAMED]
    assert all(any(entry.matches(r) for r in survivors) for entry in SURVIVORS)


@pytest.mark.skipif(not REPORT.exists(), reason="no stored report")
def test_the_page_is_made_from_the_stored_report():
    assert mutant_page.PAGE.read_text() == mutant_page.page(json.loads(REPORT.read_text()))
