"""How tools/nano/measure.py counts: every token once, drafts without a trace, files side by side as if alone."""

import functools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from deepinfer.model.draft import Draft
from tests.model.batches import run_chunks
from tests.model.nano_models import nano_folder, nano_runner, nano_text, nano_tools

LENGTHS = [230, 64, 131, 9, 1]


@functools.cache
def tool():
    with nano_tools():
        import measure

        return measure


def open_files():
    texts = [nano_text("random", tokens, i) for i, tokens in enumerate(LENGTHS)]
    return [tool().File(f"{i}.py", 3 * len(ids), ids) for i, ids in enumerate(texts)]


@functools.cache
def runner():
    return nano_runner("random", dtype="float32", act_quant="none", max_num_seqs=3, num_blocks=5)


@pytest.mark.parametrize("drafts", [0, 20, 200])
def test_nats_are_those_of_each_file_alone_whatever_is_drafted_in_between(drafts):
    files = open_files()
    tool().measure(runner(), files, drafts)
    for file in files:
        logits = run_chunks(runner(), file.ids, None)
        wanted = torch.nn.functional.cross_entropy(logits[:-1], torch.from_numpy(file.ids[1:]).long(), reduction="sum")
        assert file.nats == pytest.approx(float(wanted) if len(file.ids) > 1 else 0.0, rel=1e-5)


def test_every_fourth_position_with_room_for_a_block_is_drafted_once():
    files = open_files()
    found = tool().measure(runner(), files, sum(LENGTHS))
    room = [len(range(3, length - 6, 4)) for length in LENGTHS]
    assert sum(len(rows) for rows in found.accepted) == sum(room)


@pytest.mark.parametrize("right", range(6))
def test_drafts_are_accepted_as_long_as_they_are_the_target_s_greedy_choices(monkeypatch, right):
    (file, *_), tools, found = open_files(), tool(), tool().Drafts()
    tokens = file.ids[:101]
    for step in range(5):
        best = int(run_chunks(runner(), tokens, None)[-1].argmax())
        tokens = np.append(tokens, np.int32(best if step != right else (best + 1) % 2000))
    proposed = SimpleNamespace(tokens=torch.from_numpy(tokens[None, 101:]), confidence=torch.full((1, 5), 0.5))
    monkeypatch.setattr(Draft, "__call__", lambda self, slots, anchors, gold: proposed)
    (active,) = [next(tools.in_parallel(runner(), [file]))]
    tools.forced_step(runner(), [file.part(100)])
    file.done = 100
    tools.draft_and_verify(runner(), active, 100, found)
    assert found.accepted[0].tolist() == [[i < right for i in range(5)]]
    assert found.confidence[0].tolist() == [[0.5] * 5]


def test_the_ratio_to_xz_is_of_the_same_bytes():
    with nano_tools():
        import corpus
    documents = [corpus.Document("x", f"{i}.py", bytes(range(32, 127)) * 40) for i in range(2)]
    files = [tool().File(d.path, len(d.data), np.zeros(8, np.int32), nats=100.0) for d in documents]
    report = tool().quality(files, documents, tool().Drafts())
    size = sum(len(d.data) for d in documents)
    assert report["bits_per_byte"] == pytest.approx(200 / math.log(2) / size)
    assert report["ratio"] == pytest.approx(report["bits_per_byte"] / report["xz_9e_bits_per_byte"])
    assert report["bytes"] == size


def test_text_that_tokens_do_not_give_back_is_an_error():
    with nano_tools():
        import corpus

        from deepinfer.tokenizer import Tokenizer
    tokenizer = Tokenizer.from_folder(nano_folder("random"))
    document = corpus.Document("x", "odd.py", "naïve <｜begin▁of▁sentence｜> 中文\r\n\tx = 1\n".encode())
    (file,) = tool().encode([document], tokenizer)
    assert file.ids[0] == 0 and not (file.ids[1:] == 0).any()
    assert b"".join(tokenizer.bytes_of(i) for i in file.ids[1:]) == document.data
    tokenizer.token_bytes[int(file.ids[1])] = b"?"
    with pytest.raises(corpus.CorpusError, match="odd.py do not decode"):
        tool().encode([document], tokenizer)
