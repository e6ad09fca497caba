"""Random damage to headers, indices and scales is refused by a typed error, or changes no tensor."""

import random

import pytest
import torch
from checkpoint_edits import INDEX, SHARDS, TINY, copy_tiny, split_shard, write_sums

from deepinfer.checkpoint import open_checkpoint
from deepinfer.errors import CheckpointError

SEEDS = range(200)
KINDS = ("flip", "set", "insert", "delete", "repeat", "cut", "digit", "length")


@pytest.fixture(scope="module")
def originals():
    checkpoint = open_checkpoint(TINY).require_ok()
    return {name: raw_bytes(tensor).clone() for _, part in checkpoint.iter_shards() for name, tensor in part.items()}


def raw_bytes(tensor):
    return tensor.reshape(-1).view(torch.uint8)


def damage(raw: bytes, kind: str, rng: random.Random, start: int, end: int) -> bytes:
    """`raw` with one random change inside [start, end)."""
    at = rng.randrange(start, end)
    span = rng.randrange(1, 40)
    if kind == "flip":
        return raw[:at] + bytes([raw[at] ^ (1 << rng.randrange(8))]) + raw[at + 1 :]
    if kind == "set":
        return raw[:at] + bytes([rng.randrange(256)]) + raw[at + 1 :]
    if kind == "insert":
        return raw[:at] + rng.randbytes(span) + raw[at:]
    if kind == "delete":
        return raw[:at] + raw[at + span :]
    if kind == "repeat":
        return raw[: at + span] + raw[at:]
    if kind == "cut":
        return raw[:at]
    if kind == "digit":
        digits = [i for i in range(start, end) if 48 <= raw[i] <= 57]
        at = rng.choice(digits)
        return raw[:at] + str(rng.randrange(10)).encode() + raw[at + 1 :]
    return rng.randbytes(8) + raw[8:]


def header_span(path):
    _, data = split_shard(path)
    return 8, path.stat().st_size - len(data)


def corrupt(folder, seed: int) -> None:
    """Half of the seeds damage a header, a quarter the index, a quarter a scale."""
    rng = random.Random(seed)
    target = ("header", "header", "index", "scale")[seed % 4]
    kind = rng.choice(KINDS[:-1] if target == "index" else KINDS)
    if target == "scale":
        write_sums(folder)
        name = rng.choice([name for name in open_checkpoint(TINY).tensors if name.endswith(".scale")])
        entry = open_checkpoint(TINY).tensors[name]
        path, start, end = folder / entry.shard, entry.offset, entry.offset + entry.nbytes
        kind = rng.choice(("flip", "set"))
    elif target == "header":
        path = folder / rng.choice(SHARDS)
        start, end = header_span(path)
    else:
        path = folder / INDEX
        start, end = 0, path.stat().st_size
    path.write_bytes(damage(path.read_bytes(), kind, rng, start, end))


def outcome(folder, originals) -> str:
    """`refused`, `identical`, or the name of the first tensor that was read with other bytes."""
    try:
        checkpoint = open_checkpoint(folder).require_ok()
        read = {name: raw_bytes(tensor) for _, part in checkpoint.iter_shards() for name, tensor in part.items()}
    except CheckpointError:
        return "refused"
    assert read.keys() == originals.keys()
    return next((name for name in originals if not torch.equal(read[name], originals[name])), "identical")


@pytest.mark.parametrize("seed", SEEDS)
def test_random_damage_is_refused_or_harmless(tmp_path, originals, seed):
    folder = copy_tiny(tmp_path / "copy")
    corrupt(folder, seed)
    assert outcome(folder, originals) in ("refused", "identical")


def test_the_damage_is_mostly_real(tmp_path, originals):
    """Most of the first 40 cases must be refused: otherwise the changes above would test nothing."""
    refused = 0
    for seed in range(40):
        folder = copy_tiny(tmp_path / str(seed))
        corrupt(folder, seed)
        refused += outcome(folder, originals) == "refused"
    assert refused >= 30


def test_a_nan_scale_is_refused_without_checksums(tmp_path, originals):
    rng = random.Random(1)
    tensors = open_checkpoint(TINY).tensors
    for _ in range(20):
        folder = copy_tiny(tmp_path / "copy")
        entry = tensors[rng.choice([name for name in tensors if name.endswith(".scale")])]
        path = folder / entry.shard
        raw = bytearray(path.read_bytes())
        raw[entry.offset + rng.randrange(entry.nbytes)] = 255
        path.write_bytes(raw)
        assert outcome(folder, originals) == "refused"
