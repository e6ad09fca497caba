"""Each check is needed: a kernel that is wrong in one way is caught by it, and passes when it alone is taken away."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepinfer_hal.backend import Capabilities
from deepinfer_hal.card import Case, get_card
from deepinfer_hal.conformance import CHECKS, CORE, FULL, run_op
from deepinfer_hal.conformance.execute import EMULATED_REPEAT_SECONDS, share_repetitions
from deepinfer_hal.kernel import Kernel
from deepinfer_hal.weights import CanonicalWeight, WeightHandle
from suite_backends import Example, open_boasting

from tests.conformance import captured

LINEAR = Case("linear", dict(T=21, K=64, N=32, x="f32", w="f32", out="f32"))
COUNTED = Case("linear", dict(T=9, K=64, N=32, x="bf16", w="bf16", out="bf16", count=4))
NORM = Case("rms_norm", dict(T=5, N=64, x="f32", out="f32", w="f32"))
CODED = Case("linear", dict(T=3, K=64, N=32, x="bf16", w="fp8_block32", out="f32"))
SITE = Case("residual_site", dict(T=3, m=4, H=64, dtype="f32", codes=False))
SUMS = Case("all_reduce", dict(T=3, N=64, x="f32", operation="sum"))
PLAIN_LINEAR = Case("linear", dict(T=5, K=64, N=32, x="bf16", w="bf16", out="f32"))


@dataclass(frozen=True)
class Wrong:
    """A kernel of `case`'s op that the named check must catch, alone."""

    check: str
    name: str
    case: Case
    fn: Callable[..., None] | None = None
    options: Any = None

    def results(self, checks: Any) -> list[Any]:
        card = get_card(self.case.op)
        more = dict(self.options() if self.options else {})
        kernel = more.pop("kernel", None) or Kernel(card.name, "mutant", self.fn, f"reference::{card.name}+{self.name}", "yes")
        return run_op(card, kernel, CORE, checks, cases=[self.case], **more)


def stable_linear(x, x_scale, weight, count, out, out_scale) -> None:
    """x W^T by sums that do not depend on the number of rows."""
    n = x.shape[0] if count is None else int(count[0])
    if n:
        out[:n] = (x[:n, None].double() * weight.dequantise().double()).sum(-1).to(out.dtype)


def past_the_count(x, x_scale, weight, count, out, out_scale) -> None:
    stable_linear(x, x_scale, weight, count, out, out_scale)
    if count is not None and 0 < int(count[0]) < out.shape[0]:
        out[int(count[0])] = 0


def no_zero_rows(x, x_scale, weight, count, out, out_scale) -> None:
    stable_linear(x, x_scale, weight, count, out, out_scale)
    if x.shape[0] == 0 or (count is not None and int(count[0]) == 0):
        raise RuntimeError("a grid of no blocks")


def accumulates(x, x_scale, weight, count, out, out_scale) -> None:
    before = out.clone()
    stable_linear(x, x_scale, weight, count, out, out_scale)
    out += torch.where(before == 1234.5, before, 0)


def past_the_end(x, x_scale, weight, count, out, out_scale) -> None:
    stable_linear(x, x_scale, weight, count, out, out_scale)
    if out.numel() and count is None:
        out.as_strided((1,), (1,), out.storage_offset() + (out.shape[0] - 1) * out.stride(0) + out.shape[1] + 40).fill_(1)


def eats_its_input(x, x_scale, weight, count, out, out_scale) -> None:
    stable_linear(x, x_scale, weight, count, out, out_scale)
    x.zero_()


def reads_the_padding(x, x_scale, weight, count, out, out_scale) -> None:
    stable_linear(x, x_scale, weight, count, out, out_scale)
    if count is not None and int(count[0]):
        out[0] += (0 * x[int(count[0]) :].float().sum()).to(out.dtype)


def forgets_the_stride(x, x_scale, weight, count, out, out_scale) -> None:
    dense = x.as_strided(x.shape, (x.shape[1], 1), x.storage_offset())
    stable_linear(dense, x_scale, weight, count, out, out_scale)


def stable_norm(x, weight, eps, count, out, codes, scales, *, clean=False, half=False) -> None:
    n = x.shape[0] if count is None else int(count[0])
    wide = x[:n].double()
    if clean:
        wide = wide.nan_to_num(0.0, posinf=0.0, neginf=0.0)
    large = half and bool((wide[wide.isfinite()].abs() > 1e3).any())
    squares = (wide.float() * wide.float()).half().double() if large else wide * wide
    out[:n] = (weight.double() * wide * torch.rsqrt(squares.mean(-1, keepdim=True) + eps)).to(out.dtype)


