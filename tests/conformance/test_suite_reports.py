"""Stored reports: what verifies and what does not, signatures, differences, the page and the support table."""

import copy
import json
from html.parser import HTMLParser

import pytest
from deepinfer_hal.card import all_cards
from deepinfer_hal.conformance.cases import mandatory_ids
from deepinfer_hal.conformance.diff import compare_reports
from deepinfer_hal.conformance.host import describe_subject
from deepinfer_hal.conformance.html import page
from deepinfer_hal.conformance.plan import Plan
from deepinfer_hal.conformance.report import make_report, read_report, sealed, signed, write_report
from deepinfer_hal.conformance.runner import Run
from deepinfer_hal.conformance.support import support_page
from deepinfer_hal.conformance.verdict import CaseResult
from deepinfer_hal.conformance.verify import NO_PROOF, verify_report
from deepinfer_hal.errors import BackendUnavailable, BadCall
from deepinfer_hal.registry import open_backend

from deepinfer.cli.hal_test import print_unsupported
from deepinfer.cli.main import main

KEY, OTHER_KEY = b"a key of sixteen bytes or more", b"another key of sixteen bytes or more"
SERVED, SOURCES = "rope", "5" * 64


def good_document():
    """A report as a whole run on a clean tree would leave it, with one op served."""
    results = []
    for op, ids in mandatory_ids().items():
        for id in ids:
            if op == SERVED:
                result = CaseResult(id, op, "chip", "chip_rope", "pass", checks=["values"])
                result.used, result.histogram = {"x": 0.25}, {"x": [5, 0, 0, 0, 0, 1, 2, 0, 0, 0]}
                result.kernel_seconds, result.bytes = 1e-5, 4000
            else:
                result = CaseResult(id, op, verdict="unsupported", reason="the backend offers no kernel of this op")
            results.append(result)
    kernel = dict(op=SERVED, provider="chip", symbol="chip_rope", invariant="yes", capturable=False, priority=0)
    subject = dict(
        backend="chip", index=0, device="Chip <One>", memory_bytes=0, details={"driver": "1.2"}, build={}, kernels=[kernel]
    )  # fmt: skip
    document = make_report(Run(Plan(spec="chip"), subject, results))
    document["suite"] |= {"commit": "c0ffee", "clean_tree": True, "source_sha256": SOURCES}
    return sealed(document)


GOOD = good_document()


@pytest.fixture(autouse=True)
def sources_do_not_change(monkeypatch):
    """Someone may be editing the suite while its tests run."""
    monkeypatch.setattr("deepinfer_hal.conformance.verify.source_digest", lambda: SOURCES)


@pytest.fixture
def stored(tmp_path):
    def write(document):
        path = tmp_path / "hal-report.json"
        write_report(path, document)
        return path

    return write


def changed(change):
    document = copy.deepcopy(GOOD)
    change(document)
    return sealed(document)


def test_a_whole_clean_report_verifies_and_says_that_a_checksum_proves_no_author(stored):
    found = verify_report(stored(GOOD))
    assert found.holds, found.problems
    assert found.notes == [NO_PROOF] and "no proof of who wrote it" in NO_PROOF


def test_any_altered_byte_keeps_a_report_from_verifying(stored):
    path = stored(GOOD)
    text = path.read_bytes()
    places = [0, text.index(b'"pass"') + 2, text.index(b"c0ffee"), text.index(b"0.25"), len(text) - 1, text.index(b"sha256:") + 9]
    places += range(7, len(text), len(text) // 40)
    for place in places:
        path.write_bytes(text[:place] + bytes([text[place] ^ 1]) + text[place + 1 :])
        assert not verify_report(path).holds, f"byte {place} of {len(text)}: {text[place - 20 : place + 20]}"


def test_added_whitespace_is_an_alteration_too(stored):
    path = stored(GOOD)
    path.write_text(path.read_text() + "\n")
    assert "not in the form" in verify_report(path).problems[0]


def a_case_less(document):
    document["results"].pop(next(i for i, r in enumerate(document["results"]) if r["op"] == SERVED))
    document["counts"]["pass"] -= 1


def an_unserved_case_less(document):
    document["results"].pop(next(i for i, r in enumerate(document["results"]) if r["op"] != SERVED))
    document["counts"]["unsupported"] -= 1


def a_case_not_run(document):
    document["results"][0]["verdict"] = "not-run"
    words = [result["verdict"] for result in document["results"]]
    document["counts"] = {word: words.count(word) for word in set(words)}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda d: d["suite"].update(clean_tree=False), "tree was not clean"),
        (lambda d: d["suite"].update(commit=None, clean_tree=None), "commit is unknown"),
        (a_case_less, "1 mandatory cases are missing, the first is rope("),
        (an_unserved_case_less, "1 mandatory cases are missing"),
        (a_case_not_run, "were not run"),
        (lambda d: d["plan"].update(ops=["rope"]), "cut to some ops"),
        (lambda d: d.update(whole=False), "cut to some ops"),
        (lambda d: d["counts"].update({"pass": 1}), "counts do not add up"),
        (lambda d: d["results"].append(d["results"][0]), "two results"),
        (lambda d: d["results"][0].update(verdict="fine"), "counts do not add up"),
        (lambda d: d["subject"].pop("kernels"), "malformed"),
        (lambda d: d["subject"]["kernels"].append({**d["subject"]["kernels"][0], "op": "linear", "symbol": "x"}), "missing"),
    ],
)
def test_a_report_that_shows_less_than_it_should_does_not_verify_even_with_a_fresh_checksum(stored, change, problem):
    found = verify_report(stored(changed(change)))
    assert not found.holds and problem in " ".join(found.problems)


