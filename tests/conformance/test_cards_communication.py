"""Cards of communication on one rank: what they move is what permute and unpermute move; tests/processes has more ranks."""

import pytest
import torch
from deepinfer_hal.card import Case, get_card
from deepinfer_hal.checks import check_call
from deepinfer_hal.errors import BadCall
from deepinfer_hal.weights import prepare_canonical
from harness import case_id, cases_of, run_case

NAMES = ("all_reduce", "all_gather", "broadcast", "barrier", "ep_dispatch", "ep_combine")
I32 = torch.int32


def made(case: Case) -> dict:
    return get_card(case.op).generate(case, 0, "cpu", prepare_canonical)


def ran(case: Case) -> dict:
    args = made(case)
    check_call(get_card(case.op), args)
    get_card(case.op).reference(*args.values())
    return args


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("card, case", cases_of(*NAMES), ids=case_id)
def test_outputs_are_within_tolerance_and_nothing_else_is_written(card, case):
    run_case(card, case)


@pytest.mark.parametrize("card, case", cases_of("ep_dispatch"), ids=case_id)
def test_a_dispatch_to_oneself_is_permute(card, case):
    got, new = ran(case), made(case)
    permuted = {"source": new["source"][:, 0].contiguous(), "inverse": new["inverse"][..., 0].contiguous()}
    get_card("permute").reference(
        new["x"], new["x_scale"], new["ids"], new["experts"], new["count"], new["out"], new["out_scale"], new["offsets"],
        permuted["source"], permuted["inverse"],
    )  # fmt: skip
    for name in ("out", "out_scale", "offsets"):
        if new[name] is not None:
            assert torch.equal(bits(got[name]), bits(new[name])), name
    total = int(new["offsets"][-1])
    assert torch.equal(got["source"][:, 1], permuted["source"]) and torch.equal(got["inverse"][..., 1], permuted["inverse"])
    assert (got["source"][:total, 0] == 0).all()
    if got["weights"] is not None:
        assert torch.equal(got["out_weights"][:total], got["weights"].flatten()[permuted["source"][:total].long()])


@pytest.mark.parametrize("card, case", cases_of("ep_combine"), ids=case_id)
def test_a_combine_from_oneself_is_unpermute(card, case):
    got, new = ran(case), made(case)
    rows = new["rows"]
    if new["weights"] is not None:  # each row, in FP32, times the weight of the pair that it belongs to
        rows, total = rows.float(), int(new["received"])
        rows[:total] *= new["weights"].flatten()[new["source"][:total, 1].long()][:, None]
    get_card("unpermute").reference(rows, new["inverse"][..., 1], new["shared"], new["count"], new["out"])
    assert torch.equal(bits(got["out"]), bits(new["out"]))


def test_rows_past_those_received_are_not_read():
    case = next(c for c in get_card("ep_combine").enumerate_cases() if "spare" in c.params)
    want, args = ran(case)["out"], made(case)
    total = int(args["received"])
    args["rows"][total:], args["source"][total:] = float("nan"), 1 << 30
    get_card("ep_combine").reference(*args.values())
    assert torch.equal(bits(args["out"]), bits(want))


DISPATCH = Case("ep_dispatch", dict(T=3, K=64, E=4, k=2, x="u8", weights=True))
REDUCE = Case("all_reduce", dict(T=2, N=4, x="f32", operation="sum"))


@pytest.mark.parametrize(("case", "change", "says"), [
    (DISPATCH, {"x_scale": None}, "x_scale must be given"),
    (DISPATCH, {"out_weights": None}, "given together"),
    (DISPATCH, {"experts": 0, "offsets": torch.zeros(1, dtype=I32)}, "at least one expert"),
    (DISPATCH, {"inverse": torch.zeros(3, 2, dtype=I32)}, "inverse"),
    (REDUCE, {"operation": "mean"}, "must be sum or max"),
    (REDUCE, {"out": torch.zeros(2, 4, dtype=torch.bfloat16)}, "x's dtype"),
    (Case("broadcast", dict(T=1, N=4, x="f32")), {"root": 1}, "ranks are 0 .. 0"),
], ids=lambda value: value if isinstance(value, str) else None)  # fmt: skip
def test_a_bad_call_is_refused_before_ranks_meet(case, change, says):
    with pytest.raises(BadCall, match=says):
        check_call(get_card(case.op), {**made(case), **change})


def test_more_rows_than_there_is_room_for_are_refused_and_nothing_is_written():
    args, new = made(DISPATCH), made(DISPATCH)
    for name in ("out", "out_scale", "out_weights", "source"):
        args[name], new[name] = args[name][:5], new[name][:5]
    with pytest.raises(BadCall, match="is sent 6 rows, but its out has room for 5"):
        get_card("ep_dispatch").reference(*args.values())
    for name in ("out", "out_scale", "out_weights", "source", "offsets", "inverse"):
        assert torch.equal(bits(args[name]), bits(new[name])), name


def test_the_bits_of_a_maximum_and_of_an_integer_sum_are_those_of_one_rank():
    for operation, dtype in (("max", torch.bfloat16), ("sum", I32)):
        x = torch.arange(6).view(2, 3).to(dtype)
        args = {**made(REDUCE), "x": x, "operation": operation, "out": torch.zeros_like(x)}
        get_card("all_reduce").reference(*args.values())
        assert torch.equal(args["out"], x)
