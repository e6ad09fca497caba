"""Every way in which a checkpoint can be wrong has one typed error that says where."""

import json
import os

import pytest
import torch
from checkpoint_edits import (
    INDEX,
    SHARDS,
    TINY,
    copy_tiny,
    edit_header,
    edit_json,
    join_shard,
    poke,
    split_shard,
    tensor_place,
    write_sums,
)
from safetensors.torch import load_file, save_file

from deepinfer.bench.v41 import released_config
from deepinfer.checkpoint import expected_tensors, open_checkpoint
from deepinfer.cli.check import check_command, run_check
from deepinfer.errors import (
    BadHeader,
    BadIndex,
    BadScale,
    CheckpointError,
    ChecksumMismatch,
    ConfigError,
    DuplicateTensor,
    MissingFile,
    MissingShard,
    MissingTensor,
    NotRunnable,
    OversizedShard,
    TruncatedShard,
    UnexpectedTensor,
    WrongDtype,
    WrongShape,
)
from deepinfer.model_config import ModelConfig

SINK = "layers.0.attn.attn_sink"
SCALE = "layers.0.attn.wq_b.scale"
TINY_TENSORS = len(expected_tensors(ModelConfig.from_folder(TINY)))


@pytest.fixture
def folder(tmp_path):
    return copy_tiny(tmp_path / "tiny")


def assert_first_problem(folder, kind, *, file=None, tensor=None, nbytes=None, mode="full"):
    """The first problem is of exactly this class and names these parts; require_ok raises it."""
    checkpoint = open_checkpoint(folder, mode)
    assert checkpoint.problems, "the damage went unnoticed"
    first = checkpoint.problems[0]
    assert type(first) is kind, first
    assert (first.file, first.tensor) == (file, tensor)
    assert nbytes is None or first.nbytes == nbytes
    assert all(part in str(first) for part in (file, tensor) if part)
    with pytest.raises(kind):
        checkpoint.require_ok()
    with pytest.raises(CheckpointError):
        checkpoint.read(SINK)


