"""Where cases come from: ids that read back, stored shapes, traces, waivers, cases of other packages."""

import datetime
import json

import pytest
import torch
from deepinfer_hal.card import Case, all_cards, get_card
from deepinfer_hal.checks import check_call
from deepinfer_hal.conformance import CORE, Plan, Problem, Subject, cases, run_case, run_suite
from deepinfer_hal.conformance.shapes import draw, stored_shapes
from deepinfer_hal.conformance.traces import Recorder, load_call, trace_ids
from deepinfer_hal.conformance.verdict import CaseResult, Waiver, apply_waivers, read_waivers
from deepinfer_hal.errors import BadCall
from deepinfer_hal.kernel import reference_kernel
from deepinfer_hal.weights import prepare_canonical

OPS = sorted(name for name, card in all_cards().items() if card.group != "communication")


@pytest.mark.parametrize("op", OPS)
def test_every_id_reads_back_as_its_case(op):
    for case in cases.op_cases(get_card(op), "full"):
        again = cases.parse_case(case.id)
        assert again.id == case.id and dict(again.params) == dict(case.params)


@pytest.mark.parametrize("op", OPS)
def test_ids_of_an_op_are_distinct_and_some_are_property_based(op):
    ids = [case.id for case in cases.op_cases(get_card(op), "core")]
    assert len(ids) == len(set(ids))
    assert len(ids) == len(list(get_card(op).enumerate_cases())) + CORE.shapes


@pytest.mark.parametrize("op", OPS)
def test_stored_shapes_are_legal_calls(op):
    card = get_card(op)
    for case in stored_shapes(op)[: CORE.shapes]:
        check_call(card, card.generate(case, 0, "cpu", prepare_canonical))


def test_drawing_again_with_the_stored_seed_gives_the_stored_shapes():
    pytest.importorskip("hypothesis")
    import zlib

    from deepinfer_hal.conformance.shapes import PER_OP, SEED

    drawn = draw(get_card("rope"), PER_OP, SEED ^ zlib.crc32(b"rope"))
    again = draw(get_card("rope"), PER_OP, SEED ^ zlib.crc32(b"rope"))
    assert [case.id for case in drawn] == [case.id for case in again]
    assert len({case.id for case in drawn}) == PER_OP


def test_core_is_part_of_full():
    for op in OPS:
        core = [case.id for case in cases.op_cases(get_card(op), "core")]
        assert set(core) <= {case.id for case in cases.op_cases(get_card(op), "full")}


@pytest.mark.parametrize("text", ["", "linear", "linear(T=1", "linear(T = 1)", "(T=1)", "linear(T=1.50)"])
def test_what_is_no_id_is_refused(text):
    with pytest.raises(BadCall, match="is no case id"):
        cases.parse_case(text)


# ------------------------------------------------------------------------------------------------ traces


def recorded(tmp_path, *problems, **limits):
    recorder = Recorder(**limits)
    for problem in problems:
        args = problem.place().args
        recorder(problem.card, args, lambda p=problem, a=args: p.call(a))
    path = tmp_path / "step.trace"
    recorder.save(path, {"model": "none"})
    return path, recorder


def problem_of(op, number=1):
    card = get_card(op)
    return Problem(Subject(card, reference_kernel(card)), list(card.enumerate_cases())[number])


def test_a_recorded_call_comes_back_bit_for_bit_as_it_was_before_the_call(tmp_path):
    problem = problem_of("linear", 7)
    path, _ = recorded(tmp_path, problem)
    assert trace_ids(path) == {"step.trace#0:linear": "linear"}
    args = load_call(path, "step.trace#0:linear")
    for name, value in problem.pristine.items():
        if isinstance(value, torch.Tensor):
            assert args[name].dtype == value.dtype and args[name].stride() == value.stride()
            assert torch.equal(args[name].nan_to_num(), value.nan_to_num())
    weight, before = args["weight"].canonical(), problem.pristine["weight"].canonical()
    assert weight.format == before.format and torch.equal(weight.values, before.values)
    assert torch.equal(weight.scales, before.scales)


def test_arguments_that_share_memory_go_on_sharing_it(tmp_path):
    card = get_card("residual_site")
    number = next(i for i, case in enumerate(card.enumerate_cases()) if case.params.get("alias"))
    path, _ = recorded(tmp_path, problem_of("residual_site", number))
    args = load_call(path, "step.trace#0:residual_site")
    assert args["post_out"].data_ptr() == args["post"].data_ptr() and args["out"].data_ptr() != args["y"].data_ptr()