def test_a_failed_run_can_be_an_intact_report_and_is_noted(stored):
    def fail(document):
        index = next(i for i, r in enumerate(document["results"]) if r["op"] == SERVED)
        document["results"][index].update(verdict="fail", failures={"values": "wrong"})
        document["counts"]["pass"] -= 1
        document["counts"]["fail"] = 1
        document["exit_status"] = 1

    found = verify_report(stored(changed(fail)))
    assert found.holds and "1 cases broken" in " ".join(found.notes)


def test_other_sources_of_the_suite_are_noted(stored):
    found = verify_report(stored(changed(lambda d: d["suite"].update(source_sha256="0"))))
    assert found.holds and "other sources" in found.notes[-1] + found.notes[0]


def test_a_signature_shows_the_holder_of_the_key(stored):
    path = stored(signed(GOOD, KEY))
    assert verify_report(path, KEY).holds
    assert "give that key" in verify_report(path).problems[0]
    assert "not by the key given" in verify_report(path, OTHER_KEY).problems[0]
    assert "not signed" in verify_report(stored(GOOD), KEY).problems[0]


def test_a_signature_does_not_carry_over_to_other_content(stored):
    other = changed(lambda d: d["results"][0].update(seed=5))
    path = stored({**other, "signature": signed(GOOD, KEY)["signature"]})
    assert "signature does not match" in verify_report(path, KEY).problems[0]


def test_a_short_key_is_refused():
    with pytest.raises(BadCall, match="at least 16 bytes"):
        signed(GOOD, b"short")


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "cannot be read"), ("[]", "no report"), ('{"kind": "other"}', "no report"),
     ('{"kind": "deepinfer-hal-report", "schema": 99}', "schema 99")],
)  # fmt: skip
def test_what_is_no_report_is_named(tmp_path, text, message):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(BadCall, match=message):
        read_report(path)
    assert not verify_report(path).holds


# ------------------------------------------------------------------------------------------------ differences


def first_served(document):
    return next(result for result in document["results"] if result["op"] == SERVED)


def test_a_report_does_not_differ_from_itself():
    assert compare_reports(GOOD, GOOD).lines() == []


def test_a_case_that_passed_and_does_not_any_more_is_a_regression():
    worse = changed(lambda d: first_served(d).update(verdict="fail", failures={"values": "x[0] is 1, must be 2"}))
    difference = compare_reports(GOOD, worse)
    assert len(difference.regressions) == 1 and "pass -> fail (values: x[0]" in difference.regressions[0]
    assert len(compare_reports(worse, GOOD).repairs) == 1


def test_an_absent_case_is_a_regression_if_it_passed():
    less = changed(a_case_less)
    assert "pass -> absent" in compare_reports(GOOD, less).regressions[0]
    assert compare_reports(less, GOOD).regressions == []


def test_growing_errors_other_kernels_and_times_are_shown():
    def change(document):
        first_served(document).update(used={"x": 0.9}, symbol="chip_rope_2", kernel_seconds=1e-4)

    lines = "\n".join(compare_reports(GOOD, changed(change)).lines())
    assert "0.25 -> 0.90" in lines and "chip_rope -> chip_rope_2" in lines and "10 -> 100 us (x 10.00)" in lines


# ------------------------------------------------------------------------------------------------ page and table


class Balance(HTMLParser):
    """Counts open elements and everything that would be fetched."""

    def __init__(self):
        super().__init__()
        self.open, self.external = [], []

    def handle_starttag(self, tag, attributes):
        if tag not in ("meta", "rect", "html"):
            self.open.append(tag)
        self.external += [value for name, value in attributes if name in ("src", "href")]

    def handle_endtag(self, tag):
        if tag in self.open:
            assert self.open.pop() == tag


def test_the_page_is_one_well_formed_file_that_fetches_nothing():
    text = page(changed(lambda d: first_served(d).update(verdict="fail", failures={"values": "1 < 2 & 3"})))
    balance = Balance()
    balance.feed(text)
    assert balance.open == [] and balance.external == []
    assert "Chip &lt;One&gt;" in text and "1 &lt; 2 &amp; 3" in text
    assert text.count("<svg") == 2, "errors and bandwidth are plotted"
    assert "0.40" in text, "4000 bytes in 10 us"


