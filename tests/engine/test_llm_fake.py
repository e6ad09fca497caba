"""LLM around a fake runner: batches with bad prompts, streams, scores, progress."""

import contextlib
import sys
import threading

import numpy as np
import pytest

from deepinfer.errors import RequestError
from deepinfer.llm import LLM
from deepinfer.sampling_params import SamplingParams
from tests.engine.fake_runner import expected_tokens, make_engine
from tests.engine.toy_tokenizer import make_tokenizer

TOKENIZER = make_tokenizer()
VOCAB = TOKENIZER.vocab_size
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def make_llm(**settings):
    return LLM.from_engine(make_engine(TOKENIZER, vocab_size=VOCAB, **settings))


def test_every_form_of_prompt_gives_one_output_in_order():
    llm = make_llm()
    ids = TOKENIZER.encode("hello")
    outputs = llm.generate(["hello", ids, {"prompt": "hello"}, {"prompt_token_ids": ids}], GREEDY, use_tqdm=False)
    wanted = expected_tokens(ids, 12, VOCAB)
    assert [o.outputs[0].token_ids for o in outputs] == [wanted] * 4
    assert [o.prompt for o in outputs] == ["hello", None, "hello", None]
    assert all(o.prompt_token_ids == ids and o.finished and o.error is None for o in outputs)
    assert outputs[0].outputs[0].text == TOKENIZER.decode(wanted)
    for single in ("hello", ids, np.array(ids), {"prompt": "hello"}):
        (one,) = llm.generate(single, GREEDY, use_tqdm=False)
        assert one.outputs[0].token_ids == wanted
    assert llm.generate([], GREEDY) == []


@pytest.mark.parametrize("overlap", [False, True])
def test_bad_prompts_carry_their_error_and_harm_no_other(overlap):
    llm = make_llm(overlap=overlap)
    params = [GREEDY, GREEDY, GREEDY, SamplingParams(stop_token_ids=[99_999]), GREEDY]
    image = {"prompt": "see", "multi_modal_data": {"image": object()}}
    outputs = llm.generate(["a", [1, 99_999], image, "d", "e"], params, use_tqdm=False)
    assert [o.error is None for o in outputs] == [True, False, False, False, True]
    assert "prompt_token_ids=99999" in outputs[1].error
    assert "images are not supported" in outputs[2].error and outputs[2].prompt == "see"
    assert "stop_token_ids=99999" in outputs[3].error
    assert all(o.finished for o in outputs) and outputs[1].outputs == []
    assert len(outputs[4].outputs[0].token_ids) == 12


@pytest.mark.parametrize(
    "prompts, params, named",
    [(None, None, "prompts"), (5, None, "prompts"), ("a", {"max_tokens": 3}, "SamplingParams"), ("a", 3, "SamplingParams")],
)
def test_what_is_no_batch_at_all_is_refused_by_name(prompts, params, named):
    with pytest.raises(RequestError, match=named):
        make_llm().generate(prompts, params)


def test_one_parameter_set_per_prompt_or_one_for_all():
    llm = make_llm()
    short = SamplingParams(temperature=0, max_tokens=2)
    outputs = llm.generate(["a", "b"], [GREEDY, short], use_tqdm=False)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [12, 2]
    assert len(llm.generate("a", use_tqdm=False)[0].outputs[0].token_ids) == 16
    with pytest.raises(RequestError, match="2, one per prompt"):
        llm.generate(["a", "b"], [GREEDY])


def test_a_stream_gives_deltas_that_join_to_what_generate_gives():
    llm = make_llm(overlap=True)
    (whole,) = llm.generate("hello", GREEDY, use_tqdm=False)
    deltas = list(llm.stream("hello", GREEDY))
    assert "".join(d.outputs[0].text for d in deltas) == whole.outputs[0].text
    assert sum((d.outputs[0].token_ids for d in deltas), []) == whole.outputs[0].token_ids
    assert [d.finished for d in deltas] == [False] * 11 + [True]


def test_streams_interleave_with_each_other_and_with_a_batch():
    llm = make_llm()
    first, second = llm.stream("a", GREEDY), llm.stream("bb", GREEDY)
    seen = [next(first), next(second), next(first)]
    assert len(seen) == 3
    (batch,) = llm.generate("ccc", GREEDY, use_tqdm=False)
    assert batch.outputs[0].token_ids == expected_tokens(TOKENIZER.encode("ccc"), 12, VOCAB)
    rest = [d.outputs[0].token_ids for d in second]
    assert sum(rest, seen[1].outputs[0].token_ids) == expected_tokens(TOKENIZER.encode("bb"), 12, VOCAB)
    assert len(list(first)) == 10


def test_threads_take_turns_and_each_gets_its_own(monkeypatch):
    llm = make_llm()
    texts = [f"prompt {i}" for i in range(4)]
    found: dict[str, list[int]] = {}

    def call(text: str) -> None:
        if text.endswith(("0", "1")):
            found[text] = llm.generate(text, GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        else:
            found[text] = [token for part in llm.stream(text, GREEDY) for token in part.outputs[0].token_ids]

    step, switch = llm.engine.step, sys.getswitchinterval()
    together = threading.Barrier(len(texts))
    arrived = threading.local()

    def step_together():
        if not hasattr(arrived, "once"):  # without turns every thread is inside its first call now
            arrived.once = True
            with contextlib.suppress(threading.BrokenBarrierError):
                together.wait(0.2)
        return step()

    monkeypatch.setattr(llm.engine, "step", step_together)
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=call, args=(text,), daemon=True) for text in texts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
    finally:
        sys.setswitchinterval(switch)
    assert not any(thread.is_alive() for thread in threads)
    assert found == {text: expected_tokens(TOKENIZER.encode(text), 12, VOCAB) for text in texts}


def test_closing_a_stream_frees_what_it_held():
    llm = make_llm(overlap=True)
    stream = llm.stream("hello", GREEDY)
    next(stream)
    stream.close()
    llm.engine.settle_in_flight()
    llm.engine.check_idle()


def test_a_bad_stream_raises():
    with pytest.raises(RequestError, match="is empty"):
        next(make_llm().stream([], GREEDY))


def test_score_checks_its_input_and_needs_an_idle_engine():
    llm = make_llm(overlap=True)
    llm.generate("hello", GREEDY, use_tqdm=False)
    scores = llm.score([1, 2, 3])
    assert scores.shape == (3, VOCAB) and scores.dtype == np.float32
    with pytest.raises(RequestError, match="not a token id"):
        llm.score([VOCAB])
    stream = llm.stream("hello", GREEDY)
    next(stream)
    with pytest.raises(RequestError, match="idle"):
        llm.score([1])


def test_progress_with_speed_goes_to_stderr(capsys):
    make_llm().generate(["a", "b", [99_999]], GREEDY)
    shown = capsys.readouterr()
    assert "3/3" in shown.err and "tok/s" in shown.err and shown.out == ""
    make_llm().generate(["a"], GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_an_interrupt_leaves_the_engine_clean():
    def interrupt(plan):
        if plan.starts[0] > 5:
            raise KeyboardInterrupt

    llm = make_llm(before_launch=interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    llm.engine.check_idle()