def test_a_recorded_call_is_a_case(tmp_path):
    path, _ = recorded(tmp_path, problem_of("rms_norm"), problem_of("linear", 4))
    for id, op in trace_ids(path).items():
        card = get_card(op)
        subject = Subject(card, reference_kernel(card))
        result = run_case(subject, Case(op), CORE, pristine=load_call(path, id))
        assert result.verdict == "pass", result.failures


def test_the_suite_runs_a_trace_and_replays_one_of_its_calls(tmp_path):
    path, _ = recorded(tmp_path, problem_of("rms_norm"), problem_of("rope"))
    plan = Plan(traces=(str(path),), cases=("step.trace#1:rope",), reference=True, checks=("values", "untouched"))
    found = run_suite(plan)
    assert [(r.id, r.verdict) for r in found.results] == [("step.trace#1:rope", "pass")]


def test_equal_shapes_are_kept_once_and_large_calls_are_passed_over(tmp_path):
    problem, large = problem_of("rms_norm"), problem_of("hyper_connection_pre", 5)
    path, recorder = recorded(tmp_path, problem, problem, large, most_calls=1, most_bytes=100_000)
    assert list(trace_ids(path).values()) == ["rms_norm"] and recorder.passed_over == {"hyper_connection_pre": 1}


def test_a_damaged_trace_is_refused(tmp_path):
    path = tmp_path / "bad.trace"
    path.write_bytes(b"not a zip")
    with pytest.raises(BadCall, match="cannot be read"):
        trace_ids(path)
    with pytest.raises(BadCall, match=r"named \*.trace"):
        Recorder().save(tmp_path / "x.zip", {})


# ------------------------------------------------------------------------------------------------ waivers

TODAY = datetime.date(2026, 7, 1)


def broken(id, verdict="fail"):
    return CaseResult(id, "op", "p", "k", verdict, failures={"values": "wrong"})


def test_a_waiver_turns_a_failure_into_waived_with_its_reason():
    results = [broken("op(a=1)"), broken("op(a=2)", "crash")]
    assert apply_waivers(results, [Waiver("op(a=1)", "known, see 17", TODAY)], TODAY) == []
    assert [r.verdict for r in results] == ["waived", "crash"] and "known, see 17" in results[0].reason


def test_a_waiver_of_failures_leaves_a_crash_alone():
    results = [broken("op(a=1)", "crash"), broken("op(a=2)")]
    apply_waivers(results, [Waiver(f"op(a={a})", "known", TODAY, ("fail",)) for a in (1, 2)], TODAY)
    assert [r.verdict for r in results] == ["crash", "waived"]


def test_only_the_whole_rule_with_rounded_inputs_brings_a_waiver_along():
    assert cases.own_waivers("core") == []
    (waiver,) = cases.own_waivers("full")
    assert waiver.id == "model(name=nano,rule=agreement,act_quant=fp8_32)" and waiver.verdicts == ("fail",)


def test_an_expired_waiver_does_not_waive():
    results = [broken("op(a=1)")]
    problems = apply_waivers(results, [Waiver("op(a=1)", "known", TODAY - datetime.timedelta(days=1))], TODAY)
    assert results[0].verdict == "fail" and "expired" in problems[0]


def test_a_waiver_of_a_case_that_passes_is_stale():
    problems = apply_waivers([CaseResult("op(a=1)", "op", verdict="pass")], [Waiver("op(a=1)", "known", TODAY)], TODAY)
    assert "stale" in problems[0]


@pytest.mark.parametrize(
    "entries",
    [
        {}, ["x"], [{"id": "x"}], [{"id": "x", "reason": " ", "expires": "2026-01-01"}],
        [{"id": "x", "reason": "y", "expires": "soon"}],
    ],  # fmt: skip
)
def test_a_waiver_needs_id_reason_and_day(tmp_path, entries):
    path = tmp_path / "waivers.json"
    path.write_text(json.dumps(entries))
    with pytest.raises(BadCall, match="must (be|hold)"):
        read_waivers(path)


def test_a_package_whose_cases_cannot_be_listed_gives_a_failing_case(monkeypatch):
    monkeypatch.setattr(cases, "_IN_TREE", {"broken": "tests.conformance.suite_backends:no_such_function"})
    found = [case for case in cases.system_cases("core") if case.op == "broken"]
    with pytest.raises(Exception, match="offers no cases"):
        found[0].run(None, 0)
