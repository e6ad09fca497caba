"""Every Triton kernel against its card, in Triton's interpreter on the CPU.

Needs Triton and TRITON_INTERPRET=1: `tests/triton/test_toolchains.py` runs this file inside the environment that has them.
"""

from __future__ import annotations

import os

import pytest
import torch
from cache_cards import DENSE_ROWS
from deepinfer_hal import formats
from deepinfer_hal.card import Case, get_card
from deepinfer_hal.errors import BadCall
from deepinfer_hal.ops._cache_cases import parse_requests
from deepinfer_hal.weights import prepare_canonical
from harness import assert_row_independent, case_id, cases_of, run_case
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="Triton is not in this environment; tests/triton/test_toolchains.py runs this file")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the interpreter is chosen by TRITON_INTERPRET=1 before Triton is imported", allow_module_level=True)

from deepinfer_hal.kernel import CallSpec, No, Yes  # noqa: E402
from deepinfer_triton.launch import recording  # noqa: E402
from deepinfer_triton.provider import triton_kernels  # noqa: E402
from deepinfer_triton.targets import INTERPRETER, TARGETS  # noqa: E402

KERNELS = {kernel.op: kernel for kernel in triton_kernels(INTERPRETER)}

ROW_CASES = {
    "rms_norm": dict(T=33, N=256, x="f32", out="f32", w="f32", count=None),
    "linear": dict(T=33, K=256, N=512, x="u8", w="fp8_block32", out="u8"),
    "unpermute": dict(T=33, H=64, k=2, dtype="f32", shared=False, holes=True),
    "hyper_connection_pre": dict(T=9, m=4, H=64, dtype="f32"),
    "residual_site": dict(T=18, m=4, H=128, dtype="bf16", codes=True),
    "grouped_linear": dict(T=18, G=2, K=64, N=16, x="u8", w="fp8_block32", out="u8"),
    "engram_gate": dict(T=3, m=4, H=64, dtype="f32"),
}


def is_large(case: Case) -> bool:
    """Cases that cost the interpreter more than a second; what they add is size alone."""
    p = case.params
    rows = p.get("T", p.get("M", p.get("rows", 0)))
    return (
        p.get("N", 0) * p.get("K", 0) > 150_000
        or (case.op in ("load_kv", "write_kv", "store_window_kv") and rows == 33)
        or (case.op in ("select_topk", "select_candidate_blocks") and rows * p["columns"] > 3000)
        or (case.op in ("hyper_connection_pre", "residual_site") and (rows == 33 or p["H"] == 5120))
        or (case.op in ("engram_gate", "engram_lookup") and rows == 33)
        or (case.op == "grouped_linear" and p["K"] * p["G"] > 2048)
        or (case.op in ("permute", "route_topk") and p["E"] == 384)
        or (case.op == "grouped_gemm" and rows > 60)
        or (case.op == "sparse_attention" and p["heads"] * p["k"] > 1024)
        or (case.op == "sparse_attention" and sum(n for _, n in parse_requests(p["requests"])) > 66)
        or (case.op in ("sample", "top_logprobs") and p["S"] * p["V"] > 60_000)
        or (case.op in ("plan_verify_lengths", "verify_drafts") and p["R"] > 30)
        or (case.op == "draft_attention" and (p["heads"] == 64 or len(str(p["anchors"]).split(",")) > 4))
    )


SMALL, LARGE = ([pair for pair in cases_of(*KERNELS) + DENSE_ROWS if is_large(pair[1]) == large] for large in (False, True))


@pytest.mark.parametrize(("card", "case"), SMALL, ids=case_id)
def test_a_kernel_agrees_with_its_card(card, case):
    run_case(card, case, KERNELS[card.name])


@pytest.mark.parametrize(("card", "case"), LARGE, ids=case_id)
def test_a_kernel_agrees_with_its_card_at_size(card, case):
    run_case(card, case, KERNELS[card.name])


@pytest.mark.parametrize("op", ROW_CASES)
def test_a_rows_bits_do_not_depend_on_the_rows_after_it(op):
    params = {name: value for name, value in ROW_CASES[op].items() if value is not None}
    assert_row_independent(get_card(op), Case(op, params), KERNELS[op])


def edge_values() -> torch.Tensor:
    """float32 [n, 32]: rows whose largest value is a scale's boundary, one step beside it, a tie, a subnormal, NaN,
    or infinite.
    """
    largest = []
    for centre in (448.0, 6.0, 1e-4, 7.0, 0.75 * 448, 1.75, 1.5, 2.0**-126 * 6, 2.0**-9 * 6, 3e38, 1e-40, 0.0):
        exact = torch.tensor(centre, dtype=torch.float32)
        largest += [
            exact,
            torch.nextafter(exact, torch.tensor(float("inf"))),
            torch.nextafter(exact, torch.tensor(-1.0)),
        ]
    rows = torch.stack(largest)[:, None] * torch.linspace(-1, 1, 32)[None, :]
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(4) * torch.tensor([1.0, -1.0]).repeat(16)
    broken = torch.ones(3, 32)
    broken[0, 3], broken[1, 4], broken[2, 5] = float("nan"), float("inf"), -float("inf")
    return torch.cat((rows, ties[None], 16 * ties[None], -0.0 * ties[None], broken))


