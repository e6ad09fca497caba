"""tools/cuda/sanitize.py without a GPU: what the tool's words mean; silence counts only where it found what is planted."""

import argparse
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools/cuda"))

import sanitize  # noqa: E402

CLEAN = "========= COMPUTE-SANITIZER\nthe kernel ran: di_rope\n========= ERROR SUMMARY: 0 errors\n"
RACE = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at races_in_shared_memory(int *)+0xd0
=========     and Read access at races_in_shared_memory(int *)+0x120 [508 hazards]
the kernel ran: di_rope
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
NEVER_STARTED = "========= COMPUTE-SANITIZER\n========= Error: Target application terminated before first instrumented API call\n"


@pytest.mark.parametrize(
    ("text", "status", "verdict", "first"),
    [
        (CLEAN, 0, "clean", ""),
        (RACE, sanitize.FOUND, "found", "Error: Race reported between Write access at races_in_shared_memory(int *)+0xd0"),
        (CLEAN.replace("0 errors", "2 errors"), sanitize.FOUND, "found", "the tool says so by its exit status"),
        (CLEAN.replace("the kernel ran", "nothing"), 0, "did-not-run", None),
        (CLEAN.replace("di_rope", "di_rope_too"), 0, "did-not-run", None),
        ("", None, "timeout", ""),
        (CLEAN, 1, "did-not-run", None),
        (NEVER_STARTED, 0, "did-not-run", None),
    ],
)
def test_a_kernel_is_clean_only_if_it_ran_under_the_tool_which_found_nothing(text, status, verdict, first):
    answer = sanitize.Answer("di_rope", "rope", "rope(T=1)", "memcheck")
    sanitize._read(answer, text, status)
    assert answer.verdict == verdict and first in (None, answer.first)


@pytest.mark.parametrize(
    ("controls", "kernels", "status"),
    [
        (("found", "found"), ("clean", "clean"), 0),
        (("found", "found"), ("clean", "found"), 1),
        (("found", "found"), ("clean", "timeout"), 1),
        (("found", "clean"), ("clean", "clean"), 2),
        (("found", "found"), (), 1),
    ],
)
def test_the_whole_is_clean_only_if_every_kernel_is_and_the_planted_errors_were_found(controls, kernels, status):
    planted = zip(sanitize.TOOLS, controls, strict=True)
    work = [sanitize.Answer("planted", "control", "", tool, verdict) for tool, verdict in planted]
    work += [sanitize.Answer(f"di_{n}", "rope", "rope(T=1)", "memcheck", verdict) for n, verdict in enumerate(kernels)]
    assert sanitize._report(work, argparse.Namespace(json=None), "compute-sanitizer", 1.0) == status


def test_a_kernel_gets_the_largest_case_that_is_small_enough():
    from deepinfer_hal.card import get_card
    from deepinfer_hal.conformance.cases import parse_case
    from deepinfer_hal.kernel import CallSpec, Kernel, No, Yes
    from deepinfer_hal.registry import open_backend

    backend, index = open_backend("cpu")

    def made(supports):
        return Kernel("rope", "test", get_card("rope").reference, "reference::rope", "yes", supports=supports)

    def bf16(call: CallSpec):
        return Yes() if call.statics["x"] == "bf16" else No("only bf16")

    case = parse_case(sanitize._small_case(backend, index, made(bf16)))
    assert case.params["dtype"] == "bf16" and case.params["T"] > 1
    assert sanitize._small_case(backend, index, made(lambda call: No("nothing"))) == ""


def test_further_cases_are_ones_that_the_kernels_serve():
    from deepinfer_cuda import native
    from deepinfer_hal.card import get_card
    from deepinfer_hal.conformance.cases import parse_case
    from deepinfer_hal.kernel import Yes
    from deepinfer_hal.statics import call_spec
    from deepinfer_hal.weights import WeightHandle

    for op, cases in sanitize.FURTHER.items():
        for case in map(parse_case, cases):
            args = get_card(op).generate(case, 3, "cpu", lambda role, stored: WeightHandle(role, stored))
            assert case.op == op and isinstance(native.supports(call_spec(get_card(op), args)), Yes)


@pytest.mark.parametrize(("op", "rows"), [("sparse_attention", 132), ("draft_attention", 66)])
def test_further_cases_of_attention_have_too_many_rows_for_pairs_of_an_h200s_132_multiprocessors(op, rows):
    from deepinfer_hal.card import get_card
    from deepinfer_hal.conformance.cases import parse_case
    from deepinfer_hal.weights import prepare_canonical

    for case in map(parse_case, sanitize.FURTHER[op]):
        assert get_card(op).generate(case, 3, "cpu", prepare_canonical)["q"].shape[0] > rows


TOOL = """#!/bin/sh
shift 4
case "$*" in
*di_bad*di_*) echo "the kernel ran: di_good" ; echo "========= ERROR SUMMARY: 1 error"; exit 86;;
*di_bad*) echo "========= Invalid __global__ write of size 4 bytes"; echo "========= ERROR SUMMARY: 1 error"; exit 86;;
*) echo "the kernel ran: di_good"; echo "========= ERROR SUMMARY: 0 errors";;
esac
"""


def test_kernels_that_shared_a_process_with_an_error_are_asked_again_alone(tmp_path, monkeypatch):
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(TOOL)
    tool.chmod(0o755)
    monkeypatch.setattr(sanitize.shutil, "which", lambda name: str(tool))
    monkeypatch.setattr(sanitize, "_build_control", lambda folder: "")
    monkeypatch.setattr(sanitize, "_chosen", lambda spec, ops: [("di_bad", "rope", "a"), ("di_good", "rope", "b")])
    monkeypatch.setattr(sanitize, "_report", lambda work, *rest: work)
    monkeypatch.setattr(sys, "argv", ["sanitize.py"])
    found = {(answer.symbol, answer.tool): (answer.verdict, answer.together) for answer in sanitize.main()}
    for name in sanitize.TOOLS:
        assert found["di_good", name] == ("clean", 1)
        assert found["di_bad", name] == ("found", 1)


def test_what_there_is_no_time_for_did_not_run(tmp_path):
    answer = sanitize.Answer("di_rope", "rope", "rope(T=1)", "memcheck")
    sanitize._ask(str(tmp_path / "no-such-tool"), "cpu", [answer], 60.0, ends=0.0)
    assert answer.verdict == "did-not-run"
