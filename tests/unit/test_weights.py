"""Weight handles: the checkpoint's bytes come back exactly, sizes are known beforehand, and what cannot be is refused."""

from __future__ import annotations

import math

import pytest
import torch
from deepinfer_cpu.backend import CpuBackend
from deepinfer_hal import formats
from deepinfer_hal.errors import BadCall
from deepinfer_hal.weights import CanonicalWeight, WeightHandle, canonical_nbytes, concatenate, prepare_canonical, scale_shape

from deepinfer.errors import ConfigError
from deepinfer.model.load import WeightLoader, tracked_weight_bytes

SHAPES = {
    "f32": [(5, 7), (17, 64), (3, 5, 8)],
    "bf16": [(5, 7), (48, 64), (2, 17, 32)],
    "fp8_block32": [(32, 32), (33, 40), (96, 64), (2, 16, 64), (4, 64, 32)],
    "fp4_row32": [(5, 32), (3, 17, 64)],
    "fp8_row32": [(9, 64)],
}
EVERY = [(fmt, shape) for fmt, shapes in SHAPES.items() for shape in shapes]


def random_weight(fmt: str, shape: tuple[int, ...], seed: int = 0) -> CanonicalWeight:
    """All finite codes and scales of the usual range, none of it from a quantiser."""
    g = torch.Generator().manual_seed(seed)
    if fmt in ("f32", "bf16"):
        return CanonicalWeight(fmt, torch.randn(shape, generator=g).to(torch.float32 if fmt == "f32" else torch.bfloat16))
    stored = (*shape[:-1], shape[-1] // 2) if fmt == "fp4_row32" else shape
    values = torch.randint(0, 256, stored, generator=g, dtype=torch.uint8)
    if fmt != "fp4_row32":
        values[(values & 0x7F) == 0x7F] = 0x7E
    scales = torch.randint(90, 150, scale_shape(fmt, shape), generator=g, dtype=torch.uint8)
    return CanonicalWeight(fmt, values, scales)


def assert_same_bytes(left: CanonicalWeight, right: CanonicalWeight) -> None:
    assert left.format == right.format and left.shape == right.shape
    for one, other in ((left.values, right.values), (left.scales, right.scales)):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.shape == other.shape
            assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def cpu_prepare(role: str, canonical: CanonicalWeight) -> WeightHandle:
    return CpuBackend().prepare_weight(0, role, canonical)


PREPARE = {
    "reference": (prepare_canonical, lambda role, shape, fmt: canonical_nbytes(fmt, shape)),
    "cpu": (cpu_prepare, CpuBackend().prepared_nbytes),
}


@pytest.mark.parametrize("backend", PREPARE)
@pytest.mark.parametrize("fmt, shape", EVERY)
class TestHandles:
    def test_the_checkpoints_bytes_come_back_exactly(self, backend, fmt, shape):
        weight = random_weight(fmt, shape)
        handle = PREPARE[backend][0]("wq_b", weight)
        assert tuple(handle.shape) == shape and handle.role == "wq_b"
        assert_same_bytes(handle.canonical(), weight)

    def test_values_are_those_of_the_canonical_bytes(self, backend, fmt, shape):
        weight = random_weight(fmt, shape)
        handle = PREPARE[backend][0]("wq_b", weight)
        assert torch.equal(handle.dequantise().contiguous(), weight.dequantise())

    @pytest.mark.parametrize("role", ["wq_b", "embedding"])
    def test_its_size_is_known_without_making_it(self, backend, fmt, shape, role):
        prepare, nbytes = PREPARE[backend]
        assert prepare(role, random_weight(fmt, shape)).nbytes == nbytes(role, shape, fmt)

    def test_slots_are_the_matrices_of_a_stack(self, backend, fmt, shape):
        weight = random_weight(fmt, shape)
        handle = PREPARE[backend][0]("experts_down", weight)
        if len(shape) == 2:
            with pytest.raises(BadCall, match="only stacked weights have slots"):
                handle.slot(0)
            return
        for index in range(shape[0]):
            one = handle.slot(index)
            scales = None if weight.scales is None else weight.scales[index]
            assert tuple(one.shape) == shape[1:]
            assert_same_bytes(one.canonical(), CanonicalWeight(fmt, weight.values[index], scales))
        for index in (-1, shape[0]):
            with pytest.raises(BadCall, match=f"{shape[0]} slots, asked for {index}"):
                handle.slot(index)


def test_a_slot_is_a_view_so_that_an_expert_can_be_replaced_in_place():
    handle = prepare_canonical("experts_down", random_weight("fp4_row32", (3, 4, 32)))
    handle.slot(1).canonical().values.fill_(0x22)
    assert (handle.canonical().values[1] == 0x22).all() and not (handle.canonical().values[0] == 0x22).all()


@pytest.mark.parametrize("fmt, code", [("fp8_block32", 0x7F), ("fp8_block32", 0xFF)])
def test_codes_that_are_no_number_come_back_too(fmt, code):
    weight = random_weight(fmt, (32, 32))
    weight.values[3, 5] = code
    assert_same_bytes(cpu_prepare("wq_b", weight).canonical(), weight)


@pytest.mark.parametrize("scale", [0, 1, 119, 246, 247, 254])
def test_every_scale_comes_back(scale):
    for fmt in ("fp8_block32", "fp4_row32"):
        weight = random_weight(fmt, (33, 64))
        weight.scales.fill_(scale)
        assert_same_bytes(cpu_prepare("wq_b", weight).canonical(), weight)


class TestCanonicalWeights:
    def test_values_of_each_format_are_code_times_scale(self):
        e4m3, e2m1, e8m0 = formats.E4M3_VALUES(), formats.E2M1_VALUES(), formats.E8M0_VALUES()
        block, rows, table = (random_weight(f, (33, 64)) for f in ("fp8_block32", "fp4_row32", "fp8_row32"))
        got = [one.dequantise() for one in (block, rows, table)]
        for n, k in ((0, 0), (31, 31), (32, 32), (32, 63), (5, 40)):
            byte = int(rows.values[n, k // 2])
            assert got[0][n, k] == e4m3[block.values[n, k].long()] * e8m0[block.scales[n // 32, k // 32].long()]
            assert got[1][n, k] == e2m1[byte >> 4 if k % 2 else byte & 15] * e8m0[rows.scales[n, k // 32].long()]
            assert got[2][n, k] == e4m3[table.values[n, k].long()] * e8m0[table.scales[n, k // 32].long()]

    def test_no_experts_is_a_weight_too(self):
        weight = random_weight("fp8_block32", (0, 32, 64))
        assert weight.dequantise().shape == (0, 32, 64) and weight.nbytes == 0

    @pytest.mark.parametrize(
        "fmt, values, scales, message",
        [
            ("fp6", torch.zeros(2, 2), None, "'fp6' is not one of"),
            ("bf16", torch.zeros(2, 2), None, "keeps values as bfloat16, got torch.float32"),
            ("f32", torch.zeros(2, 2), torch.zeros(1), "f32 takes no scales"),
            ("fp8_block32", torch.zeros(32, 32, dtype=torch.uint8), None, "fp8_block32 needs scales"),
            ("fp8_block32", torch.zeros(32, 32), torch.zeros(1, 1, dtype=torch.uint8), "keeps values as bytes"),
            ("fp8_block32", torch.zeros(33, 32, dtype=torch.uint8), torch.zeros(1, 1, dtype=torch.uint8), r"scales \[2, 1\]"),
            ("fp8_block32", torch.zeros(2, 32, 32, dtype=torch.uint8), torch.zeros(1, 1, dtype=torch.uint8), r"\[2, 1, 1\]"),
            ("fp4_row32", torch.zeros(4, 24, dtype=torch.uint8), torch.zeros(4, 1, dtype=torch.uint8), "divisible by 32, got 48"),
            ("fp4_row32", torch.zeros(4, 32, dtype=torch.uint8), torch.zeros(4, 1, dtype=torch.uint8), r"scales \[4, 2\]"),
        ],
    )
    def test_bytes_that_are_no_such_weight_are_refused(self, fmt, values, scales, message):
        with pytest.raises(BadCall, match=message):
            CanonicalWeight(fmt, values, scales)

    @pytest.mark.parametrize("fmt, shape", EVERY)
    def test_their_size_follows_from_format_and_shape(self, fmt, shape):
        assert random_weight(fmt, shape).nbytes == canonical_nbytes(fmt, shape)

    def test_the_size_of_an_unknown_format_is_refused(self):
        with pytest.raises(BadCall, match="'int8' is not one of"):
            canonical_nbytes("int8", (2, 2))


class TestJoining:
    @pytest.mark.parametrize("fmt, first, second", [
        ("f32", (3, 8), (5, 8)), ("bf16", (1, 4), (2, 4)), ("fp8_block32", (64, 40), (33, 40)), ("fp4_row32", (3, 64), (5, 64)),
        ("fp4_row32", (2, 3, 32), (2, 5, 32)),
    ])  # fmt: skip
    def test_rows_follow_each_other_with_their_own_scales(self, fmt, first, second):
        parts = [random_weight(fmt, first, 1), random_weight(fmt, second, 2)]
        whole = concatenate(parts)
        assert torch.equal(whole.dequantise(), torch.cat([part.dequantise() for part in parts], dim=-2))

    def test_one_part_is_itself(self):
        weight = random_weight("bf16", (3, 4))
        assert concatenate([weight]) is weight

    @pytest.mark.parametrize("parts, message", [
        ([], "no weights"),
        ([("f32", (2, 8)), ("bf16", (2, 8))], "formats bf16, f32"),
        ([("f32", (2, 8)), ("f32", (2, 16))], r"\[2, 8\] and \[2, 16\]: they may differ in N alone"),
        ([("fp4_row32", (2, 3, 32)), ("fp4_row32", (3, 3, 32))], "differ in N alone"),
        ([("fp8_block32", (33, 32)), ("fp8_block32", (32, 32))], "33 rows is not a multiple of 32"),
    ])  # fmt: skip
    def test_what_does_not_fit_is_refused(self, parts, message):
        with pytest.raises(BadCall, match=message):
            concatenate([random_weight(fmt, shape) for fmt, shape in parts])


class FakeText:
    pass


class FakeConfig:
    text = FakeText()


def loader(**tensors: torch.Tensor) -> WeightLoader:
    return WeightLoader(FakeConfig(), tensors.__getitem__, prepare_canonical, torch.device("cpu"), torch.float32)


class TestGroups:
    """wo_a is [G * N, K] on disk with scales per 32 rows of that, and [G, N, K] in the model."""

    @pytest.mark.parametrize("groups, rows", [(2, 64), (2, 32), (4, 16), (8, 8), (3, 96)])
    def test_each_group_has_its_own_rows_and_the_scales_of_the_blocks_that_it_lies_in(self, groups, rows):
        stored = random_weight("fp8_block32", (groups * rows, 64))
        given = loader(**{"wo_a.weight": stored.values, "wo_a.scale": stored.scales})
        handle = given.grouped_fp8("wo_a", "wo_a", groups)
        assert tuple(handle.shape) == (groups, rows, 64)
        assert torch.equal(handle.dequantise().view(-1, 64), stored.dequantise())
        native = cpu_prepare("wo_a", handle.canonical())
        assert_same_bytes(native.canonical(), handle.canonical())
        assert native.nbytes == CpuBackend().prepared_nbytes("wo_a", handle.shape, "fp8_block32")

    @pytest.mark.parametrize("groups, rows", [(2, 48), (4, 24), (32, 3)])
    def test_groups_that_share_a_block_unevenly_are_refused(self, groups, rows):
        stored = random_weight("fp8_block32", (groups * rows, 64))
        given = loader(**{"wo_a.weight": stored.values, "wo_a.scale": stored.scales})
        with pytest.raises(ConfigError, match=f"text_config.o_lora_rank: {rows} rows"):
            given.grouped_fp8("wo_a", "wo_a", groups)


def test_a_vector_is_a_copy_so_that_no_shard_stays_mapped_for_it():
    shard = torch.zeros(100)
    vector = loader(norm=shard[10:20]).vector("norm")
    assert vector.untyped_storage().nbytes() == 40


def test_tracked_bytes_count_each_storage_and_handle_once():
    shared, handle = torch.zeros(10), prepare_canonical("a", random_weight("bf16", (3, 4)))
    nested = {"a": [shared, shared[2:], handle], "b": (handle, torch.zeros(0)), "c": None}
    assert tracked_weight_bytes(nested) == 40 + math.prod((3, 4)) * 2