def table_row(text, op):
    return next(line for line in text.splitlines() if line.startswith(f"| {op} |"))


def test_the_table_shows_the_best_evidence_of_each_op(tmp_path):
    write_report(tmp_path / "chip.json", GOOD)
    evidence = dict(kind="deepinfer-hal-evidence", backend="chip", device="Chip <One>", source="nvcc 13 for sm_100a")
    (tmp_path / "a.json").write_text(json.dumps({**evidence, "level": "assembles", "ops": ["rope", "linear"]}))
    (tmp_path / "w.json").write_text(json.dumps({**evidence, "level": "written", "ops": ["linear", "sample"]}))
    (tmp_path / "bench.json").write_text('{"benchmark": "latency"}')
    text = support_page(tmp_path)
    assert table_row(text, "rope").endswith("| runs |")
    assert table_row(text, "linear").endswith("| assembles |")
    assert table_row(text, "sample").endswith("| written |")
    assert table_row(text, "permute").endswith("| - |")
    assert all(table_row(text, op) for op in all_cards())


@pytest.mark.parametrize("spec, emulated", [("cpu", False), ("ascend:twin", True)])
def test_a_report_says_whether_its_device_is_a_model_of_one(spec, emulated):
    try:
        backend, index = open_backend(spec)
    except BackendUnavailable as error:
        pytest.skip(str(error))
    assert describe_subject(backend, index)["emulated"] is emulated


def test_an_emulated_device_is_no_silicon(tmp_path):
    write_report(tmp_path / "twin.json", changed(lambda d: d["subject"].update(emulated=True)))
    assert table_row(support_page(tmp_path), "rope").endswith("| emulated |")


@pytest.mark.parametrize("verdict", ["fail", "crash", "waived"])
def test_one_broken_case_keeps_an_op_out_of_the_table(tmp_path, verdict):
    write_report(tmp_path / "chip.json", changed(lambda d: first_served(d).update(verdict=verdict)))
    assert table_row(support_page(tmp_path), "rope").endswith("| - |")


def test_an_altered_report_and_too_bold_an_evidence_are_refused(tmp_path):
    write_report(tmp_path / "chip.json", {**GOOD, "seconds": 1.0})
    with pytest.raises(BadCall, match="checksum does not match"):
        support_page(tmp_path)
    (tmp_path / "chip.json").write_text('{"kind": "deepinfer-hal-evidence", "level": "runs"}')
    with pytest.raises(BadCall, match="more takes a report"):
        support_page(tmp_path)


@pytest.mark.parametrize("folder", ["absent", "."])
def test_no_table_is_made_of_a_folder_without_reports(folder, tmp_path):
    page = tmp_path / "support.md"
    (tmp_path / "bench.json").write_text('{"benchmark": "generation"}')
    assert main(["hal", "table", "--reports", str(tmp_path / folder), "--out", str(page)]) == 1
    assert not page.exists()


# ------------------------------------------------------------------------------------------------ command line


def test_the_commands_read_what_was_stored(stored, tmp_path, capsys):
    path, key = stored(GOOD), tmp_path / "key"
    key.write_bytes(KEY)
    assert main(["hal", "verify", str(path)]) == 0
    assert "no proof of who wrote it" in capsys.readouterr().out
    assert main(["hal", "verify", str(path), "--sign", str(key)]) == 0
    assert main(["hal", "verify", str(path)]) == 1
    assert main(["hal", "verify", str(path), "--key", str(key)]) == 0
    assert main(["hal", "diff", str(path), str(path)]) == 0
    assert main(["hal", "report", str(path), "--html"]) == 0 and path.with_suffix(".html").exists()
    page_file = tmp_path / "support.md"
    table = ["hal", "table", "--reports", str(tmp_path), "--out", str(page_file)]
    assert main([*table, "--check"]) == 1 and main(table) == 0 and main([*table, "--check"]) == 0


def test_diff_exits_with_1_on_a_regression(tmp_path):
    write_report(tmp_path / "a.json", GOOD)
    write_report(tmp_path / "b.json", changed(lambda d: first_served(d).update(verdict="crash")))
    assert main(["hal", "diff", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 1


def test_the_end_of_a_run_tells_what_no_kernel_serves_from_what_one_leaves_to_another(capsys):
    print_unsupported([
        CaseResult("rope(T=1)", "rope", "chip", "chip_rope", "unsupported", "it serves bf16"),
        CaseResult("rope(T=1)", "rope", "portable", "portable_rope", "pass"),
        CaseResult("ranks(world=2)", "ranks", "chip", "", "unsupported", "2 ranks need 2 devices, there are 1"),
        CaseResult("linear(T=1)", "linear", "", "", "unsupported", "the backend offers no kernel of this op"),
    ])  # fmt: skip
    assert capsys.readouterr().out.splitlines() == [
        "no kernel   linear",
        "unsupported 1 by every kernel of the op: 2 ranks need 2 devices, there are 1",
        "unsupported 1 by one kernel of the op, passed by another",
    ]
