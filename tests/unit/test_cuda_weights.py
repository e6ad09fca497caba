"""FP4 experts as fragments of Hopper's matrix instruction: an exact inverse, and the bits that the kernel makes of them."""

from __future__ import annotations

import pytest
import torch
from deepinfer_cuda import backend as backend_module
from deepinfer_cuda import kernels, native, weights
from deepinfer_cuda.backend import CudaBackend
from deepinfer_cuda.gpu import Gpu
from deepinfer_hal import formats
from deepinfer_hal.card import get_card
from deepinfer_hal.errors import BadCall, Unsupported
from deepinfer_hal.kernel import CallSpec, Kernel, No, Yes
from deepinfer_hal.late import LateCall
from deepinfer_hal.weights import CanonicalWeight, WeightHandle
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.cuda_on_host import CudaOnHost

PLACES = 0x81C081C0
"""Where a BF16's sign, two low exponent bits and highest mantissa bit lie, in both halves of a word."""


def experts(count: int, rows: int, columns: int, seed: int, largest: int = weights.LARGEST_SCALE) -> CanonicalWeight:
    gen = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 256, (count, rows, columns // 2), generator=gen, dtype=torch.uint8)
    scales = torch.randint(0, largest + 1, (count, rows, columns // 32), generator=gen, dtype=torch.uint8)
    return CanonicalWeight("fp4_row32", values, scales)


def as_the_kernel_expands(words: torch.Tensor) -> list[torch.Tensor]:
    """int64 words to the four registers of two BF16 that kernels_cuda/grouped_gemm_fp4.cuh makes, before the scale."""
    gathered = (words >> 10 & 0x001B001B) * (1 << 7 | 1 << 2 | 1 << 12)
    return [words & PLACES, words << 3 & PLACES, words << 6 & PLACES, gathered & PLACES]


def bf16_values(bits: torch.Tensor) -> torch.Tensor:
    """float32 of BF16 bits in int64, times 2^126."""
    return (bits.to(torch.int32) << 16).view(torch.float32) * 2.0**126


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**31))
def test_fragments_give_the_checkpoints_bytes_again(count, granules, blocks, seed):
    stored = experts(count, 64 * granules, 128 * blocks, seed)
    handle = weights.prepare("experts_down", stored)
    assert isinstance(handle, weights.FragmentWeight)
    again = handle.canonical()
    assert torch.equal(again.values, stored.values) and torch.equal(again.scales, stored.scales)
    assert handle.nbytes == CudaBackend.prepared_nbytes(None, "experts_down", stored.shape, "fp4_row32")
    one = handle.slot(count - 1)
    assert one.packed_bytes.data_ptr() == handle.packed_bytes[count - 1].data_ptr() and one.shape == stored.shape[1:]
    assert torch.equal(one.canonical().values, stored.values[-1]) and torch.equal(one.canonical().scales, stored.scales[-1])


def test_the_kernels_moves_give_the_values_where_the_instruction_wants_them():
    rows, columns = 128, 256
    stored = experts(1, rows, columns, seed=3)
    packed = weights.prepare("experts_gate_up", stored).packed_bytes
    words = packed[..., : weights.CODE_BYTES].contiguous().view(torch.int32).long() & 0xFFFFFFFF
    found = torch.empty(
        rows // 64, 4, 2, 8, columns // 128, 2, 4, 2, 4, 2
    )  # granule, warp, upper, q, block, half, step, far, c, odd
    for pair, registers in enumerate(as_the_kernel_expands(words)):
        by_thread = registers.view(columns // 128, rows // 64, 2, 4, 8, 4, 4)  # block, granule, half, warp, q, c, step
        for odd in range(2):
            values = bf16_values(registers.new_tensor(0xFFFF) & by_thread >> 16 * odd)
            found[:, :, pair % 2, :, :, :, :, pair // 2, :, odd] = values.permute(1, 3, 4, 0, 2, 6, 5)
    wanted = formats.E2M1_VALUES("cpu")[formats.unpack_nibbles(stored.values[0]).long()]
    assert torch.equal(found.reshape(rows, columns), wanted)
    assert torch.equal(torch.signbit(found.reshape(rows, columns)), torch.signbit(wanted))  # the two zeros too


def test_stored_scales_are_the_exponent_of_the_kernels_factor():
    stored = CanonicalWeight(
        "fp4_row32", torch.zeros(1, 64, 64, dtype=torch.uint8), torch.arange(256).view(1, 64, 4).to(torch.uint8) // 2
    )
    packed = weights.prepare("experts_down", stored).packed_bytes
    factors = (packed[..., weights.CODE_BYTES :].to(torch.int32) << 23).view(
        torch.float32
    ) * 2.0**-126  # for values 2^-126 too small
    wanted = formats.E8M0_VALUES("cpu")[stored.scales.flatten().long()]
    assert torch.equal(factors.flatten().sort().values, wanted.sort().values)
    word = packed[0, 0, 0, weights.CODE_BYTES + 4 * 9 :][:4] - 126  # warp 1, q 1: rows 17 and 25, first two groups of 32
    assert word.tolist() == [stored.scales[0, row, group] for group in (0, 1) for row in (17, 25)]


@pytest.mark.parametrize(("role", "shape", "largest"), [
    ("experts_down", (2, 64, 128), 254), ("experts_down", (2, 64, 128), 255), ("experts_down", (2, 96, 128), 120),
    ("experts_down", (2, 64, 96), 120), ("wq_b", (2, 64, 128), 120), ("experts_gate_up", (0, 64, 128), 120),
])  # fmt: skip
def test_what_fragments_cannot_hold_keeps_the_checkpoints_layout(role, shape, largest):
    stored = experts(*shape, seed=1, largest=largest)
    handle = weights.prepare(role, stored)
    assert type(handle) is WeightHandle and handle.canonical() is stored


def test_a_slot_that_is_not_there_is_named():
    handle = weights.prepare("experts_down", experts(2, 64, 128, seed=1))
    with pytest.raises(BadCall, match="2 slots, asked for 2"):
        handle.slot(2)
    with pytest.raises(BadCall, match="only stacked"):
        handle.slot(1).slot(0)


def test_behind_the_c_abi_fragments_are_one_tensor_of_the_logical_shape():
    handle = weights.prepare("experts_down", experts(2, 64, 128, seed=1))
    values, scales = weights.pack_weight(handle)
    plain_values, plain_scales = weights.pack_weight(WeightHandle("experts_down", handle.canonical()))
    layout, shape, strides = values[12:16], values[24:48], values[64:104]
    assert int.from_bytes(layout, "little") == 4 and shape == plain_values[24:48] and not any(strides)
    assert scales[8:12] == bytes(4) and plain_scales[8:12] != bytes(4)


@pytest.mark.parametrize(("statics", "answer"), [
    ({}, Yes), ({"weight": "fp4_row32", "x": "u8", "out": "bf16", "N": 4608}, Yes), ({"x": "bf16", "out": "f32"}, Yes),
    ({"weight": "fp4_row32", "x": "f32", "out": "u8", "N": 64, "K": 128}, Yes),
    ({"weight": "fp4_row32", "x": "f32", "N": 64, "K": 96}, No), ({"weight": "bf16"}, No), ({"x": "f32"}, No),
    ({"out": "u8"}, No), ({"N": 96}, No),
])  # fmt: skip
def test_grouped_gemm_leaves_to_the_portable_kernel_what_it_has_no_tiles_for(statics, answer):
    assert isinstance(native.supports(CallSpec("grouped_gemm", statics)), answer)


@pytest.mark.parametrize(("statics", "answer"), [
    ({"weight": "fp4_row32", "N": 4608, "K": 5120}, No), ({"weight": "fp4_row32", "N": 4608, "K": 96}, Yes),
    ({"weight": "bf16", "N": 4608, "K": 5120}, Yes), ({}, Yes),
])  # fmt: skip
def test_the_portable_kernel_leaves_experts_that_are_kept_as_fragments(monkeypatch, statics, answer):
    portable = Kernel("grouped_gemm", "triton", print, "triton::grouped_gemm", "yes", priority=50)
    monkeypatch.setattr(kernels.native, "kernels", lambda capability, device: [portable] if capability == (9, 0) else [])
    monkeypatch.setattr(kernels, "_portable", lambda found: [portable])
    monkeypatch.setattr(kernels.torch.cuda, "device_count", lambda: 1)
    hopper, blackwell = (kernels.kernels_of(Gpu(0, "GPU", 1, capability, 1))[-1] for capability in ((9, 0), (10, 0)))
    assert isinstance(hopper.supports(CallSpec("grouped_gemm", statics)), answer)
    assert isinstance(blackwell.supports(CallSpec("grouped_gemm", statics)), Yes)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("stored_as", [torch.uint8, torch.int8])
def test_an_fp8_weight_with_a_code_that_is_nan_is_kept_with_a_warning_where_cuda_kernels_read_it(monkeypatch, code, stored_as):
    values, scales = formats.quantise_weight_fp8(torch.linspace(-500, 500, 64 * 96).view(64, 96))
    backend, found = CudaOnHost.__new__(CudaOnHost), []
    monkeypatch.setattr(backend_module, "_has_native_kernels", lambda one: found.append(one) or True)
    monkeypatch.setattr(backend_module.gpu, "gpu_of", lambda index: index)
    backend.prepare_weight(0, "wq_a", CanonicalWeight("fp8_block32", values.clone().view(stored_as), scales))
    assert found == []  # nothing is asked of a GPU for a weight that is whole
    values[5, 7] = code
    broken = CanonicalWeight("fp8_block32", values.view(stored_as), scales)
    with pytest.warns(UserWarning, match=r"weight wq_a \[64, 96\] has 1 codes that are NaN, the first at \[5, 7\]"):
        kept = backend.prepare_weight(0, "wq_a", broken).canonical()
    assert kept.format == "fp8_block32" and torch.equal(kept.values, broken.values) and torch.equal(kept.scales, scales)
    monkeypatch.setattr(backend_module, "_has_native_kernels", lambda one: False)
    assert torch.equal(backend.prepare_weight(0, "wq_a", broken).canonical().values, broken.values)


class TestAWeightWithNanCodes:
    def stored(self, groups: int = 2) -> CanonicalWeight:
        """[groups, 64, 96], the first matrix with one such code, in row 5."""
        made = [formats.quantise_weight_fp8(torch.linspace(-500, 500, 64 * 96).view(64, 96)) for _ in range(groups)]
        values, scales = (torch.stack(parts) for parts in zip(*made, strict=True))
        values[0, 5, 7] = 0x7F
        return CanonicalWeight("fp8_block32", values, scales)

    def test_is_served_by_the_portable_kernel_and_a_whole_one_of_the_same_role_by_the_cuda_kernel(self):
        card, served = get_card("linear"), []

        def kernel(provider: str, supports, priority: int) -> Kernel:
            def call(*args):
                served.append(provider)
                card.reference(*args)

            return Kernel("linear", provider, call, f"{provider}_linear", "yes", supports=supports, priority=priority)

        offers = [kernel("cuda", native.supports, 100), kernel("triton", lambda call: Yes(), 50)]
        settled = []
        late = LateCall(card, offers, False, lambda kernel, refused: settled.append(refused))
        stored = self.stored()
        whole, broken = (CanonicalWeight("fp8_block32", stored.values[i], stored.scales[i]) for i in (1, 0))
        x, x_scale = formats.quantise(torch.randn(3, 96), "fp8_32")
        for weight in (WeightHandle("wq_a", whole), weights.NanWeight("wq_a", broken)):
            out = torch.empty(3, 64)
            late(x, x_scale, weight, None, out, None)
        assert served == ["cuda", "triton"] and "fp8_block32 with NaN" in settled[1][0]
        assert bool(out[:, 5].isnan().all()) and int(out.isnan().sum()) == 3

    def test_leaves_no_kernel_of_the_library_that_would_read_it(self):
        statics = {"x": "u8", "out": "bf16", "N": 64, "K": 96, "weight": weights.NanWeight("wo_a", self.stored()).format}
        for op in ("linear", "grouped_linear", "grouped_gemm"):
            assert isinstance(native.supports(CallSpec(op, statics)), No)
        with pytest.raises(Unsupported, match="weight 'wo_a' has codes that are NaN"):
            weights.pack_weight(weights.NanWeight("wo_a", self.stored()))

    def test_marks_its_slots_too(self):
        slot = weights.NanWeight("experts_down", self.stored()).slot(0)
        assert slot.format == weights.NanWeight.FORMAT and slot.canonical().format == "fp8_block32" and slot.shape == (64, 96)


@pytest.mark.parametrize("shape", [(64, 256), (2, 64, 1024)])
def test_every_byte_of_an_fp8_weight_comes_back_as_the_suite_asks(monkeypatch, shape):
    monkeypatch.setattr(backend_module, "_has_native_kernels", lambda one: True)
    monkeypatch.setattr(backend_module.gpu, "gpu_of", lambda index: index)
    count = torch.Size(shape).numel()
    values = torch.arange(count).remainder(256).to(torch.uint8).view(shape)
    scales = torch.arange(count // 1024).remainder(256).to(torch.uint8).view(*shape[:-2], shape[-2] // 32, shape[-1] // 32)
    stored = CanonicalWeight("fp8_block32", values, scales)
    with pytest.warns(UserWarning, match="codes that are NaN"):
        kept = CudaOnHost.__new__(CudaOnHost).prepare_weight(0, "linear", stored).canonical()
    assert torch.equal(kept.values, values) and torch.equal(kept.scales, scales)