QUANTISE = Case("quantise", dict(T=3, N=64, format="fp8_32", dtype="bf16"))


def any_format(x, format, count, codes, scales, flags) -> None:
    get_card("quantise").reference(x, format if format == "fp8_32" else "fp8_32", count, codes, scales, flags)


class GlitchOnce:
    """Right, but for one value of the 300th call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *values: Any) -> None:
        stable_linear(*values)
        self.calls += 1
        if self.calls == 300:
            values[4].view(torch.int32)[0, 0] += 1


def splits_by_rows(x, x_scale, weight, count, out, out_scale) -> None:
    stable_linear(x, x_scale, weight, count, out, out_scale)
    if x.shape[0] > 16 and count is None:
        out.view(torch.int32)[:] += 1


ATTENTION = Case(
    "sparse_attention",
    dict(
        requests="140+2,3+1", heads=2, D=512, k=64, block_rows=64, dtype="f32", window="fp8_32", compressed="fp4_16",
        storage="ring",
    ),
)  # fmt: skip


def one_row_at_a_time(*values: Any, change: Callable[[dict[str, Any]], dict[str, Any]] = lambda args: args) -> None:
    """sparse_attention with bits that do not depend on other rows."""
    card = get_card("sparse_attention")
    args = dict(zip(card.arg_names, values, strict=True))
    valid = args["q"].shape[0] if args["count"] is None else int(args["count"][0])
    for row in range(valid):
        one = {k: args[k][row : row + 1] if k in ("q", "rows", "row_to_req", "positions", "out") else v for k, v in args.items()}
        card.reference(*change({**one, "count": None}).values())


def follows_page_ids(*values: Any) -> None:
    one_row_at_a_time(*values)
    args = dict(zip(get_card("sparse_attention").arg_names, values, strict=True))
    if args["block_table"].numel() and int(args["block_table"][0, 0]) % 2:
        args["out"].view(torch.int32)[:] += 1


def sink_in_the_numerator(*values: Any) -> None:
    one_row_at_a_time(*values, change=lambda args: {**args, "sink": args["sink"] + 1.0})


ROUTE = Case("route_topk", dict(T=5, E=8, k=2, ties=True))


def ties_upward(logits, bias, k, scaling, expert_map, count, ids, weights, counts) -> None:
    """Chooses among mirrored experts, so equal scores go to the higher id."""
    get_card("route_topk").reference(logits.flip(1), bias.flip(0), k, scaling, None, count, ids, weights, counts)
    n = ids.shape[0] if count is None else int(count[0])
    ids[:n] = logits.shape[1] - 1 - ids[:n]
    counts.copy_(counts.flip(0))


CARRY = Case("compress_kv", dict(requests="7+5,12+4", ratio=4, L=9, D=64, dtype="f32"))


def carry_loses_a_bit(value, gate, positions, row_to_req, cu_q, state_slots, complete, ratio, carry, out) -> None:
    first = positions[cu_q[:-1].long()] if positions.numel() else positions
    get_card("compress_kv").reference(value, gate, positions, row_to_req, cu_q, state_slots, complete, ratio, carry, out)
    for group, row in enumerate(complete.tolist()):
        if row >= 0 and int(positions[row]) - ratio + 1 < int(first[int(row_to_req[row])]):
            out.view(torch.int32)[group] += 1


def boasting() -> dict[str, Any]:
    return {"kernel": open_boasting("")[0].kernels(0)[0]}


def with_wrong_part() -> dict[str, Any]:
    def twice(x, weight, eps, count, out, codes, scales) -> None:
        get_card("rms_norm").reference(x, weight * 2, eps, count, out, codes, scales)

    part = Kernel("rms_norm", "mutant", twice, "twice", "yes")
    whole = Kernel("residual_site", "mutant", get_card("residual_site").reference, "reference::residual_site", "unknown")
    return {"kernel": whole, "parts": {"rms_norm": part}}


class LossyCodes(Example):
    """Its layout of fp8 weights turns the codes of -0 into those of +0."""

    def prepare_weight(self, index: int, role: str, canonical: CanonicalWeight) -> WeightHandle:
        values = torch.where(canonical.values == 0x80, 0, canonical.values)
        return WeightHandle(role, CanonicalWeight(canonical.format, values, canonical.scales))


def with_lossy_codes() -> dict[str, Any]:
    kernel = Kernel("linear", "mutant", stable_linear, "linear+positive_zeros", "yes")
    return {"kernel": kernel, "backend": LossyCodes(kernel)}


class Deferred(Example):
    """Runs calls when it is waited for, out of order with copies."""

    def __init__(self, *kernels: Kernel) -> None:
        super().__init__(*kernels)
        self._calls: list[Callable[[], None]] = []

    def synchronize(self, index: int) -> None:
        while self._calls:
            self._calls.pop(0)()


def deferred() -> dict[str, Any]:
    backend = Deferred()
    kernel = Kernel("linear", "mutant", lambda *v: backend._calls.append(lambda: stable_linear(*v)), "linear+runs_aside", "yes")
    return {"kernel": kernel, "backend": backend}


def allocating() -> dict[str, Any]:
    return {"kernel": Kernel("linear", "mutant", stable_linear, "linear+allocates", "yes", capturable=True)}


class Graphing(Example):
    """Has graphs, and an all_reduce that may be captured; `keep`: it then goes on giving the sums of its capture."""

    def __init__(self, keep: bool) -> None:
        self._graphs = captured.Graphs()
        fn = captured.sums_of_one_rank(self._graphs, keep)
        super().__init__(Kernel("all_reduce", "example", fn, "reference::all_reduce+captured", "yes", capturable=True))

    def capabilities(self, index: int) -> Capabilities:
        return replace(super().capabilities(index), graphs=True)

    def graphs(self, index: int) -> captured.Graphs:
        return self._graphs


def captured_for_good() -> dict[str, Any]:
    backend = Graphing(keep=True)
    return {"kernel": backend.kernels(0)[0], "backend": backend}


def leaking() -> dict[str, Any]:
    kept = []

    def leak(*values: Any) -> None:
        stable_linear(*values)
        kept.append(torch.empty(1))

    return {"kernel": Kernel("linear", "mutant", leak, "linear+keeps_a_tensor", "yes")}


WRONG = [
    Wrong("claims", "boasts", Case("stream_collapse", dict(T=3, m=4, H=64, dtype="f32")), options=boasting),
    Wrong("empty", "no_zero_rows", Case("linear", dict(T=0, K=64, N=32, x="bf16", w="bf16", out="bf16")), no_zero_rows),
    Wrong("values", "sink_in_the_numerator", ATTENTION, sink_in_the_numerator),
    Wrong("discrete", "ties_upward", ROUTE, ties_upward),
    Wrong("untouched", "past_the_count", COUNTED, past_the_count),
    Wrong("overwrite", "accumulates", PLAIN_LINEAR, accumulates),
    Wrong("sentinels", "past_the_end", PLAIN_LINEAR, past_the_end),
    Wrong("inputs", "eats_its_input", PLAIN_LINEAR, eats_its_input),
    Wrong("poison", "reads_the_padding", COUNTED, reads_the_padding),
    Wrong("views", "forgets_the_stride", PLAIN_LINEAR, forgets_the_stride),
    Wrong("nan", "hides_bad_values", NORM, lambda *v: stable_norm(*v, clean=True)),
    Wrong("extremes", "squares_in_half", NORM, lambda *v: stable_norm(*v, half=True)),
    Wrong("bad_calls", "takes_any_format", QUANTISE, any_format),
    Wrong("repeat", "glitches_once", PLAIN_LINEAR, options=lambda: {
        "kernel": Kernel("linear", "mutant", GlitchOnce(), "linear+glitches_once", "yes")}),
    Wrong("batch", "splits_by_rows", LINEAR, splits_by_rows),
    Wrong("paging", "follows_page_ids", ATTENTION, follows_page_ids),
    Wrong("chunks", "carry_loses_a_bit", CARRY, carry_loses_a_bit),
    Wrong("composites", "wrong_part", SITE, options=with_wrong_part),
    Wrong("weights", "positive_zeros", CODED, options=with_lossy_codes),
    Wrong("stream_order", "runs_aside", PLAIN_LINEAR, options=deferred),
    Wrong("capturable", "allocates", PLAIN_LINEAR, options=allocating),
    Wrong("graphs", "keeps_what_it_captured", SUMS, options=captured_for_good),
    Wrong("memory", "keeps_a_tensor", PLAIN_LINEAR, options=leaking),
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=lambda one: f"{one.check}-{one.name}")
def test_a_wrong_kernel_is_caught_by_its_check_and_by_no_other(wrong):
    (caught,) = wrong.results(CHECKS)
    assert caught.verdict == "fail" and set(caught.failures) == {wrong.check}, caught.failures
    (lives,) = wrong.results(CHECKS.without(wrong.check))
    assert lives.verdict != "fail", lives.failures


def test_every_check_has_a_kernel_that_only_it_catches():
    assert {one.check for one in WRONG} == set(CHECKS)


def test_an_emulated_device_repeats_an_op_at_least_as_often_as_a_chip_repeats_a_case():
    on_chip, emulated = share_repetitions(FULL, 40), share_repetitions(FULL, 40, emulated=True)
    assert on_chip.repetitions == emulated.repetitions == 1000 and math.isinf(on_chip.repeat_seconds)
    assert (emulated.repeat_least, emulated.repeat_seconds) == (25, EMULATED_REPEAT_SECONDS / 40)
    assert share_repetitions(FULL, 5000, emulated=True).repeat_least == FULL.repeat_least == 3
    assert share_repetitions(CORE, 4, emulated=True) == share_repetitions(CORE, 4)


def test_every_check_says_why_in_a_sentence():
    for check in CHECKS.values():
        assert check.why.endswith(".") and len(check.why.split()) >= 6


RIGHT = {
    "linear": (LINEAR, stable_linear),
    "rms_norm": (NORM, stable_norm),
    "sparse_attention": (ATTENTION, one_row_at_a_time),
}


@pytest.mark.parametrize("op", RIGHT)
def test_the_kernels_that_the_wrong_ones_are_made_from_pass(op):
    case, fn = RIGHT[op]
    card = get_card(op)
    (result,) = run_op(card, Kernel(op, "example", fn, f"reference::{op}+nothing", "yes"), CORE, cases=[case])
    assert result.verdict == "pass", result.failures


def test_a_captured_kernel_that_reads_what_memory_holds_at_the_replay_passes():
    backend = Graphing(keep=False)
    (result,) = run_op(get_card("all_reduce"), backend.kernels(0)[0], CORE, cases=[SUMS], backend=backend)
    assert result.verdict == "pass" and "graphs" in result.checks, result.failures


def test_a_kernel_that_is_too_slow_for_more_than_its_first_runs_is_not_taken_for_one_that_changes():
    backend = Graphing(keep=False)
    slow = replace(CORE, repeat_seconds=0.0)
    (result,) = run_op(get_card("all_reduce"), backend.kernels(0)[0], slow, CHECKS.only("repeat"), cases=[SUMS], backend=backend)
    assert result.verdict == "pass", result.failures


def test_a_bit_that_changes_in_a_late_replay_is_seen():
    backend, calls = Graphing(keep=False), []

    def glitching(comm, x, operation, out):
        def work():
            calls.append(1)
            out.copy_(x if len(calls) != 700 else x + 1)

        backend.graphs(0).launch(work)

    kernel = Kernel("all_reduce", "example", glitching, "reference::all_reduce+glitches", "yes", capturable=True)
    checks = CHECKS.only("repeat")
    (result,) = run_op(get_card("all_reduce"), kernel, FULL, checks, cases=[SUMS], backend=backend)
    assert result.failures == {"repeat": "a replayed run gave other bits in out than run 1"} and len(calls) > 1000


def test_a_call_that_cannot_be_captured_fails_with_what_the_device_said():
    class Refusing(Graphing):
        def graphs(self, index):
            return SimpleNamespace(capture=self._refuse)

        def _refuse(self, step):
            raise RuntimeError("operation not permitted when stream is capturing")

    backend = Refusing(keep=False)
    (result,) = run_op(get_card("all_reduce"), backend.kernels(0)[0], CORE, cases=[SUMS], backend=backend)
    assert set(result.failures) == {"graphs"} and "not permitted when stream is capturing" in result.failures["graphs"]


def test_a_view_of_a_weights_bytes_is_no_allocation():
    def viewing(x, x_scale, weight, count, out, out_scale=None):
        torch.mm(x, weight.canonical().values.t(), out=out)

    case = Case("linear", dict(T=3, K=64, N=32, x="f32", w="f32", out="f32"))
    kernel = Kernel("linear", "example", viewing, "linear+views", "yes", capturable=True)
    (result,) = run_op(get_card("linear"), kernel, CORE, cases=[case], checks=CHECKS.only("capturable"))
    assert result.verdict == "pass", result.failures


def test_the_page_lists_every_check_with_its_reason():
    page = (Path(__file__).parents[2] / "docs" / "conformance.md").read_text(encoding="utf-8")
    rows = [f"| {check.name} | {check.why} |" for check in CHECKS.values()]
    assert "\n".join(rows) in page
