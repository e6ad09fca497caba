"""The CPU backend's native kernels: right by their cards, the same bits for any batch, thread count and instruction level."""

from __future__ import annotations

import pytest
import torch
from cache_cards import DENSE_ROWS
from deepinfer_cpu import kernels
from deepinfer_cpu.weights import PanelWeight, TableWeight, prepare_weight, prepared_nbytes
from deepinfer_hal import formats
from deepinfer_hal.card import get_card
from deepinfer_hal.errors import BadCall
from deepinfer_hal.weights import CanonicalWeight
from harness import case_id, cases_of, run_case

pytestmark = pytest.mark.skipif(kernels.native() is None, reason=f"native kernels: {kernels.native_unavailable_reason()}")

OPS = sorted(kernel.op for kernel in kernels.native_kernels())


def native(op: str):
    return kernels.bind(get_card(op))


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8) if x.dim() else x


@pytest.fixture(autouse=True)
def restore_settings():
    """Threads and instruction level as they were."""
    module = kernels.native()
    threads, level = module.num_threads(), module.level()
    yield
    module.set_num_threads(threads)
    module.set_level(level)


# ------------------------------------------------------------------------------------------------ by the cards


@pytest.mark.parametrize(("card", "case"), cases_of(*OPS) + DENSE_ROWS, ids=case_id)
def test_kernel_agrees_with_its_card(card, case):
    run_case(card, case, native(card.name), prepare=prepare_weight)


@pytest.mark.parametrize(("card", "case"), cases_of(*OPS), ids=case_id)
def test_every_instruction_level_gives_the_same_bits(card, case):
    module, results = kernels.native(), []
    for level in ("avx512", "avx2", "base"):
        module.set_level(level)
        args = card.generate(case, 3, "cpu", prepare_weight)
        native(card.name)(*args.values())
        results.append([bits(args[name]) for name in card.outputs() if args[name] is not None])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


# ------------------------------------------------------------------------------------------------ invariance


def _rows(args: dict, names: tuple[str, ...], rows: int) -> dict:
    """The call cut to its first rows, with fresh outputs."""
    return {k: v[:rows].clone() if k in names and v is not None else v for k, v in args.items()}


