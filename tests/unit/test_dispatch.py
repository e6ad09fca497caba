"""How one kernel is chosen per bound op, what the choice says of itself, and what checks and observers see."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from deepinfer_cpu.backend import CpuBackend
from deepinfer_cpu.kernels import native_unavailable_reason
from deepinfer_hal import dispatch, late
from deepinfer_hal.backend import Backend, Capabilities, DeviceInfo
from deepinfer_hal.card import all_cards, get_card
from deepinfer_hal.dispatch import Choice, Dispatcher
from deepinfer_hal.errors import BackendContractError, BadCall, Unsupported
from deepinfer_hal.kernel import Kernel, No, Yes
from deepinfer_hal.statics import call_spec
from deepinfer_hal.weights import prepare_canonical

from tests.conformance.harness import run_case

COMPOSITES = ("moe_layer", "attention_decode_layer", "residual_site", "write_kv", "store_draft_kv")


class OfferingBackend(Backend):
    name = "offering"

    def __init__(self, *kernels: Kernel) -> None:
        self._kernels = kernels

    def probe(self):
        return [DeviceInfo(0, "offering")]

    def device(self, index):
        return torch.device("cpu")

    def capabilities(self, index):
        return Capabilities()

    def kernels(self, index):
        return self._kernels


def kernel(op: str, symbol: str, calls: list | None = None, **changes) -> Kernel:
    """A kernel that notes its symbol in `calls` and does what the reference does."""
    card = get_card(op)

    def fn(*args):
        if calls is not None:
            calls.append(symbol)
        card.reference(*args)

    return Kernel(op, **{"provider": "toy", "fn": fn, "symbol": symbol, "invariant": "yes", **changes})


def dispatcher(*kernels: Kernel, **settings) -> Dispatcher:
    return Dispatcher(OfferingBackend(*kernels), 0, **settings)


def first_case(op: str) -> dict:
    """Arguments of an enumerated case of the op that has rows."""
    card = get_card(op)
    cases = (card.generate(case, 0, "cpu", prepare_canonical) for case in card.enumerate_cases())
    return next(args for args in cases if all(args[name] is None or args[name].numel() for name in card.outputs()))


def symbol_of(given: Dispatcher, op: str, role: str = "") -> str:
    given.bind(op, role)
    return given.choices[op, role].symbol


class TestChoosing:
    def test_the_higher_priority_serves(self):
        calls: list[str] = []
        given = dispatcher(kernel("copy_rows", "slow", calls, priority=1), kernel("copy_rows", "fast", calls, priority=2))
        given.bind("copy_rows")(*first_case("copy_rows").values())
        assert calls == ["fast"]

    def test_equal_priorities_go_to_the_first_offered(self):
        assert symbol_of(dispatcher(kernel("rope", "one"), kernel("rope", "two")), "rope") == "one"

    def test_a_refusal_falls_to_the_next_and_its_reason_is_kept(self):
        picky = kernel("rope", "picky", priority=9, supports=lambda call: No("D = 512 only"))
        given = dispatcher(picky, kernel("rope", "plain"))
        assert symbol_of(given, "rope") == "plain"
        assert given.choices["rope", ""].refused == ("picky: D = 512 only",)

    def test_supports_sees_the_op_its_statics_and_the_mode_and_no_token_counts(self):
        seen = []

        def supports(call):
            seen.append(call)
            return Yes()

        dispatcher(kernel("linear", "k", supports=supports), batch_invariant=True).bind("linear", "wq_b", x="u8", out="bf16")
        (call,) = seen
        assert (call.op, dict(call.statics), call.batch_invariant) == ("linear", {"x": "u8", "out": "bf16"}, True)

    def test_an_answer_that_is_neither_yes_nor_no_breaks_the_contract(self):
        with pytest.raises(BackendContractError, match="supports.. must answer Yes or No, got False"):
            dispatcher(kernel("rope", "k", supports=lambda call: False)).bind("rope")

    def test_kernels_that_are_not_what_they_say_are_all_listed_at_once(self):
        wrong = (
            Kernel("ropes", "toy", print, "typo"),
            Kernel("rope", "toy", print, "vague", invariant="maybe"),
            Kernel("rope", "reference", print, "impostor"),
        )
        with pytest.raises(BackendContractError) as caught:
            dispatcher(*wrong)
        assert [one.split(":")[0] for one in caught.value.mistakes] == ["typo", "vague", "impostor"]

    def test_an_unknown_op_or_fallback_mode_is_refused_with_what_would_be_right(self):
        with pytest.raises(BadCall, match="did you mean linear"):
            dispatcher().bind("liner")
        with pytest.raises(BadCall, match="allow or forbid"):
            dispatcher(fallback="alow")


class TestWhatTheStaticsLeaveOpen:
    """A kernel that serves some calls only is asked again with the call's own statics."""

    def only(self, symbol, calls, priority=9, **wanted):
        def supports(call):
            got = {name: call.statics.get(name) for name in wanted}
            return Yes() if got == wanted else No(f"{wanted} only, got {got}")

        return kernel("linear", symbol, calls, priority=priority, supports=supports, capturable=True)

    def test_is_decided_by_the_call_and_the_table_says_who_serves(self):
        calls: list[str] = []
        given = dispatcher(self.only("fp8", calls, weight="fp8_block32"), self.only("bf16", calls, priority=5, weight="bf16"))
        bound = given.bind("linear", "wq_b", x="u8")
        assert given.choices["linear", "wq_b"].symbol == "reference::linear" and not given.fallbacks and not given.decided()
        served = {"fp8_block32": "fp8", "bf16": "bf16"}
        for case in get_card("linear").enumerate_cases():
            args = get_card("linear").generate(case, 0, "cpu", prepare_canonical)
            calls.clear()
            bound(*args.values())
            wanted = served.get(args["weight"].canonical().format)
            assert calls == ([wanted] if wanted else [])
        table = {one.role: one.symbol for one in given.table()}
        assert set(table.values()) == {"fp8", "bf16", "reference::linear"} and len(table) == 3
        assert {"wq_b", "wq_b #2", "wq_b #3"} == set(table) and given.fallbacks["linear"] == 1
        assert given.decided() == given.table()

    def test_sizes_of_the_weight_are_known_then(self):
        seen = {}

        def supports(call):
            seen.update(call.statics)
            return No("never")

        given = dispatcher(kernel("linear", "curious", priority=9, supports=supports), kernel("linear", "plain"))
        args = first_case("linear")
        given.bind("linear")(*args.values())
        assert (seen["N"], seen["K"]) == tuple(args["weight"].shape) and "T" not in seen

    def test_parts_of_a_composite_are_told_apart(self):
        calls: list[str] = []
        given = dispatcher(self.only("router", calls, weight="bf16"), self.only("dense", calls, weight="fp8_block32"))
        given.bind("moe_layer")(*first_case("moe_layer").values())
        assert calls == ["router", "dense", "dense"]
        assert {one.symbol for one in given.table() if one.role.startswith("in moe_layer")} == {"router", "dense"}
        assert "linear" not in given.fallbacks and "linear" not in given.choices["moe_layer", ""].eager

    def test_known_statics_decide_at_once(self):
        given = dispatcher(self.only("fp8", [], weight="fp8_block32"), kernel("linear", "plain"))
        statics = call_spec(get_card("linear"), first_case("linear")).statics
        assert given.bind("linear", **statics) is given.bind("linear", **statics)
        assert given.decided() == given.table() != []

    def test_a_call_that_nobody_serves_harms_no_other(self):
        calls: list[str] = []
        given = dispatcher(self.only("fp8", calls, weight="fp8_block32"), fallback="forbid")
        bound, card = given.bind("linear"), get_card("linear")
        cases = [card.generate(case, 0, "cpu", prepare_canonical) for case in card.enumerate_cases()]
        for args in (*cases, *cases):
            if args["weight"].canonical().format == "fp8_block32":
                bound(*args.values())
            else:
                with pytest.raises(Unsupported, match="'linear'"):
                    bound(*args.values())
        assert 0 < len(calls) < 2 * len(cases) and set(calls) == {"fp8"}

    def test_an_observer_sees_the_call_once(self):
        seen: list[str] = []
        given = dispatcher(
            self.only("fp8", [], weight="fp8_block32"), kernel("linear", "plain"),
            observer=lambda card, args, call: (seen.append(card.name), call()),
        )  # fmt: skip
        given.bind("linear")(*first_case("linear").values())
        assert seen == ["linear"]