@pytest.mark.parametrize("format", formats.GROUP_SIZE)
def test_codes_and_scales_are_exact_at_every_boundary(format):
    x = edge_values()
    want_codes, want_scales = formats.quantise(x, format)
    codes, scales = torch.empty_like(want_codes), torch.empty_like(want_scales)
    KERNELS["quantise"].fn(x, format, None, codes, scales, None)
    assert torch.equal(scales, want_scales)
    assert torch.equal(codes, want_codes)


@pytest.mark.parametrize("format", formats.GROUP_SIZE)
def test_every_code_and_scale_reads_back_as_the_value_that_it_has(format):
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    width = 256 if format == "fp8_32" else 512
    scales = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, width // formats.GROUP_SIZE[format])
    out = torch.empty(256, width)
    KERNELS["dequantise"].fn(codes, scales, format, None, out)
    want = formats.dequantise(codes, scales, format)
    assert torch.equal(out.view(torch.int32)[~want.isnan()], want.view(torch.int32)[~want.isnan()])
    assert out[want.isnan()].isnan().all()


@pytest.mark.parametrize("op", ["quantise", "dequantise"])
def test_a_row_format_that_does_not_exist_is_refused_in_words(op):
    case = next(case for case in get_card(op).enumerate_cases() if case.params["T"])
    args = {**get_card(op).generate(case, 0, "cpu", prepare_canonical), "format": "no_such_name"}
    with pytest.raises(BadCall, match=f"{op}: format 'no_such_name' is not one of fp8_32"):
        KERNELS[op].fn(*args.values())


def test_an_index_score_of_a_query_with_nan_is_nan():
    case = Case("score_index", dict(requests="5+2", heads=4, d=128, q="dense", format="f32", block_rows=64, dtype="f32", ratio=2))
    args = get_card("score_index").generate(case, 0, "cpu", prepare_canonical)
    args["q"][1, 2, 7] = float("nan")
    KERNELS["score_index"].fn(*args.values())
    seen = int(args["visible"][1])
    assert args["scores"][1, :seen].isnan().all() and args["scores"][0, : int(args["visible"][0])].isfinite().all()


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("op", ["linear", "grouped_linear"])
def test_products_of_a_weight_row_with_a_nan_code_are_nan_and_no_others(op, code):
    case = next(one for one in get_card(op).enumerate_cases() if one.params["T"] == 33 and one.params["x"] == "u8")
    args = get_card(op).generate(case, 0, "cpu", prepare_canonical)
    stored, columns = args["weight"].canonical(), args["weight"].shape[-2]
    stored.values.view(-1, stored.values.shape[-1])[columns - 3, 9] = code  # of the first group
    args |= {"out": torch.zeros(args["out"].shape), "out_scale": None}
    KERNELS[op].fn(*args.values())
    rows = case.params.get("count", 33)
    assert args["out"][:rows, columns - 3].isnan().all() and int(args["out"].isnan().sum()) == rows


def test_every_kernel_states_its_invariance_and_a_symbol_that_names_the_target():
    for target in TARGETS.values():
        for kernel in triton_kernels(target):
            assert kernel.provider == "triton" and kernel.invariant == "yes" and kernel.capturable
            assert kernel.symbol == f"triton::{kernel.op}[{target.name}]"


class Dispatched(TorchDispatchMode):
    """The names of torch's own operators that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("op", KERNELS)
def test_starting_a_kernel_costs_no_operator_of_torch(op):
    card = get_card(op)
    for case in [case for case in card.enumerate_cases() if not is_large(case)][:4]:
        args = card.generate(case, 0, "cpu", prepare_canonical)
        with recording(), Dispatched() as seen:
            KERNELS[op].fn(*args.values())
        assert seen.names == [], case.id


def test_a_refusal_names_the_argument_and_what_the_kernel_knows():
    assert KERNELS["quantise"].supports(CallSpec("quantise", {"x": "bf16", "format": "fp8_32"})) == Yes()
    assert KERNELS["quantise"].supports(CallSpec("quantise", {})) == Yes()
    refused = KERNELS["quantise"].supports(CallSpec("quantise", {"x": "bf16", "format": "int4"}))
    assert isinstance(refused, No) and "'int4'" in refused.reason and "fp8_32" in refused.reason
