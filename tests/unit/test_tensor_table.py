"""The expected tensors and the byte plan follow from the configuration alone."""

from math import prod

import pytest
from checkpoint_edits import SHARDS, TINY, split_shard

from deepinfer.bench.v41 import released_config
from deepinfer.checkpoint import expected_tensors
from deepinfer.checkpoint.plan import disk_bytes, logical_weights, plan_bytes
from deepinfer.errors import ConfigError
from deepinfer.model.numerics import Numerics
from deepinfer.model_config import ModelConfig

RELEASED = ModelConfig.from_dict(released_config())
TABLE = expected_tensors(RELEASED)


def test_the_released_model_has_its_published_totals():
    assert disk_bytes(RELEASED) == (96085, 510_286_023_000)


def test_parameters_by_part_are_the_published_ones():
    specs = TABLE.values()
    counts = {}
    for spec in specs:
        if spec.dtype != "F8_E8M0":
            counts[spec.group] = counts.get(spec.group, 0) + prod(spec.shape) * (2 if spec.dtype == "I8" else 1)
    assert round(counts["routed experts"] / 1e9, 1) == 543.6
    assert round(counts["draft"] / 1e9, 1) == 14.2
    assert round(counts["vision"] / 1e9, 2) == 0.49
    tables = sum(prod(spec.shape) for spec in specs if spec.role == "engram_table" and spec.dtype == "F8_E4M3")
    assert round(tables / 1e9, 1) == 196.6
    assert round(sum(spec.nbytes for spec in specs if spec.dtype == "F8_E8M0") / 1e9, 1) == 23.6


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("layers.0.attn.wq_b.weight", (32768, 1280), "F8_E4M3"),
        ("layers.2.attn.compressor.wgate.weight", (512, 5120), "BF16"),
        ("layers.36.attn.indexer.wq_b.scale", (128, 40), "F8_E8M0"),
        ("layers.14.engram.embed.weight", (384016682, 256), "F8_E4M3"),
        ("layers.14.engram.embed.scale", (384016682, 8), "F8_E8M0"),
        ("layers.39.ffn.experts.383.w2.weight", (5120, 1152), "I8"),
        ("layers.39.ffn.experts.383.w2.scale", (5120, 72), "F8_E8M0"),
        ("mtp.0.main_proj.weight", (5120, 15360), "F8_E4M3"),
        ("mtp.2.confidence_head.proj.weight", (1, 5376), "BF16"),
        ("vision.blocks.31.mlp.w1.weight", (5632, 1024), "BF16"),
    ],
)
def test_single_tensors_have_their_released_form(name, shape, dtype):
    spec = TABLE[name]
    assert (spec.shape, spec.dtype) == (shape, dtype)


@pytest.mark.parametrize(
    "name",
    [
        "layers.20.attn.compressor.wgate.weight",
        "layers.24.attn.indexer.wk.weight",
        "layers.3.attn.indexer.wq_b.weight",
        "mtp.0.attn.compressor.wkv.weight",
        "mtp.0.embed.weight",
        "mtp.1.main_norm.weight",
    ],
)
def test_parts_that_a_layer_does_not_own_are_not_expected(name):
    assert name not in TABLE


def test_the_tiny_checkpoint_is_exactly_the_table():
    stored = {}
    for shard in SHARDS:
        header, _ = split_shard(TINY / shard)
        header.pop("__metadata__", None)
        stored |= {name: (tuple(entry["shape"]), entry["dtype"]) for name, entry in header.items()}
    table = expected_tensors(ModelConfig.from_folder(TINY))
    assert {name: (spec.shape, spec.dtype) for name, spec in table.items()} == stored


def test_a_text_only_checkpoint_needs_no_vision_tensor():
    content = released_config()
    del content["vision_config"]
    table = expected_tensors(ModelConfig.from_dict(content))
    assert not any(spec.group == "vision" for spec in table.values())
    assert {spec.role for spec in table.values() if spec.optional} == {"gate_bias_vl"}


def test_joined_weights_hold_every_byte_of_the_parts():
    """Each draft block keeps its wkv twice. A scale block of the tiny wo_a that spans two groups is too."""
    released, tiny = RELEASED, ModelConfig.from_folder(TINY)
    assert plan_bytes(released, max_model_len=128).weight_bytes == 510_286_023_000 + 3 * (512 * 5120 + 16 * 160)
    assert plan_bytes(tiny, max_model_len=128).weight_bytes == disk_bytes(tiny)[1] + 3 * (64 * 64 + 2 * 2) + 10 * 4


def test_joined_weights_have_the_shapes_that_ops_see():
    shapes = {w.role: w.shape for w in logical_weights(TABLE.values(), RELEASED.text)}
    assert shapes["attn_in"] == (1280 + 512, 5120)
    assert shapes["wo_a"] == (8, 1024, 4096)
    assert shapes["experts_gate_up"] == (128, 4608, 5120)
    assert shapes["experts_down"] == (128, 5120, 2304)
    assert shapes["shared_gate_up"] == (4608, 5120)
    assert shapes["main_proj"] == (5120, 15360)


def test_cache_growth_is_890_bytes_a_token():
    plan = plan_bytes(RELEASED, max_model_len=1 << 20, max_num_seqs=1)
    assert plan.kv_bytes_per_token == 890
    assert plan.num_blocks == 8192
    assert 890 << 20 <= plan.kv_bytes <= (890 << 20) * 1.01
    assert plan.slot_bytes == 43 * 134 * 528 + 3 * 7 * 2 * 512 * 4
    assert plan.history_bytes == 4 << 20


def test_float32_rows_take_four_bytes_a_value():
    numerics = Numerics(window_format="f32", main_format="f32", index_format="f32")
    plan = plan_bytes(RELEASED, max_model_len=128, numerics=numerics)
    assert plan.kv_bytes_per_token == (3 / 2 + 1) * (512 + 128) * 4


def test_ranks_divide_the_experts_and_tables_and_nothing_else():
    one, many = (plan_bytes(RELEASED, max_model_len=4096, ranks=ranks).weights for ranks in (1, 64))
    assert many["routed experts"] * 64 == one["routed experts"]
    assert one["Engram"] / many["Engram"] > 50
    assert many["draft"] < one["draft"]
    same = ("embedding", "attention", "shared experts", "mHC", "vision")
    assert all(one[group] == many[group] for group in same)


def test_an_uneven_share_is_rounded_up():
    weights = logical_weights(TABLE.values(), RELEASED.text)
    experts = next(weight for weight in weights if weight.role == "experts_down")
    assert experts.share(5) == (77, 5120, 2304)


def test_a_backend_may_state_its_own_layouts():
    plan = plan_bytes(RELEASED, max_model_len=128, prepared_nbytes=lambda role, shape, form: prod(shape) * 2)
    assert plan.weights["attention"] > plan_bytes(RELEASED, max_model_len=128).weights["attention"]


@pytest.mark.parametrize(
    ("field", "settings"),
    [("max_model_len", {"max_model_len": 0}), ("max_model_len", {"max_model_len": 1 << 21}), ("ep", {"ranks": 385})],
)
def test_an_impossible_plan_is_refused(field, settings):
    with pytest.raises(ConfigError) as caught:
        plan_bytes(RELEASED, **{"max_model_len": 128, **settings})
    assert caught.value.field == field
