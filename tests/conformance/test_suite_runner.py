"""The suite's runner: every verdict, crashes and hangs that do not end the run, exit status, replay by id."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from deepinfer_hal.card import get_card
from deepinfer_hal.conformance import Plan, run_suite
from deepinfer_hal.conformance.checks import get_profile
from deepinfer_hal.errors import BackendUnavailable, BadCall

from deepinfer.cli.main import main

CHECKS = ("claims", "empty", "values", "discrete", "untouched")
"""Few checks: these tests are about processes and verdicts."""

THREE_ROWS = "nan_row_flags(S=3,V=33)"


def run(opener, op, **settings):
    settings = {"checks": CHECKS, **settings}
    return run_suite(Plan(opener=f"suite_backends:{opener}", ops=(op,) if op else (), **settings))


@pytest.fixture(autouse=True)
def openers_are_importable(monkeypatch):
    """Workers import openers by name: this folder goes on their path, too."""
    from pathlib import Path

    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def verdicts(found):
    return {result.id: result.verdict for result in found.results}


def test_a_right_kernel_passes_every_case_and_the_run_exits_with_0():
    found = run("open_right", "nan_row_flags")
    assert set(verdicts(found).values()) == {"pass"}
    assert len(found.results) >= len(list(get_card("nan_row_flags").enumerate_cases()))
    assert found.exit_status() == 0


def test_a_wrong_kernel_fails_with_the_check_that_saw_it_and_the_run_exits_with_1():
    found = run("open_wrong", "nan_row_flags")
    failed = next(result for result in found.results if result.id == THREE_ROWS)
    assert failed.verdict == "fail" and "flags[" in failed.failures["discrete"]
    assert found.exit_status() == 1


def test_a_backend_that_claims_nothing_exits_with_2():
    found = run("open_nothing", "nan_row_flags")
    assert set(verdicts(found).values()) == {"unsupported"}
    assert all(result.reason == "the backend offers no kernel of this op" for result in found.results)
    assert found.exit_status() == 2


def test_nothing_claimed_is_no_pass_even_when_the_device_itself_is_fine():
    found = run("open_nothing", None, checks=(), cases=())
    assert {r.verdict for r in found.results if r.op == "device"} <= {"pass", "unsupported"}
    assert found.exit_status() == 2


def test_a_crash_is_a_verdict_and_the_cases_after_it_run():
    found = run("open_crashing", "nan_row_flags")
    crashed = [result for result in found.results if result.verdict == "crash"]
    assert [result.id for result in crashed] == [THREE_ROWS]
    assert "SIGSEGV" in crashed[0].failures["claims"], "the check that ran is named"
    others = [result.verdict for result in found.results if result.id != THREE_ROWS]
    assert others and set(others) == {"pass"}
    assert found.exit_status() == 1


def test_a_hang_is_stopped_at_its_limit_and_the_cases_after_it_run():
    found = run("open_hanging", "nan_row_flags", case_seconds=3.0)
    stopped = [result for result in found.results if result.verdict == "timeout"]
    assert [result.id for result in stopped] == [THREE_ROWS]
    assert "time limit" in stopped[0].failures["claims"]
    assert {result.verdict for result in found.results if result.id != THREE_ROWS} == {"pass"}


def test_a_backend_that_dies_while_it_opens_is_named_as_unavailable():
    with pytest.raises(BackendUnavailable, match="cannot be opened: the process died with SIGSEGV"):
        run("open_dying", "nan_row_flags")


def test_what_a_kernel_prints_cannot_pass_for_a_result():
    found = run("open_noisy", "nan_row_flags")
    assert set(verdicts(found).values()) == {"pass"}


def test_a_refusal_is_unsupported_with_the_kernels_own_reason():
    found = run("open_choosy", "stream_collapse", checks=())
    by_dtype = {result.id: result for result in found.results}
    refused = [result for id, result in by_dtype.items() if "dtype=f32" in id]
    assert refused and all(r.verdict == "unsupported" and r.reason == "only bfloat16 rows" for r in refused)
    assert {result.verdict for id, result in by_dtype.items() if "dtype=bf16" in id} == {"pass"}
    assert found.exit_status() == 0


def test_a_claim_that_is_not_kept_fails():
    found = run("open_boasting", "stream_collapse")
    broken = [result for result in found.results if "dtype=f32" in result.id]
    assert broken and all("supports said Yes" in result.failures["claims"] for result in broken)
    assert found.exit_status() == 1


def test_a_kernel_that_is_the_reference_under_another_name_fails():
    found = run("open_falling", "nan_row_flags")
    assert any("that is falling back" in result.failures.get("claims", "") for result in found.results)


def test_a_case_replays_alone_by_its_id():
    found = run("open_crashing", None, cases=(THREE_ROWS,))
    assert verdicts(found) == {THREE_ROWS: "crash"}
    assert run("open_right", None, cases=(THREE_ROWS,)).exit_status() == 0


def test_an_id_that_is_in_no_list_replays_too():
    id = "nan_row_flags(S=6,V=77)"
    assert verdicts(run("open_right", None, cases=(id,))) == {id: "pass"}


def test_the_seed_changes_the_data_and_the_same_seed_gives_the_same_result():
    from deepinfer_hal.conformance import Problem, Subject
    from deepinfer_hal.kernel import reference_kernel

    card = get_card("nan_row_flags")
    case = next(case for case in card.enumerate_cases() if case.id == THREE_ROWS)
    made = [Problem(Subject(card, reference_kernel(card)), case, seed).pristine["logits"] for seed in (1, 1, 2)]
    assert made[0].nan_to_num().equal(made[1].nan_to_num()) and not made[0].nan_to_num().equal(made[2].nan_to_num())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(ops=("NO_SUCH_OP",)), "no op is named 'NO_SUCH_OP'"),
        (dict(ops=("nan_row_flag",)), "did you mean nan_row_flags"),
        (dict(cases=("linear",)), "no case id"),
        (dict(cases=("liner(T=3)",)), "did you mean linear"),
        (dict(profile="quick"), "no profile is named 'quick'; there are core, full"),
        (dict(checks=("speed",)), "no check is named 'speed'"),
        (dict(opener="nosuch:thing"), "no module:function"),
        (dict(traces=("nosuch.trace",)), "cannot be read"),
    ],
)
def test_a_plan_that_names_what_does_not_exist_is_refused(settings, message):
    with pytest.raises(BadCall, match=message):
        run_suite(Plan(**settings))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--backend", "cpu", "--op", "NO_SUCH_OP"], "no op is named 'NO_SUCH_OP'"),
        (["--backend", "nosuch"], "no backend is named 'nosuch'"),
        (["--backend", "cpu", "--case", "rope(T=3"], "no case id"),
        (["--backend", "cpu", "--waivers", "nosuch.json"], "waiver file nosuch.json cannot be read"),
    ],
)
def test_the_command_line_exits_with_2_and_one_sentence(arguments, sentence, capsys):
    assert main(["hal", "test", *arguments]) == 2
    error = capsys.readouterr().err
    assert sentence in error and len(error.splitlines()) == 1


def test_an_op_without_a_kernel_leaves_an_empty_selection_which_exits_with_2(capsys):
    from deepinfer_hal.card import all_cards
    from deepinfer_hal.registry import open_backend

    backend, index = open_backend("cpu")
    served = {kernel.op for kernel in backend.kernels(index)}
    unserved = sorted(n for n, card in all_cards().items() if n not in served and not card.decomposition)
    if not unserved:
        pytest.skip("this backend serves every op")
    assert main(["hal", "test", "--backend", "cpu", "--op", unserved[0]]) == 2
    assert "nothing was claimed or run" in capsys.readouterr().out


def test_the_command_line_passes_and_replays(capsys):
    id = "rope(T=3,h=4,D=128,r=64,dtype=bf16,inverse=True,view=True)"
    assert main(["hal", "test", "--backend", "cpu", "--reference", "--case", id, "--verbose"]) == 0
    out = capsys.readouterr().out
    assert f"pass        {id} @ reference::rope" in out and "the references themselves were tested" in out


def test_several_workers_give_the_results_of_one_in_the_same_order():
    plan = Plan(opener="suite_backends:open_crashing", ops=("copy_rows", "nan_row_flags"), checks=CHECKS)
    one, several = (run_suite(plan, jobs=jobs) for jobs in (1, 2))
    assert [(r.key, r.verdict) for r in several.results] == [(r.key, r.verdict) for r in one.results]
    assert several.jobs == 2 and sum(result.verdict == "crash" for result in several.results) == 1


def test_a_run_whose_time_is_over_leaves_the_rest_not_run_and_blames_no_case():
    plan = Plan(opener="suite_backends:open_hanging", ops=("nan_row_flags",), checks=CHECKS)
    found = run_suite(plan, seconds=6.0)
    late = {result.id: result for result in found.results if result.verdict == "not-run"}
    assert late[THREE_ROWS].reason == "the time of the run was over"
    assert {result.verdict for result in found.results} <= {"pass", "not-run"}


def test_what_passed_is_kept_and_only_the_rest_runs_again():
    from deepinfer_hal.conformance.report import make_report

    plan = Plan(opener="suite_backends:open_crashing", ops=("nan_row_flags",), checks=CHECKS)
    first, heard = run_suite(plan), []
    report = make_report(first)
    again = run_suite(plan, resume=report, listen=heard.append)
    assert [result.id for result in heard] == [THREE_ROWS], "the case that crashed, and no other"
    assert [(r.id, r.verdict) for r in again.results] == [(r.id, r.verdict) for r in first.results]
    assert again.resumed == {"checksum": report["checksum"], "passed": len(first.results) - 1}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda report: report["suite"].update(source_sha256="0" * 64), "sources of the suite"),
        (lambda report: report["subject"].update(device="another chip"), "device"),
        (lambda report: report["subject"].update(build={"kernels": "built anew"}), "build"),
        (lambda report: report["plan"].update(seed=7), "seed"),
    ],
)
def test_a_report_of_something_else_is_not_resumed(change, named):
    from deepinfer_hal.conformance.report import make_report, sealed
    from deepinfer_hal.conformance.resume import Earlier
    from deepinfer_hal.conformance.runner import Run

    subject = {"backend": "example", "index": 0, "device": "example chip", "details": {}, "build": {}, "kernels": []}
    plan = Plan(opener="suite_backends:open_right")
    report = make_report(Run(plan, dict(subject)))
    assert Earlier.of(report, plan, subject).told() == {"checksum": report["checksum"], "passed": 0}
    change(report)
    with pytest.raises(BadCall, match="was altered, its checksum does not match"):
        Earlier.of(report, plan, subject)
    with pytest.raises(BadCall, match=f"of something else, its {named} differ"):
        Earlier.of(sealed(report), plan, subject)


class Stopping:
    """Hears results, and interrupts the main thread when it has heard so many."""

    def __init__(self, after):
        self.after, self.heard = after, []

    def __call__(self, result):
        self.heard.append(result)
        if len(self.heard) == self.after:
            raise KeyboardInterrupt


def test_an_interrupted_run_keeps_what_has_a_result_and_is_resumed_from_there():
    from deepinfer_hal.conformance.report import make_report

    plan = Plan(opener="suite_backends:open_right", ops=("nan_row_flags",), checks=CHECKS)
    first = run_suite(plan, listen=Stopping(3))
    assert first.interrupted and first.counts()["pass"] == 3
    late = [result for result in first.results if result.verdict == "not-run"]
    assert len(late) == len(first.results) - 3 > 3 and {result.reason for result in late} == {"the run was interrupted"}
    heard = []
    again = run_suite(plan, resume=make_report(first), listen=heard.append)
    assert not again.interrupted and len(heard) == len(late) and again.counts() == {"pass": len(first.results)}


def test_an_interrupt_ends_workers_in_the_midst_of_a_case_and_blames_none():
    plan = Plan(opener="suite_backends:open_hanging", ops=("nan_row_flags",), checks=CHECKS)
    started, reported = time.monotonic(), []

    def once(result):
        if threading.current_thread() is threading.main_thread() and not reported:
            reported.append(result)
            raise KeyboardInterrupt

    found = run_suite(plan, jobs=2, listen=once)
    assert found.interrupted and time.monotonic() - started < get_profile(plan.profile).case_seconds
    assert set(found.counts()) <= {"pass", "not-run"} and found.counts()["not-run"] > 0
    assert len({result.key for result in found.results}) == len(found.results)


@pytest.fixture
def heard_ctrl_c():
    """Processes that are started meanwhile hear SIGINT, also if these tests are a shell's background job, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heard_ctrl_c")
def test_ctrl_c_stores_a_report_that_the_command_goes_on_from(tmp_path):
    report, again = tmp_path / "first.json", tmp_path / "again.json"
    command = [sys.executable, "-m", "deepinfer", "hal", "test", "--backend", "cpu", "--verbose"]
    for op in ("nan_row_flags", "copy_rows", "advance_step"):
        command += ["--op", op]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen(
        [*command, "--report", str(report)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout.readline().startswith("pass")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers, too
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and f"`--resume {report}` goes on from it" in " ".join(errors.split())
    counts = json.loads(report.read_text())["counts"]
    assert set(counts) == {"pass", "not-run"}
    assert main([*command[3:], "--resume", str(report), "--report", str(again)]) == 0
    told = json.loads(again.read_text())
    assert told["resumed"]["passed"] == counts["pass"] and told["counts"] == {"pass": sum(counts.values())}