BATCHED = {
    "linear": (dict(T=33, K=256, N=70, x="u8", w="fp8_block32", out="bf16"), ("x", "x_scale", "out")),
    "grouped_linear": (
        dict(T=33, G=2, K=256, N=64, x="u8", w="fp8_block32", out="u8"), ("x", "x_scale", "out", "out_scale"),
    ),
    "moe_layer": (
        dict(T=33, H=256, E=8, k=2, I=128, dtype="bf16", codes=True), ("x", "x_codes", "x_scales", "out"),
    ),
    "residual_site": (
        dict(T=33, m=4, H=256, dtype="bf16", codes=True),
        ("y", "post", "comb", "pre_prev", "streams", "out", "out_codes", "out_scales", "pre", "post_out", "comb_out"),
    ),
    "sparse_attention": (
        dict(requests="120+33", heads=4, D=512, k=64, block_rows=64, dtype="bf16", window="fp8_32", compressed="fp4_16",
             storage="flat"),
        ("q", "rows", "row_to_req", "positions", "out"),
    ),
    "score_index": (
        dict(requests="120+33", heads=4, d=128, q="mxfp4_32", format="mxfp4_32", block_rows=128, dtype="bf16", ratio=1),
        ("q", "q_scale", "weights", "row_to_req", "visible", "scores"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("op", BATCHED)
def test_a_row_has_the_same_bits_in_any_batch_and_with_any_threads(op):
    card, (params, by_row) = get_card(op), BATCHED[op]
    case = next(iter(card.enumerate_cases())).__class__(op, params)
    fn, module = native(op), kernels.native()
    whole = card.generate(case, 5, "cpu", prepare_weight)
    rows = whole[by_row[0]].shape[0]
    fresh = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in whole.items()}
    fn(*whole.values())
    outputs = [name for name in card.outputs() if name in by_row and whole[name] is not None]
    for threads in (1, 2):
        module.set_num_threads(threads)
        for few in range(1, rows + 1):
            part = _rows(fresh, by_row, few)
            fn(*part.values())
            for name in outputs:
                assert torch.equal(bits(part[name]), bits(whole[name][:few])), (name, few, threads)


def test_an_expert_row_does_not_depend_on_the_rows_beside_it():
    card, fn = get_card("grouped_gemm"), native("grouped_gemm")
    case = next(c for c in card.enumerate_cases() if c.params["M"] == 66)
    args = card.generate(case, 0, "cpu", prepare_weight)
    fn(*args.values())
    bounds = args["offsets"].tolist()
    for threads in (1, 2):
        kernels.set_num_threads(threads)
        for expert, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
            for row in range(start, stop):
                offsets = torch.zeros_like(args["offsets"])
                offsets[expert + 1 :] = 1
                alone = torch.empty_like(args["out"][:1])
                fn(args["x"][row : row + 1], args["x_scale"][row : row + 1], args["weight"], offsets, alone, None)
                assert torch.equal(bits(alone[0]), bits(args["out"][row]))


def test_threads_share_work_without_losing_any():
    x, handle = torch.randn(200, 256), prepare_weight("linear", CanonicalWeight("f32", torch.randn(512, 256)))
    fn, results = native("linear"), []
    for threads in (1, 2, 3, 5):
        kernels.set_num_threads(threads)
        for _ in range(20):
            out = torch.full((200, 512), float("nan"))
            fn(x, None, handle, None, out, None)
            results.append(out)
    assert all(torch.equal(results[0], other) for other in results[1:])


# ------------------------------------------------------------------------------------------------ weights


def _canonical(fmt: str, *shape: int) -> CanonicalWeight:
    torch.manual_seed(len(shape))
    dense = torch.randn(shape)
    if fmt in ("bf16", "f32"):
        return CanonicalWeight(fmt, dense.to({"bf16": torch.bfloat16, "f32": torch.float32}[fmt]))
    if fmt == "fp4_row32":
        return CanonicalWeight(fmt, *formats.quantise(dense, "mxfp4_32"))
    pairs = [formats.quantise_weight_fp8(part) for part in dense.reshape(-1, *shape[-2:])]
    values, scales = (torch.stack(parts) for parts in zip(*pairs, strict=True))
    return CanonicalWeight(fmt, values.reshape(shape), scales.reshape(*shape[:-2], *scales.shape[-2:]))


def _same(a: CanonicalWeight, b: CanonicalWeight) -> bool:
    scales = (a.scales is None and b.scales is None) or torch.equal(a.scales, b.scales)
    return a.format == b.format and scales and torch.equal(bits(a.values), bits(b.values))


@pytest.mark.parametrize("shape", [(64, 96), (70, 64), (3, 48, 64), (1, 320)])
@pytest.mark.parametrize("fmt", ["bf16", "f32", "fp8_block32", "fp4_row32"])
def test_prepared_weights_give_the_checkpoint_back(fmt, shape):
    canonical = _canonical(fmt, *shape)
    handle = prepare_weight("wq_b", canonical)
    assert isinstance(handle, PanelWeight)
    assert _same(handle.canonical(), canonical)
    assert torch.equal(handle.dequantise(), canonical.dequantise())
    assert handle.nbytes == prepared_nbytes("wq_b", shape, fmt)
    if len(shape) == 3:
        assert torch.equal(handle.slot(2).dequantise(), canonical.dequantise()[2])
        assert torch.equal(bits(handle.slot(1).canonical().values), bits(canonical.values[1]))
        with pytest.raises(BadCall, match="3 slots"):
            handle.slot(3)


def test_every_fp8_code_under_every_scale_comes_back():
    values = torch.arange(256, dtype=torch.uint8).repeat(32, 1)
    scales = torch.arange(0, 255, dtype=torch.uint8)
    for part in scales.split(8):
        canonical = CanonicalWeight("fp8_block32", values, part.repeat(8)[:8].reshape(1, 8))
        assert _same(prepare_weight("wq_b", canonical).canonical(), canonical)
        finite = CanonicalWeight("fp8_block32", torch.where(values % 128 == 127, 0, values).to(torch.uint8), canonical.scales)
        assert _same(prepare_weight("wq_b", finite).canonical(), finite)


@pytest.mark.parametrize(("role", "fmt"), [("embedding", "bf16"), ("markov_embed", "bf16"), ("engram_table", "fp8_row32")])
def test_tables_keep_the_checkpoint_bytes(role, fmt):
    dense = torch.randn(40, 64)
    parts = formats.quantise(dense, "fp8_32") if fmt == "fp8_row32" else (dense.to(torch.bfloat16),)
    canonical = CanonicalWeight(fmt, *parts)
    handle = prepare_weight(role, canonical)
    assert isinstance(handle, TableWeight)
    assert _same(handle.canonical(), canonical)
    assert handle.nbytes == prepared_nbytes(role, (40, 64), fmt)


# ------------------------------------------------------------------------------------------------ refusals


def _linear_call(**changes):
    x, weight = torch.randn(3, 64), prepare_weight("linear", CanonicalWeight("f32", torch.randn(32, 64)))
    args = dict(x=x, x_scale=None, weight=weight, count=None, out=torch.empty(3, 32), out_scale=None)
    args.update(changes)
    native("linear")(*args.values())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (dict(x=torch.randn(3, 63)), r"x must be \[T, 64\]"),
        (dict(x=torch.randn(3, 64, dtype=torch.float64)), "bf16 or f32"),
        (dict(x=torch.randn(64, 64).t()[:3]), r"x must be \[T, 64\]"),
        (dict(x=torch.zeros(3, 64, dtype=torch.uint8)), "with scales"),
        (dict(out=torch.empty(3, 31)), r"out must be \[T, 32\]"),
        (dict(out=torch.empty(2, 32)), r"out must be \[T, 32\]"),
        (dict(count=torch.tensor([1])), "count must be int32"),
        (dict(weight=torch.randn(32, 64)), "weight must be a weight handle"),
        (dict(x=7), "x must be a tensor, got int"),
    ],
)
def test_a_call_that_breaks_its_card_is_refused(changes, says):
    with pytest.raises(BadCall, match=says):
        _linear_call(**changes)


