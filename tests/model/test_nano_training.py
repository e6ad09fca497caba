"""nano's training tools: a short CPU run learns, storage rounding is the reader's, splits keep apart."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "tools" / "nano"


@pytest.fixture(autouse=True)
def tools_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))


@pytest.mark.timeout(600)
def test_fifty_steps_on_a_cpu_lower_the_loss_and_leave_a_readable_checkpoint(tmp_path):
    from deepinfer.model.reference import Reference

    command = [sys.executable, TOOLS / "train.py", "--steps", "50", "--device", "cpu", "--tiny-batch",
               "--stages", "trunk", "--data", tmp_path / "absent", "--out", tmp_path]
    subprocess.run(command, check=True, timeout=600, stdout=subprocess.DEVNULL)
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if "loss" in record]
    assert losses[-1] < losses[0] - 1.0
    net = Reference.from_folder(tmp_path / "nano")
    assert torch.isfinite(net.forward(torch.tensor([[0, 5, 9, 40]]))).all()
    assert sum(path.stat().st_size for path in (tmp_path / "nano").iterdir()) <= 16_000_000


def test_training_rounds_weights_to_what_the_checkpoint_gives_back(tmp_path):
    import config
    import export
    import init
    import storage

    from deepinfer.model.reference import load_checkpoint

    settings = config.config_json(1500, num_hidden_layers=3, num_nextn_predict_layers=1, moe_intermediate_size=32,
                                  compress_ratios=[0, 2, 1, 0], kv_source_layer_ids=[1, 2],
                                  index_source_layer_ids=[1, 2], candidate_source_layer_id=2,
                                  dspark_target_layer_ids=[2], engram_vocab_size=101)
    table = config.tensor_table(settings)
    masters = init.init_weights(settings, seed=3)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text("{}")
    export.export_checkpoint(tmp_path / "nano", settings, masters, tmp_path)
    _, read_back = load_checkpoint(tmp_path / "nano")
    rounded = storage.rounded_weights(masters, table)
    assert rounded.keys() == read_back.keys()
    for name, weight in rounded.items():
        torch.testing.assert_close(weight, read_back[name], rtol=0, atol=0, msg=name)


def test_rounding_passes_gradients_straight_through():
    import config
    import storage

    master = torch.randn(64, 64, requires_grad=True)
    storage.rounded_weights({"w": master}, {"w": config.Tensor((64, 64), "fp4")})["w"].sum().backward()
    torch.testing.assert_close(master.grad, torch.ones(64, 64))


def test_the_tensor_table_counts_the_bytes_that_export_writes():
    import config

    text = config.config_json(1500)
    assert config.stored_bytes(text) < config.MAX_CHECKPOINT_BYTES
    assert config.Tensor((40, 70), "fp8").stored_bytes == 40 * 70 + 2 * 3
    assert config.Tensor((4, 64), "fp4").stored_bytes == 4 * 32 + 4 * 2


def test_shingles_find_copied_text_and_nothing_else():
    import corpus

    text = bytes(range(65, 91)) * 8 + b"The quick brown fox jumps over the lazy dog, again and again and again." * 2
    index = corpus.ShingleSet(corpus.shingles(text))
    assert index.found_in(b"x" * 500 + text).size == index.hashes.size
    assert index.found_in(b"an unrelated sentence that is long enough to have a few shingles of its own" * 3).size == 0
    assert corpus.shingles(b"short").size == 0


def test_no_file_is_in_two_splits_and_held_out_has_its_size():
    import corpus

    rows = corpus.load_manifest()["files"]
    digests = [row["sha256"] for row in rows]
    assert len(set(digests)) == len(digests)
    held_out = sum(row["bytes"] for row in rows if row["split"] == "heldout")
    assert 1_000_000 <= held_out <= 1_250_000


def test_calibration_error_and_area_under_curve_on_known_cases():
    import drafts

    outcome = torch.tensor([1, 1, 0, 0, 1, 0])
    assert drafts.area_under_curve(torch.tensor([0.9, 0.8, 0.2, 0.1, 0.7, 0.3]), outcome) == 1.0
    assert drafts.area_under_curve(torch.full((6,), 0.5), outcome) == 0.5
    assert drafts.calibration_error(torch.full((6,), 0.5), outcome) == pytest.approx(0.0)
    assert drafts.calibration_error(torch.full((6,), 0.9), outcome) == pytest.approx(0.4)


def test_batches_never_score_a_begin_token():
    import numpy as np
    from data import Split, TokenStream

    documents = [np.arange(10, 30, dtype=np.uint16), np.arange(40, 55, dtype=np.uint16)]
    stream = TokenStream(Split(documents, np.array([60, 45]), np.array([True, True])), torch.device("cpu"), seed=1)
    inputs, targets = stream.batch(2, 32)
    assert inputs.shape == targets.shape == (2, 32)
    assert not (targets == 0).any()
    assert (targets == -100).any()