class TestFallingToTheReference:
    def test_it_serves_and_is_counted_once_per_binding(self):
        given = dispatcher(kernel("rope", "k"))
        given.bind("rope")
        given.bind("linear", "wq_b")
        given.bind("linear", "wo_b")
        assert dict(given.fallbacks) == {"linear": 2}
        assert given.choices["linear", "wq_b"].provider == "reference"

    def test_forbidden_it_is_an_error_that_names_op_backend_and_reasons(self):
        given = dispatcher(kernel("rope", "picky", supports=lambda call: No("not today")), fallback="forbid")
        statics = call_spec(get_card("rope"), first_case("rope")).statics
        with pytest.raises(Unsupported, match=r"'offering'.*'rope'.*picky: not today.*fallback is forbidden"):
            given.bind("rope", **statics)
        assert not given.fallbacks and not given.choices
        late = r"'offering' serves this call of op 'rope' \(role 'q'\), and fallback is forbidden.*'allow'.*: picky: not today$"
        with pytest.raises(Unsupported, match=late):
            given.bind("rope", "q")(*first_case("rope").values())

    def test_only_reference_asks_the_backend_for_nothing(self):
        given = dispatcher(kernel("rope", "k"), only_reference=True)
        assert symbol_of(given, "rope") == "reference::rope"


