"""The layout of what outlives a step, and the buffers of a step."""

from __future__ import annotations

import pytest
import torch
from deepinfer_hal.formats import row_bytes

from deepinfer.errors import CapacityError, ConfigError
from deepinfer.model.buffers import Buffers
from deepinfer.model.numerics import Numerics, choose_numerics
from deepinfer.model.state import BLOCK_TOKENS, State, StateLayout, plan_state
from deepinfer.model_config import ModelConfig
from tests.oracle.fixtures import open_case

CPU = torch.device("cpu")


def layout(max_backtrack: int = 6, numerics: Numerics | None = None) -> StateLayout:
    config = ModelConfig.from_folder(open_case("tiny").folder)
    return plan_state(config.text, numerics or Numerics(), max_backtrack)


class TestState:
    @pytest.mark.parametrize("max_backtrack", range(8))
    def test_a_ring_holds_a_window_and_what_can_be_taken_back_in_whole_pairs_of_rows(self, max_backtrack):
        found = layout(max_backtrack)
        assert 0 <= found.ring_rows - found.window - max_backtrack <= 1 and found.ring_rows % 2 == 0
        assert found.longest_ring_step >= max_backtrack + 1

    @pytest.mark.parametrize("kv_cache_dtype", ["auto", "float32"])
    def test_sources_lie_in_a_block_one_after_the_other_at_aligned_bases(self, kv_cache_dtype):
        numerics = choose_numerics("float32", "none", kv_cache_dtype)
        found = layout(numerics=numerics)
        text = ModelConfig.from_folder(open_case("tiny").folder).text
        end = 0
        for source in found.sources:
            assert source.main_offset % 128 == source.index_offset % 128 == 0
            assert source.main_offset >= end and source.index_offset >= source.main_offset + source.main_bytes
            assert source.block_rows * source.ratio == BLOCK_TOKENS
            assert source.main_bytes == source.block_rows * row_bytes(numerics.main_format, text.head_dim)
            assert source.index_bytes == source.block_rows * row_bytes(numerics.index_format, text.index_head_dim)
            end = source.index_offset + source.index_bytes
        assert end <= found.block_bytes < end + 128 and found.block_bytes % 128 == 0

    def test_rows_of_slots_layers_and_sources_are_disjoint_views_of_one_pool(self):
        found = layout()
        state = State(found, num_slots=3, num_blocks=4, max_tokens=32, device=CPU)
        marks = {}
        for layer in range(found.ring_layers):
            for slot in range(3):
                for row in (0, found.ring_rows - 1):
                    marks[layer, slot, row] = len(marks) + 1
                    state.ring(layer)[slot * found.slot_rows + row] = marks[layer, slot, row]
        for (layer, slot, row), mark in marks.items():
            assert (state.ring(layer)[slot * found.slot_rows + row] == mark).all()
        for number, source in enumerate(found.sources):
            state.main_rows(source.layer).fill_(2 * number + 1)
            state.index_rows(source.layer).fill_(2 * number + 2)
        for number, source in enumerate(found.sources):
            assert (state.main_rows(source.layer) == 2 * number + 1).all()
            assert (state.index_rows(source.layer) == 2 * number + 2).all()

    def test_tracked_bytes_are_those_of_the_layout(self):
        found = layout()
        tracked = State(found, num_slots=3, num_blocks=4, max_tokens=32, device=CPU).tracked_bytes()
        assert tracked["kv_blocks"] == 4 * found.block_bytes
        assert tracked["window_state"] + tracked["carry_state"] == 3 * found.slot_bytes
        assert tracked["token_history"] == 3 * 32 * 4


class TestBuffers:
    def buffers(self) -> Buffers:
        buffers = Buffers(10, CPU)
        buffers.define("x", (4,), torch.float32)
        buffers.define_quantised("q", 64)
        buffers.derive("half", "x", lambda x: x[:, :2])
        return buffers

    def test_views_share_the_memory_of_the_whole_and_are_kept_per_row_count(self):
        buffers = self.buffers()
        few, many = buffers.rows(2), buffers.rows(10)
        assert few.x.shape == (2, 4) and few.q.shape == (2, 64) and few.q_scale.shape == (2, 2) and few.half.shape == (2, 2)
        few.half.fill_(7)
        assert many.x[:2, :2].eq(7).all() and many.x.sum() == 28
        assert buffers.rows(2) is few and buffers.rows(0).x.shape == (0, 4)

    def test_many_row_counts_do_not_pile_up(self):
        buffers = Buffers(1000, CPU)
        buffers.define("x", (1,), torch.float32)
        for count in range(1000):
            assert buffers.rows(count).x.shape == (count, 1)
        assert len(buffers._views) <= 33

    def test_a_buffer_that_comes_later_is_in_views_made_before(self):
        buffers = self.buffers()
        buffers.rows(3)
        buffers.define("y", (), torch.int32)
        buffers.add("order", torch.arange(10))
        buffers.derive("tail", "x", lambda x: x[:, 2:])
        views = buffers.rows(3)
        assert views.y.shape == (3,) and views.order.tolist() == [0, 1, 2] and views.tail.shape == (3, 2)

    def test_more_rows_than_there_are_is_an_error_that_says_both_numbers(self):
        with pytest.raises(CapacityError, match="a step of 11 rows exceeds the 10"):
            self.buffers().rows(11)

    def test_bytes_are_counted_once(self):
        assert self.buffers().nbytes == 10 * (16 + 64 + 2)


class TestNumerics:
    def test_settings_choose_formats(self):
        auto = choose_numerics("auto", "fp8_32", "auto")
        assert auto == Numerics(torch.bfloat16, True, "fp8_32", "fp4_16", "mxfp4_32") and auto.quantise_index_query
        assert choose_numerics("auto", "fp8_32", "auto", fp4_sparse_kv=False).main_format == "fp8_32"
        plain = choose_numerics("float32", "none", "float32")
        assert plain == Numerics(torch.float32, False, "f32", "f32", "f32") and not plain.quantise_index_query

    @pytest.mark.parametrize("field, settings", [
        ("dtype", ("float16", "none", "auto")),
        ("act_quant", ("auto", "int8", "auto")),
        ("kv_cache_dtype", ("auto", "none", "fp8")),
    ])
    def test_a_setting_that_there_is_not_is_named(self, field, settings):
        with pytest.raises(ConfigError) as caught:
            choose_numerics(*settings)
        assert caught.value.field == field