def raw_bytes(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def header_of(shard, name):
    return split_shard(TINY / shard)[0][name]


def shard_of(name):
    return next(shard for shard in SHARDS if name in split_shard(TINY / shard)[0])


def test_a_sound_checkpoint_reads_bit_identical_to_safetensors(folder):
    checkpoint = open_checkpoint(folder).require_ok()
    seen = 0
    for shard, tensors in checkpoint.iter_shards():
        reference = load_file(folder / shard)
        assert tensors.keys() == reference.keys()
        for name, tensor in tensors.items():
            assert tensor.shape == reference[name].shape
            assert torch.equal(raw_bytes(tensor), raw_bytes(reference[name])), name
            seen += 1
    assert seen == len(checkpoint.tensors) == TINY_TENSORS


def test_codes_and_scales_are_read_as_bytes(folder):
    checkpoint = open_checkpoint(folder)
    names = ["layers.0.attn.wq_a.weight", SCALE, "layers.0.ffn.experts.0.w1.weight", "embed.weight", SINK]
    assert [checkpoint.read(name).dtype for name in names] == [torch.uint8] * 3 + [torch.bfloat16, torch.float32]


def test_a_tensor_that_is_kept_outlives_the_mapping(folder):
    checkpoint = open_checkpoint(folder)
    kept = checkpoint.read(SINK)
    before = kept.clone()
    checkpoint.close()
    assert torch.equal(kept, before)
    assert checkpoint.read("head.weight").shape == (316, 64)


def test_writing_to_a_tensor_does_not_write_to_the_file(folder):
    open_checkpoint(folder).read(SINK).fill_(7)
    assert not bool((open_checkpoint(folder).read(SINK) == 7).all())


def test_an_unaligned_tensor_is_read(folder):
    """One more header byte moves all data to odd offsets."""
    path = folder / shard_of(SINK)
    header, data = split_shard(path)
    raw = json.dumps(header).encode()
    join_shard(path, raw + b" " * (2 - len(raw) % 2 - 1), data)
    expected = load_file(TINY / shard_of(SINK))[SINK]
    assert torch.equal(open_checkpoint(folder).require_ok().read(SINK), expected)


def test_one_single_file_is_accepted(folder):
    tensors = {name: tensor for shard in SHARDS for name, tensor in load_file(folder / shard).items()}
    for shard in [*SHARDS, INDEX]:
        (folder / shard).unlink()
    save_file(tensors, folder / "model.safetensors")
    checkpoint = open_checkpoint(folder).require_ok()
    assert torch.equal(checkpoint.read(SINK), tensors[SINK])


def test_the_optional_prefix_and_copies_of_the_embedding_are_accepted(folder):
    tensors = {f"model.{name}": tensor for shard in SHARDS for name, tensor in load_file(folder / shard).items()}
    tensors["model.mtp.0.embed.weight"] = torch.zeros(3)
    tensors["mtp.2.head.weight"] = torch.zeros(3)
    for shard in [*SHARDS, INDEX]:
        (folder / shard).unlink()
    save_file(tensors, folder / "model.safetensors")
    checkpoint = open_checkpoint(folder).require_ok()
    assert torch.equal(checkpoint.read(SINK), tensors[f"model.{SINK}"])
    assert "mtp.0.embed.weight" not in checkpoint.tensors


def test_an_index_is_needed_or_a_single_file(folder):
    (folder / INDEX).unlink()
    assert_first_problem(folder, MissingFile, file=INDEX)


def test_a_shard_that_the_index_names_must_be_there(folder):
    (folder / SHARDS[1]).unlink()
    first_name = next(n for n, s in json.loads((TINY / INDEX).read_text())["weight_map"].items() if s == SHARDS[1])
    assert_first_problem(folder, MissingShard, file=SHARDS[1], tensor=first_name)


def test_a_shard_shorter_than_its_header_says_names_the_cut_tensor(folder):
    path, start, nbytes = tensor_place(folder, SINK)
    os.truncate(path, start + nbytes - 1)
    assert_first_problem(folder, TruncatedShard, file=path.name, tensor=SINK, nbytes=start + nbytes - 1)


@pytest.mark.parametrize("size", [0, 7, 8, 500])
def test_a_shard_cut_inside_its_header_is_truncated(folder, size):
    os.truncate(folder / SHARDS[0], size)
    assert_first_problem(folder, TruncatedShard, file=SHARDS[0], nbytes=size)


def test_bytes_after_the_last_tensor_are_refused(folder):
    with open(folder / SHARDS[0], "ab") as stream:
        stream.write(b"\0")
    assert_first_problem(folder, OversizedShard, file=SHARDS[0], nbytes=(TINY / SHARDS[0]).stat().st_size + 1)


def test_a_shard_whose_data_is_a_hole_cannot_run(folder):
    header, data = split_shard(folder / SHARDS[0])
    raw = json.dumps(header).encode()
    join_shard(folder / SHARDS[0], raw + b" " * (-(8 + len(raw)) % 65536), b"")
    start = (folder / SHARDS[0]).stat().st_size
    os.truncate(folder / SHARDS[0], start + len(data))
    with open(folder / SHARDS[0], "rb") as stream:
        try:
            os.lseek(stream.fileno(), start, os.SEEK_DATA)
            pytest.skip("this file system stores holes as data")
        except OSError:
            pass
    assert_first_problem(folder, TruncatedShard, file=SHARDS[0], nbytes=start + len(data))
    assert open_checkpoint(folder, "headers").problems == []


def drop(folder, name):
    """Take one tensor out of its shard, closing the gap, and out of the index."""
    path, _, _ = tensor_place(folder, name)
    header, data = split_shard(path)
    begin, end = header.pop(name)["data_offsets"]
    for entry in header.values():
        if "data_offsets" in entry and entry["data_offsets"][0] >= end:
            entry["data_offsets"] = [offset - (end - begin) for offset in entry["data_offsets"]]
    join_shard(path, header, data[:begin] + data[end:])

    def change(index):
        del index["weight_map"][name]
        index["metadata"]["total_size"] -= end - begin

    edit_json(folder / INDEX, change)


def add(folder, shard, name, dtype, shape, nbytes):
    """Append a tensor of zeros to a shard and to the index."""
    header, data = split_shard(folder / shard)
    header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + nbytes]}
    join_shard(folder / shard, header, data + bytes(nbytes))

    def change(index):
        index["weight_map"][name] = shard
        index["metadata"]["total_size"] += nbytes

    edit_json(folder / INDEX, change)