class TestBatchInvariance:
    def test_a_kernel_that_is_not_sure_of_it_may_not_serve(self):
        given = dispatcher(
            kernel("rope", "unsure", priority=9, invariant="unknown"), kernel("rope", "sure"), batch_invariant=True
        )
        assert symbol_of(given, "rope") == "sure"
        assert given.choices["rope", ""].refused == ("unsure: batch invariance is 'unknown'",)

    def test_the_refusal_names_the_op(self):
        given = dispatcher(kernel("linear", "fast", invariant="no"), batch_invariant=True)
        reasons = r"'linear' in batch-invariant mode.*fast: batch invariance is 'no'.*reference::linear"
        with pytest.raises(Unsupported, match=reasons):
            given.bind("linear", "wq_b")

    def test_without_the_mode_it_does_not_matter(self):
        assert symbol_of(dispatcher(kernel("rope", "fast", invariant="no")), "rope") == "fast"


class TestComposites:
    def part_kernels(self, op: str, calls: list, **changes) -> list[Kernel]:
        found = []
        for part in get_card(op).decomposition:
            deeper = get_card(part).decomposition
            found += self.part_kernels(part, calls, **changes) if deeper else [kernel(part, f"k_{part}", calls, **changes)]
        return found

    @pytest.mark.parametrize("op", COMPOSITES)
    def test_a_backend_with_kernels_for_the_parts_alone_serves_the_composite_with_them(self, op):
        calls: list[str] = []
        given = dispatcher(*self.part_kernels(op, calls), fallback="forbid")
        bound = given.bind(op)
        for case in get_card(op).enumerate_cases():
            run_case(get_card(op), case, bound)
        assert set(calls) <= {one.symbol for one in self.part_kernels(op, [])}
        assert len(set(calls)) >= 2
        choice = given.choices[op, ""]
        assert choice.provider == "toy" and choice.symbol.startswith(f"{op}(")
        assert not given.fallbacks

    def test_the_same_bits_come_from_the_parts_as_from_the_reference(self):
        bound = dispatcher(*self.part_kernels("moe_layer", [])).bind("moe_layer")
        left, right = first_case("moe_layer"), first_case("moe_layer")
        bound(*left.values())
        get_card("moe_layer").reference(*right.values())
        assert torch.equal(left["out"], right["out"])

    def test_parts_without_a_kernel_fall_to_references_which_are_counted(self):
        given = dispatcher(kernel("rms_norm", "k_norm"))
        assert symbol_of(given, "residual_site").startswith("residual_site(")
        assert dict(given.fallbacks) == {"hyper_connection_post": 1, "hyper_connection_pre": 1}

    def test_of_equal_priority_the_composite_serves(self):
        given = dispatcher(*self.part_kernels("residual_site", [], priority=5), kernel("residual_site", "mega", priority=5))
        assert symbol_of(given, "residual_site") == "mega"

    def test_parts_of_higher_priority_serve_and_the_lowest_of_them_counts(self):
        mega = kernel("residual_site", "mega", priority=5)
        assert symbol_of(dispatcher(*self.part_kernels("residual_site", [], priority=6), mega), "residual_site") != "mega"
        high = self.part_kernels("residual_site", [], priority=9)
        mixed = [dataclasses.replace(one, priority=4) if one.op == "rms_norm" else one for one in high]
        assert symbol_of(dispatcher(*mixed, mega), "residual_site") == "mega"

    def test_a_composite_that_refuses_gives_way_to_its_parts(self):
        mega = kernel("residual_site", "mega", priority=99, supports=lambda call: No("bf16 only"))
        given = dispatcher(*self.part_kernels("residual_site", []), mega)
        assert symbol_of(given, "residual_site").startswith("residual_site(")
        assert given.choices["residual_site", ""].refused == ("mega: bf16 only",)

    def test_parts_are_as_batch_invariant_as_the_weakest(self):
        unsure = kernel("rms_norm", "unsure", invariant="unknown")
        given = dispatcher(*[one for one in self.part_kernels("residual_site", []) if one.op != "rms_norm"], unsure)
        given.bind("residual_site")
        assert given.choices["residual_site", ""].invariant == "unknown"

    def test_a_part_that_nobody_may_serve_is_named(self):
        given = dispatcher(kernel("rms_norm", "k_norm"), fallback="forbid")
        with pytest.raises(Unsupported, match="residual_site from its parts:.*'hyper_connection_post'"):
            given.bind("residual_site")

    def test_parts_are_checked_too_under_debug_checks(self, monkeypatch):
        checked: list[str] = []
        monkeypatch.setattr(dispatch, "check_call", lambda card, args: checked.append(card.name))
        given = dispatcher(*self.part_kernels("residual_site", []), debug_checks=True)
        given.bind("residual_site")(*first_case("residual_site").values())
        assert checked == ["residual_site", *get_card("residual_site").decomposition]

    @pytest.mark.parametrize("op", COMPOSITES)
    def test_native_parts_give_what_the_card_asks_of_the_composite(self, op):
        backend = CpuBackend()
        parts = [one for one in backend.kernels(0) if one.op not in COMPOSITES]
        if not parts:
            pytest.skip(f"no native kernels: {native_unavailable_reason()}")
        bound = dispatcher(*parts, fallback="forbid").bind(op)
        for case in get_card(op).enumerate_cases():
            run_case(get_card(op), case, bound, prepare=lambda role, canonical: backend.prepare_weight(0, role, canonical))


