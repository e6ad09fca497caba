"""What the index kernel in CUDA C++ builds on, without a GPU: e2m1 codes as e5m2 operands, exact group sums, what it offers."""

from __future__ import annotations

import torch
from deepinfer_cuda import native
from deepinfer_hal import formats
from deepinfer_hal.kernel import CallSpec, No, Yes

LOWEST_SHIFT, TOP_SHIFT = -15, -5
"""kernels_cuda/score_index.cu folds a query's scale into its operand within these powers of two, in the first group."""

KEY_SHIFT, MOST_OVER = -14, 7
"""It reads a key's codes as values this power of two as large, and its fast form serves keys whose scales are at most the other
power of two over their first; in the other groups the operand is that much larger, and the key's scale that much smaller."""

LEAST_OVER, LEAST_FIRST, MOST_FIRST = -24, 112, 143
"""The other bounds of those keys' codes."""

SEED = 20261129


def answer(op: str, **statics) -> Yes | No:
    return native.supports(CallSpec(op, statics))


def e5m2_values() -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e5m2).float()


def test_a_query_code_times_its_folded_scale_is_an_e5m2_value():
    representable = set(e5m2_values()[:124].tolist())
    for shift in range(LOWEST_SHIFT, TOP_SHIFT + MOST_OVER + 1):
        assert all(value * 2.0**shift in representable for value in formats.E2M1_VALUES()[:8].tolist())
    assert 0.5 * 2.0 ** (LOWEST_SHIFT - 1) not in representable


def test_a_word_of_key_codes_becomes_e5m2_codes_of_a_power_of_two_of_them():
    """The low four by masks and a multiplication with a carry into the signs, the high four by masks and a shift."""
    g = torch.Generator().manual_seed(SEED)
    packed = torch.cat([torch.arange(256), torch.randint(0, 256, (3 * 256,), generator=g)]).reshape(4, 256)
    word = sum(packed[i] << 8 * i for i in range(4))
    low = (word & 0x0F0F0F0F) * 2 + 0x70707070 & 0x8E8E8E8E
    high = (word & 0x80808080) | (word >> 3 & 0x0E0E0E0E)
    value, e5m2 = formats.E2M1_VALUES(), e5m2_values()
    for i in range(4):
        assert torch.equal(e5m2[low >> 8 * i & 255] * 2.0**-KEY_SHIFT, value[packed[i] & 15])
        assert torch.equal(e5m2[high >> 8 * i & 255] * 2.0**-KEY_SHIFT, value[packed[i] >> 4])


def test_a_sum_over_groups_is_below_one_so_that_saturation_is_its_relu():
    largest = 6 * 2.0**KEY_SHIFT * 6 * 2.0**TOP_SHIFT * 32 * (1 + 3 * 2.0**MOST_OVER)
    assert 0.5 < largest < 1


def test_three_instructions_on_a_word_of_scales_tell_the_keys_that_the_fast_form_serves():
    g = torch.Generator().manual_seed(SEED)
    codes = torch.randint(0, 256, (1 << 15, 4), generator=g)
    near = torch.randint(0, 256, (1 << 15, 1), generator=g) + torch.randint(-26, 10, (1 << 15, 4), generator=g)
    codes = torch.cat([codes, near.clamp(0, 255)])
    word = codes[:, 0] | codes[:, 1] << 8 | codes[:, 2] << 16 | codes[:, 3] << 24
    over = word + 0x787877F0 - codes[:, 0] * 0x01010100 & 0xFFFFFFFF
    first, others = codes[:, 0], codes[:, 1:] - codes[:, :1]
    served = (first >= LEAST_FIRST) & (first <= MOST_FIRST) & ((others >= LEAST_OVER) & (others <= MOST_OVER)).all(1)
    assert torch.equal(((over ^ 0x60606060) & 0xE0E0E0E0) == 0, served) and int(served.sum()) > 500


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