def test_a_missing_tensor_is_named_with_what_it_must_be(folder):
    drop(folder, SINK)
    assert_first_problem(folder, MissingTensor, tensor=SINK, nbytes=16)


def test_an_unexpected_tensor_is_named(folder):
    add(folder, SHARDS[2], "layers.7.attn.attn_sink", "F32", [4], 16)
    assert_first_problem(folder, UnexpectedTensor, file=SHARDS[2], tensor="layers.7.attn.attn_sink", nbytes=16)


def test_a_tensor_in_two_shards_is_refused(folder):
    header, data = split_shard(folder / SHARDS[2])
    other = next(shard for shard in SHARDS if shard != shard_of(SINK))
    header, data = split_shard(folder / other)
    header[SINK] = {"dtype": "F32", "shape": [4], "data_offsets": [len(data), len(data) + 16]}
    join_shard(folder / other, header, data + bytes(16))
    kinds = {type(problem) for problem in open_checkpoint(folder).problems}
    assert kinds == {BadIndex, DuplicateTensor}


def test_a_wrong_shape_is_named_with_the_right_one(folder):
    path, _, _ = tensor_place(folder, SINK)
    edit_header(path, lambda header: header[SINK].update(shape=[2, 2]))
    assert_first_problem(folder, WrongShape, file=path.name, tensor=SINK, nbytes=16)
    assert "is [2, 2], must be [4]" in str(open_checkpoint(folder).problems[0])


def test_a_wrong_type_is_named_with_the_right_one(folder):
    path, _, _ = tensor_place(folder, SCALE)
    edit_header(path, lambda header: header[SCALE].update(dtype="U8"))
    assert_first_problem(folder, WrongDtype, file=path.name, tensor=SCALE)
    assert "is U8, must be F8_E8M0" in str(open_checkpoint(folder).problems[0])


def test_a_scale_that_is_nan_is_refused(folder):
    path, start, nbytes = tensor_place(folder, SCALE)
    poke(path, start + 3, 255)
    assert_first_problem(folder, BadScale, file=path.name, tensor=SCALE, nbytes=nbytes)
    assert "scale 3 of 8" in str(open_checkpoint(folder).problems[0])


def test_a_changed_scale_is_noticed_where_the_folder_has_checksums(folder):
    write_sums(folder)
    open_checkpoint(folder).require_ok()
    path, start, _ = tensor_place(folder, SCALE)
    poke(path, start, 130)
    assert_first_problem(folder, ChecksumMismatch, file=path.name)
    assert open_checkpoint(folder, verify_sums=False).problems == []


def test_bad_checksum_files_are_problems_too(folder):
    (folder / "SHA256SUMS").write_text(f"{'0' * 64}  absent\n")
    assert_first_problem(folder, MissingFile, file="absent")
    (folder / "SHA256SUMS").write_text("rubbish\n")
    assert_first_problem(folder, CheckpointError, file="SHA256SUMS")


def set_entry(**changes):
    return lambda header: header[SINK].update(changes)


BIG = 1 << 62


@pytest.mark.parametrize(
    "change",
    [
        set_entry(data_offsets=[4, 20]),
        set_entry(data_offsets=[16, 0]),
        set_entry(data_offsets=[-16, 0]),
        set_entry(data_offsets=[0]),
        set_entry(data_offsets=[0.0, 16.0]),
        set_entry(data_offsets=[0, BIG * 4]),
        set_entry(shape=[4, BIG]),
        set_entry(shape=[-4]),
        set_entry(shape=[True] * 4),
        set_entry(shape="4"),
        set_entry(shape=[1] * 9),
        set_entry(shape=[5]),
        set_entry(shape=[1 << 40, 1 << 40]),
        set_entry(dtype="F128"),
        set_entry(dtype=7),
        set_entry(extra=1),
        lambda header: header.update({SINK: []}),
        lambda header: header.update({"\u00e9": header[SINK]}),
        lambda header: header.update({"\ud800": header[SINK]}),
        lambda header: header.update(__metadata__={"format": 1}),
        lambda header: header.update(__metadata__=[]),
        lambda header: header.pop(SINK),
    ],
)
def test_a_malformed_header_entry_is_refused(folder, change):
    path, _, _ = tensor_place(folder, SINK)
    edit_header(path, change)
    problem = open_checkpoint(folder).problems[0]
    assert type(problem) is BadHeader and problem.file == path.name