def test_arguments_may_be_named_and_mistakes_in_names_are_told():
    fn, x = native("quantise"), torch.randn(2, 32)
    codes, scales = torch.empty(2, 32, dtype=torch.uint8), torch.empty(2, 1, dtype=torch.uint8)
    fn(x, "fp8_32", None, codes=codes, scales=scales, flags=None)
    assert torch.equal(codes, formats.quantise(x, "fp8_32")[0])
    with pytest.raises(BadCall, match="unknown argument 'code'"):
        fn(x, "fp8_32", None, code=codes, scales=scales)
    with pytest.raises(BadCall, match="given twice"):
        fn(x, "fp8_32", None, codes, codes=codes, scales=scales)
    with pytest.raises(BadCall, match="format"):
        fn(x, "fp9", None, codes, scales, None)
    with pytest.raises(BadCall, match="takes 6 arguments, got 7"):
        fn(x, "fp8_32", None, codes, scales, None, None)


def test_a_slot_outside_the_store_writes_nothing():
    cache = torch.full((4, 528), 7, dtype=torch.uint8)
    native("store_window_kv")(torch.randn(3, 512), torch.tensor([4, -1, 2**30], dtype=torch.int32), "fp8_32", None, cache)
    assert (cache == 7).all()


def test_a_page_outside_the_cache_is_no_key():
    """A block table that names a block that is not there must not be followed."""
    card = get_card("sparse_attention")
    case = next(c for c in card.enumerate_cases() if c.params["requests"] == "0+3,127+1,300+6")
    args = card.generate(case, 0, "cpu", prepare_weight)
    args["block_table"] = args["block_table"] + 10_000
    native("sparse_attention")(*args.values())
    without = card.generate(case, 0, "cpu", prepare_weight)
    without["rows"] = torch.full_like(without["rows"], -1)
    native("sparse_attention")(*without.values())
    assert torch.equal(bits(args["out"]), bits(without["out"]))
