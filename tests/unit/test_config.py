"""Configuration is refused before anything is loaded, with the path of the key that is wrong."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoint_edits import TINY

from deepinfer._ownership import foreign_owner
from deepinfer.bench.v41 import released_config
from deepinfer.config import EngineConfig, ModelConfig
from deepinfer.engram_layout import engram_multipliers
from deepinfer.errors import BackendError, CheckpointError, ConfigError, DeepInferError, RequestError
from deepinfer.model_path import resolve_model

ROOT = Path(__file__).parents[2]


def changed(path: str, value, content=None):
    """A copy of the released configuration with one key replaced; `...` removes it."""
    content = copy.deepcopy(content or released_config())
    *parents, key = path.split(".")
    part = content
    for parent in parents:
        part = part[parent]
    if value is ...:
        del part[key]
    else:
        part[key] = value
    return content


def assert_refused(content, field: str):
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(content)
    assert caught.value.field == field
    assert str(caught.value).startswith(field)


def test_the_released_topology_is_derived():
    text = ModelConfig.from_dict(released_config()).text
    kv = [layer.kv_source for layer in text.layers]
    index = [layer.index_source for layer in text.layers]
    assert kv == [None] * 2 + [2] * 6 + [8] * 6 + [14] * 6 + [20] * 20
    assert index == [None] * 2 + [2] * 6 + [8] * 6 + [14] * 6 + [s for s in (20, 24, 28, 32, 36) for _ in range(4)]
    assert [t.layer for t in text.layers if t.owns_index_key] == [2, 8, 14, 20]
    assert [t.layer for t in text.layers if t.builds_pool] == [20]
    assert [t.layer for t in text.layers if t.uses_pool] == [24, 28, 32, 36]
    assert [t.layer for t in text.layers if t.engram] == [1, 14]
    assert [t.layer for t in text.layers if t.draft_target] == [37, 38, 39]
    assert {t.rope for t in text.layers[:2]} == {"plain"} and {t.rope for t in text.layers[2:]} == {"yarn"}
    assert [(t.ratio, t.kv_source, t.rope, t.is_draft) for t in text.draft_layers] == [(0, None, "plain", True)] * 3
    assert text.prefill_layers == 20


def test_engram_constants_are_the_published_ones():
    text = ModelConfig.from_dict(released_config()).text
    assert [table.rows for table in text.engram_tables] == [384006168, 384016682]
    assert engram_multipliers(1, 4, 99092) == (76632096046245, 4839876093313, 35959672319349, 73987337458391)
    assert len({prime for table in text.engram_tables for prime in table.primes}) == 48


def test_absent_keys_take_the_engines_defaults():
    text = ModelConfig.from_dict(released_config()).text
    assert text.hc_shifted and text.use_fp4_sparse_kv and text.dspark_target_attn_input
    assert text.main_kv_format == "fp4_16"
    assert ModelConfig.from_dict(changed("text_config.use_fp4_sparse_kv", False)).text.main_kv_format == "fp8_32"


def test_a_text_only_model_without_draft_or_engram_is_possible():
    content = changed("vision_config", ...)
    text = content["text_config"]
    for key in [key for key in text if key.startswith(("engram_", "dspark_"))]:
        del text[key]
    text["num_nextn_predict_layers"] = 0
    text["compress_ratios"] = text["compress_ratios"][:40]
    config = ModelConfig.from_dict(content)
    assert config.vision is None and config.text.draft_layers == () and not any(t.engram for t in config.text.layers)


def test_keys_that_other_tools_write_are_harmless():
    content = changed("transformers_version", "5.0.0")
    content["text_config"] |= {"use_cache": True, "initializer_range": 0.02}
    content["text_config"]["rope_scaling"]["type"] = "yarn"
    assert ModelConfig.from_dict(content) == ModelConfig.from_dict(released_config())


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("modle_type", 1),
        ("text_config.hiden_size", 1),
        ("text_config.rope_scaling.mscale", 1.0),
        ("vision_config.depth", 3),
        ("quantization_config.bits", 8),
    ],
)
def test_an_unknown_key_is_named_with_its_path(path, value):
    assert_refused(changed(path, value), path)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("text_config", []),
        ("text_config.hidden_size", "5120"),
        ("text_config.hidden_size", 5120.5),
        ("text_config.hidden_size", True),
        ("text_config.hc_eps", None),
        ("text_config.norm_topk_prob", 1),
        ("text_config.rope_scaling.factor", "16"),
        ("model_type", "deepseek_v4"),
        ("text_config.rope_scaling.rope_type", "linear"),
        ("quantization_config.expert_dtype", "fp8"),
        ("dtype", "float16"),
    ],
)
def test_a_wrong_type_or_name_is_refused(path, value):
    assert_refused(changed(path, value), path)


@pytest.mark.parametrize(
    "path", ["text_config", "bos_token_id", "text_config.head_dim", "quantization_config.scale_fmt"]
)
def test_a_missing_key_is_named(path):
    assert_refused(changed(path, ...), path)


def test_a_wrong_element_is_named_by_place():
    ratios = released_config()["text_config"]["compress_ratios"]
    assert_refused(
        changed("text_config.compress_ratios", [*ratios[:3], "2", *ratios[4:]]), "text_config.compress_ratios[3]"
    )
    assert_refused(
        changed("text_config.compress_ratios", [*ratios[:3], 4, *ratios[4:]]), "text_config.compress_ratios[3]"
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("compress_ratios", [0] * 42),
        ("kv_source_layer_ids", [8, 2, 14, 20]),
        ("kv_source_layer_ids", [2, 8, 14, 40]),
        ("kv_source_layer_ids", [1, 8, 14, 20]),
        ("kv_source_layer_ids", [8, 14, 20]),
        ("kv_source_layer_ids", [2, 8, 14]),
        ("index_source_layer_ids", [2, 8, 20, 24]),
        ("index_k_source_layer_ids", [2, 8, 14]),
        ("candidate_source_layer_id", 21),
        ("candidate_source_layer_id", 2),
        ("head_dim", 500),
        ("hidden_size", 5121),
        ("q_lora_rank", 1),
        ("qk_rope_head_dim", 640),
        ("qk_rope_head_dim", 63),
        ("o_groups", 7),
        ("n_shared_experts", 2),
        ("num_key_value_heads", 8),
        ("scoring_func", "sigmoid"),
        ("topk_method", "greedy"),
        ("norm_topk_prob", False),
        ("hidden_act", "gelu"),
        ("hc_shifted", False),
        ("attention_bias", True),
        ("num_experts_per_tok", 385),
        ("num_hidden_layers", 10**12),
        ("vocab_size", 0),
        ("rms_norm_eps", 0.0),
        ("swiglu_limit", float("nan")),
        ("engram_layer_ids", [14, 1]),
        ("engram_layer_ids", [1, 40]),
        ("engram_max_ngram_size", 1),
        ("engram_head_dim", 100),
        ("engram_num_embeddings", [384006168, 384016683]),
        ("dspark_target_layer_ids", []),
        ("dspark_noise_token_id", 129280),
        ("dspark_num_experts_per_tok", 129),
    ],
)
def test_an_impossible_combination_is_refused_and_named(key, value):
    assert_refused(changed(f"text_config.{key}", value), f"text_config.{key}")


def test_other_parts_are_checked_too():
    assert_refused(changed("architectures", ["LlamaForCausalLM"]), "architectures")
    assert_refused(changed("eos_token_id", 129280), "eos_token_id")
    assert_refused(
        changed("quantization_config.weight_block_size", [128, 128]), "quantization_config.weight_block_size"
    )
    assert_refused(changed("vision_config.num_attention_heads", 15), "vision_config.num_attention_heads")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 1, "a": 2}', '{"a": NaN}', "[" * 100000, "\xff"])
def test_a_file_that_is_no_json_object_is_a_config_error(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match="config.json"):
        ModelConfig.from_folder(tmp_path)


def test_a_folder_without_a_configuration_says_what_to_give(tmp_path):
    with pytest.raises(ConfigError, match="folder of a checkpoint"):
        ModelConfig.from_folder(tmp_path)


def test_engine_settings_are_strict_and_human_sized():
    config = EngineConfig.create(model=TINY, max_model_len="4k", kv_cache_bytes="1.5M")
    assert (config.model, config.max_model_len, config.kv_cache_bytes) == (str(TINY), 4096, 3 << 19)
    assert (config.stream_dtype, config.block_size, config.max_backtrack) == ("bfloat16", 128, 6)
    assert config.resolve_max_model_len(ModelConfig.from_folder(TINY)) == 4096


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("max_modle_len", {"max_modle_len": 1}),
        ("model", {"model": ""}),
        ("model", {"model": 3}),
        ("dtype", {"dtype": "float16"}),
        ("kv_cache_dtype", {"kv_cache_dtype": "fp8"}),
        ("block_size", {"block_size": 64}),
        ("max_model_len", {"max_model_len": "4 thousand"}),
        ("max_num_seqs", {"max_num_seqs": 0}),
        ("seed", {"seed": -1}),
        ("batch_invariant", {"batch_invariant": 1}),
        ("kv_cache_bytes", {"kv_cache_bytes": 1, "num_blocks": 1}),
        ("max_num_batched_tokens", {"max_num_batched_tokens": 63}),
        ("max_num_batched_tokens", {"enable_chunked_prefill": False, "max_model_len": 4096}),
        ("fallback", {"fallback": "never"}),
    ],
)
def test_a_bad_engine_setting_is_named(field, settings):
    with pytest.raises(ConfigError) as caught:
        EngineConfig.create(**{"model": "nano", **settings})
    assert caught.value.field == field


def test_a_refused_literal_lists_what_is_allowed():
    with pytest.raises(ConfigError, match="'auto' or 'bfloat16' or 'float32'"):
        EngineConfig.create(model="nano", dtype="float16")


def test_a_length_beyond_the_model_is_refused():
    with pytest.raises(ConfigError, match="max_position_embeddings 4096"):
        EngineConfig.create(model="x", max_model_len=4097).resolve_max_model_len(ModelConfig.from_folder(TINY))


@pytest.mark.parametrize("name", ["", "no/such/model", "file", "empty"])
def test_a_model_that_is_not_there_says_what_to_give(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="give the folder"):
        resolve_model(name)


def test_a_folder_and_a_packaged_name_are_resolved(tmp_path, monkeypatch):
    assert resolve_model(TINY) == TINY
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text("{}")
    monkeypatch.setattr("deepinfer.model_path.PACKAGED_MODELS", tmp_path)
    assert resolve_model("small") == tmp_path / "small"


def test_errors_have_one_root_and_carry_their_parts():
    assert all(issubclass(one, DeepInferError) for one in (ConfigError, CheckpointError, RequestError, BackendError))
    error = CheckpointError("is short", file="a", tensor="b", nbytes=3)
    assert str(error) == "a: b: is short [3 bytes]" and (error.file, error.tensor, error.nbytes) == ("a", "b", 3)
    assert str(RequestError("top_p", 2.0, "must be at most 1")) == "top_p=2.0: must be at most 1"


def test_importing_the_package_loads_nothing_heavy():
    program = "import sys, deepinfer; print(sorted({'torch', 'numpy', 'msgspec', 'tokenizers'} & set(sys.modules)))"
    path = f"{ROOT}:{ROOT / 'hal'}"
    done = subprocess.run([sys.executable, "-c", program], env={"PYTHONPATH": path}, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def make_distribution(site: Path, files: list[str]) -> str:
    """Metadata of an installed distribution called deepinfer; returns where its package would lie."""
    meta = site / "deepinfer-9.9.dist-info"
    meta.mkdir(parents=True)
    (meta / "RECORD").write_text("".join(f"{name},,\n" for name in files))
    return str(site / "deepinfer" / "__init__.py")


def test_a_foreign_distribution_of_the_same_name_is_noticed(tmp_path):
    package = make_distribution(tmp_path / "site", ["deepinfer/__init__.py", "deepinfer/server.py"])
    shadowing = str(tmp_path / "checkout" / "deepinfer" / "__init__.py")
    assert foreign_owner(package) == "deepinfer 9.9"
    assert foreign_owner(shadowing) is None


def test_our_own_distribution_is_accepted(tmp_path):
    package = make_distribution(tmp_path / "site", ["deepinfer/__init__.py", "deepinfer/_ownership.py"])
    assert foreign_owner(package) is None


def test_importing_beside_a_foreign_distribution_fails_with_one_sentence(tmp_path):
    make_distribution(tmp_path, ["deepinfer/server.py"])
    (tmp_path / "deepinfer").mkdir()
    for name in ("__init__.py", "_ownership.py"):
        (tmp_path / "deepinfer" / name).write_text((ROOT / "deepinfer" / name).read_text())
    done = subprocess.run(  # -S: an editable installation would be found before the folder
        [sys.executable, "-S", "-c", "import deepinfer"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stderr.strip().splitlines()[-1].startswith("ImportError: another distribution (deepinfer 9.9) owns")


def test_the_released_configuration_survives_a_round_trip_through_a_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(released_config()))
    assert ModelConfig.from_folder(tmp_path) == ModelConfig.from_dict(released_config())