@pytest.mark.parametrize(
    "raw",
    [
        b"{}x",
        b"[]",
        b"  {}",
        b"{",
        b'{"a": NaN}',
        b"\xff\xfe",
        b'{"a":' * 5000,
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"a":1,"a":1}',
        b"{ }  \0",
    ],
)
def test_a_header_that_is_no_json_object_is_refused(folder, raw):
    _, data = split_shard(folder / SHARDS[0])
    join_shard(folder / SHARDS[0], raw, data)
    assert_first_problem(folder, BadHeader, file=SHARDS[0])


@pytest.mark.parametrize("length", [0, 1, 100_000_001, (1 << 64) - 1])
def test_an_absurd_header_length_is_refused(folder, length):
    with open(folder / SHARDS[0], "r+b") as stream:
        stream.write(length.to_bytes(8, "little"))
    assert_first_problem(folder, BadHeader, file=SHARDS[0], nbytes=length)


def edit_index(change):
    return lambda folder: edit_json(folder / INDEX, change)


def write_index(raw):
    return lambda folder: (folder / INDEX).write_bytes(raw)


@pytest.mark.parametrize(
    "damage",
    [
        write_index(b""),
        write_index(b"[]"),
        write_index(b"\xff"),
        write_index(b"{" * 100000),
        write_index(b'{"weight_map": {}}'),
        write_index(b'{"weight_map": {"a": "model-1.safetensors", "a": "model-2.safetensors"}}'),
        edit_index(lambda index: index.pop("weight_map")),
        edit_index(lambda index: index.update(weight_map=[])),
        edit_index(lambda index: index.update(extra=1)),
        edit_index(lambda index: index["metadata"].update(total_size=1)),
        edit_index(lambda index: index["metadata"].update(total_size="many")),
        edit_index(lambda index: index.update(metadata=3)),
        edit_index(lambda index: index["weight_map"].update({SINK: 3})),
        edit_index(lambda index: index["weight_map"].update({SINK: "../../secret.safetensors"})),
        edit_index(lambda index: index["weight_map"].update({SINK: "pytorch_model.bin"})),
        edit_index(lambda index: index["weight_map"].update({SINK: next(s for s in SHARDS if s != shard_of(SINK))})),
        edit_index(lambda index: index["weight_map"].pop(SINK)),
        edit_index(lambda index: index["weight_map"].update({"ghost": SHARDS[0]})),
        edit_index(lambda index: index["weight_map"].update({"\u00e9": SHARDS[0]})),
    ],
)
def test_an_index_that_is_malformed_or_disagrees_is_refused(folder, damage):
    damage(folder)
    problem = open_checkpoint(folder).problems[0]
    assert type(problem) is BadIndex and problem.file == INDEX


def test_all_problems_are_listed_and_the_first_is_raised_with_the_others(folder):
    drop(folder, SINK)
    drop(folder, "norm.weight")
    edit_header(folder / shard_of(SCALE), lambda header: header[SCALE].update(dtype="U8"))
    checkpoint = open_checkpoint(folder)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.require_ok()
    assert len(caught.value.problems) == 3
    assert {type(problem) for problem in caught.value.problems} == {MissingTensor, WrongDtype}
    assert all(name in str(caught.value) for name in (SINK, "norm.weight", SCALE))


def test_nothing_is_read_before_everything_is_compared(folder, monkeypatch):
    drop(folder, SINK)
    monkeypatch.setattr("deepinfer.checkpoint.reader.Checkpoint.read", lambda *_: pytest.fail("a tensor was read"))
    assert [type(problem) for problem in open_checkpoint(folder).problems] == [MissingTensor]


