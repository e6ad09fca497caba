"""What the index kernel in CUDA C++ builds on, without a GPU: e2m1 codes as e4m3 operands, exact group sums, what it offers."""

from __future__ import annotations

import torch
from deepinfer_cuda import native
from deepinfer_hal import formats
from deepinfer_hal.kernel import CallSpec, No, Yes

LOWEST_SHIFT, TOP_SHIFT = -8, 6
"""kernels_cuda/score_index.cu folds a query's scale into its operand within these powers of two."""

SEED = 20261129


def answer(op: str, **statics) -> Yes | No:
    return native.supports(CallSpec(op, statics))


def test_a_query_code_times_its_folded_scale_is_an_e4m3_value():
    representable = set(formats.E4M3_VALUES()[:127].tolist())
    for shift in range(LOWEST_SHIFT, TOP_SHIFT + 1):
        assert all(value * 2.0**shift in representable for value in formats.E2M1_VALUES()[:8].tolist())
    too_small, too_large = 0.5 * 2.0 ** (LOWEST_SHIFT - 1), 6.0 * 2.0 ** (TOP_SHIFT + 1)
    assert too_small not in representable and too_large not in representable


def test_shifted_bits_of_a_key_code_are_an_e4m3_code_of_a_64th_of_it():
    packed = torch.arange(256)
    low = (packed << 4 & 0x80) | (packed << 2 & 0x1C)
    high = (packed & 0x80) | (packed >> 2 & 0x1C)
    value, e4m3 = formats.E2M1_VALUES(), formats.E4M3_VALUES()
    assert torch.equal(e4m3[low] * 64, value[packed & 15])
    assert torch.equal(e4m3[high] * 64, value[packed >> 4])


def test_a_groups_sum_fits_the_narrowest_accumulator():
    """Sums are multiples of a quarter of at most 32 * 36, so they need fewer than the 14 bits an FP8 product keeps."""
    g = torch.Generator().manual_seed(SEED)
    codes = torch.randint(0, 16, (2, 4096, 32), generator=g)
    sums = (formats.E2M1_VALUES()[codes[0]] * formats.E2M1_VALUES()[codes[1]]).sum(-1, dtype=torch.float64)
    assert torch.equal(sums * 4, (sums * 4).round()) and 4 * 32 * 36 < 2**14


def test_the_native_index_serves_mxfp4_and_leaves_the_rest_to_others():
    assert answer("score_index", q="u8", format="mxfp4_32") == Yes()
    for statics in (dict(q="bf16", format="mxfp4_32"), dict(q="u8", format="fp8_32"), dict(q="f32", format="f32")):
        assert isinstance(answer("score_index", **statics), No)


def test_the_native_selections_serve_every_call():
    assert answer("select_topk", k=512) == Yes() and answer("select_candidate_blocks") == Yes()