class TestTheChoice:
    def test_it_is_frozen_and_prints_as_a_sentence(self):
        given = dispatcher(kernel("linear", "picky", supports=lambda call: No("f32 only")), kernel("linear", "di_linear"))
        given.bind("linear", "wq_b")
        (choice,) = given.table()
        assert str(choice) == "linear[wq_b]: di_linear by toy, batch invariance yes; refused: picky: f32 only"
        with pytest.raises(dataclasses.FrozenInstanceError):
            choice.provider = "other"

    def test_the_table_is_sorted_and_has_every_binding_once(self):
        given = dispatcher()
        for op, role in (("rope", ""), ("linear", "wq_b"), ("linear", "head"), ("rope", "")):
            given.bind(op, role)
        assert [(one.op, one.role) for one in given.table()] == [("linear", "head"), ("linear", "wq_b"), ("rope", "")]

    def test_one_role_has_one_kernel(self):
        def supports(call):
            return Yes() if call.statics["x"] == "bf16" else No("bf16 only")

        given = dispatcher(kernel("linear", "fast", priority=1, supports=supports), kernel("linear", "plain"))
        given.bind("linear", "head", x="bf16")
        given.bind("linear", "head", x="bf16")
        with pytest.raises(BadCall, match="role 'head' is bound to fast already"):
            given.bind("linear", "head", x="f32")
        assert given.choices["linear", "head"] == Choice("linear", "head", "toy", "fast", "yes", eager=("linear",))


class TestChecksAndObservers:
    def bad_call(self) -> dict:
        return {**first_case("copy_rows"), "src_rows": torch.zeros(1, dtype=torch.int64)}

    def test_debug_checks_stop_a_bad_call_before_the_kernel_runs(self):
        calls: list[str] = []
        bound = dispatcher(kernel("copy_rows", "k", calls), debug_checks=True).bind("copy_rows")
        with pytest.raises(BadCall, match="copy_rows: src_rows must be int32, got int64"):
            bound(*self.bad_call().values())
        assert not calls
        bound(**first_case("copy_rows"))
        assert calls == ["k"]

    def test_without_debug_checks_or_observer_the_bound_call_is_the_kernel_itself(self):
        one = kernel("copy_rows", "k")
        assert dispatcher(one).bind("copy_rows") is one.fn

    @pytest.mark.parametrize("debug_checks", [False, True])
    def test_an_observer_gets_every_call_by_name_and_makes_it(self, debug_checks):
        calls: list[str] = []
        seen = []

        def observer(card, args, call):
            seen.append((card.name, list(args)))
            assert not calls
            call()

        given = dispatcher(kernel("copy_rows", "k", calls), observer=observer, debug_checks=debug_checks)
        given.bind("copy_rows")(*first_case("copy_rows").values())
        assert seen == [("copy_rows", list(get_card("copy_rows").arg_names))]
        assert calls == ["k"]

    def test_an_observer_can_be_taken_away(self):
        given = dispatcher(observer=lambda card, args, call: pytest.fail("was taken away"))
        bound = given.bind("copy_rows")
        given.observer = None
        bound(*first_case("copy_rows").values())


def test_every_composite_of_the_catalogue_is_tested_here():
    assert {card.name for card in all_cards().values() if card.decomposition} == set(COMPOSITES)


def test_kinds_of_call_that_come_without_end_are_not_kept_without_end(monkeypatch):
    monkeypatch.setattr(late, "MOST_KINDS", 4)
    served = []
    kernel = Kernel("stream_collapse", "p", lambda *args: served.append(args[0].shape), "p::stream_collapse", priority=1)
    call = late.LateCall(get_card("stream_collapse"), [kernel], False, lambda kernel, refused: None)
    for width in range(1, 12):
        streams = torch.zeros(2, 4, width)
        call(streams, torch.zeros(2, 4), None, torch.zeros(2, width))
    assert len(served) == 11 and len(call._known) <= 4 and len(call._seen) <= 4