def test_headers_alone_can_be_planned_but_not_run(folder):
    for shard in SHARDS:
        header, _ = split_shard(folder / shard)
        join_shard(folder / shard, header, b"")
    checkpoint = open_checkpoint(folder, "headers").require_ok()
    assert len(checkpoint.tensors) == TINY_TENSORS and not checkpoint.assumed
    with pytest.raises(NotRunnable, match="full shards"):
        checkpoint.read(SINK)
    assert type(open_checkpoint(folder).problems[0]) is TruncatedShard


def test_headers_alone_are_still_compared(folder):
    edit_header(folder / shard_of(SINK), lambda header: header[SINK].update(shape=[2, 2]))
    assert_first_problem(folder, WrongShape, file=shard_of(SINK), tensor=SINK, mode="headers")


def test_the_index_alone_can_be_planned_with_assumed_shapes(folder):
    for shard in SHARDS:
        (folder / shard).unlink()
    checkpoint = open_checkpoint(folder, "index").require_ok()
    assert checkpoint.assumed and checkpoint.nbytes == 1553992
    with pytest.raises(NotRunnable):
        next(checkpoint.iter_shards())


def test_the_index_alone_is_still_compared_by_name_and_total(folder):
    edit_json(folder / INDEX, lambda index: index["weight_map"].pop(SINK))
    problems = open_checkpoint(folder, "index").problems
    assert [type(problem) for problem in problems] == [BadIndex, MissingTensor]
    edit_json(folder / INDEX, lambda index: index["weight_map"].update({"ghost": SHARDS[0]}))
    assert UnexpectedTensor in {type(problem) for problem in open_checkpoint(folder, "index").problems}


def test_an_unknown_mode_is_refused(folder):
    with pytest.raises(ConfigError, match="full, headers or index"):
        open_checkpoint(folder, "half")


def test_check_reports_a_sound_checkpoint(folder, capsys):
    assert check_command(str(folder), max_model_len="1k", max_num_seqs=2, as_json=True) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["mode"], report["tensors"], report["checkpoint_bytes"]) == ("full", TINY_TENSORS, 1553992)
    assert report["plan"]["num_blocks"] == 16 and report["problems"] == []
    parts = ("weight_bytes", "kv_bytes", "state_bytes", "history_bytes", "workspace_bytes", "logits_bytes")
    assert report["plan"]["total_bytes"] == sum(report["plan"][part] for part in parts)


def test_check_lists_every_problem_and_still_plans(folder, capsys):
    drop(folder, SINK)
    drop(folder, "norm.weight")
    assert check_command(str(folder)) == 1
    shown = capsys.readouterr().out
    assert "MissingTensor" in shown and SINK in shown and "norm.weight" in shown and "KV cache" in shown


def test_check_takes_index_only_headers_only_and_a_bad_configuration(folder, tmp_path):
    for shard in SHARDS:
        header, _ = split_shard(folder / shard)
        join_shard(folder / shard, header, b"")
    assert run_check(str(folder), mode="headers").problems == []
    for shard in SHARDS:
        (folder / shard).unlink()
    report = run_check(str(folder))
    assert report.mode == "index" and report.assumed and report.problems == []
    edit_json(folder / "config.json", lambda config: config.update(dtype="int4"))
    report = run_check(str(folder))
    assert [problem.kind for problem in report.problems] == ["ConfigError"] and report.plan is None


def test_check_plans_the_released_model_from_its_index(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(released_config()))
    names = expected_tensors(ModelConfig.from_folder(tmp_path))
    index = {"metadata": {"total_size": 510286023000}, "weight_map": dict.fromkeys(names, "model-1.safetensors")}
    (tmp_path / INDEX).write_text(json.dumps(index))
    report = run_check(str(tmp_path), ep=64, max_model_len="1M", max_num_seqs=1)
    assert (report.tensors, report.checkpoint_bytes, report.problems) == (96085, 510_286_023_000, [])
    assert report.plan.kv_bytes_per_token == 890


@pytest.mark.parametrize("settings", [{"mode": "half"}, {"max_model_len": "x"}, {"max_num_seqs": 0}, {"ep": 0}])
def test_check_refuses_a_bad_argument(folder, settings):
    with pytest.raises(ConfigError):
        run_check(str(folder), **settings)
