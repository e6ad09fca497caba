"""The step loop around a fake runner: both variants, stops, choices, log-probabilities, faults that stay in place."""

import time

import numpy as np
import pytest
from deepinfer_hal.philox import choice_seed, signed_seed

from deepinfer.errors import ConfigError, RequestError
from deepinfer.sampling_params import SamplingParams
from tests.engine.fake_runner import expected_tokens, make_engine, run_all
from tests.engine.toy_tokenizer import byte_ids, make_tokenizer

TOKENIZER = make_tokenizer()
VOCAB = TOKENIZER.vocab_size
BOTH = pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])


def greedy(tokens, **more):
    return SamplingParams(temperature=0, max_tokens=tokens, **more)


def scripted(text, end=1):
    """A model that says `text`, one byte a token, after any prompt of one token; then `end`."""
    script = [*byte_ids(text), end]
    return lambda past, seed: script[min(len(past) - 1, len(script) - 1)]


def say(text, params, overlap=False, end=1):
    engine = make_engine(TOKENIZER, overlap=overlap, vocab_size=VOCAB, choose=scripted(text, end))
    engine.add_request("r", [5], params)
    return run_all(engine)["r"].outputs[0]


@BOTH
def test_both_variants_give_each_sequence_its_own_tokens(overlap):
    engine = make_engine(overlap=overlap, vocab_size=512)
    prompts = [list(range(1, 40 + 7 * i)) for i in range(20)]
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, greedy(40 + i))
    outputs = run_all(engine)
    for i, prompt in enumerate(prompts):
        assert outputs[str(i)].outputs[0].token_ids == expected_tokens(prompt, 40 + i, 512)
        assert outputs[str(i)].outputs[0].finish_reason == "length"


def test_overlap_launches_the_next_step_before_the_last_is_settled():
    events = []
    engine = make_engine(
        overlap=True,
        before_launch=lambda plan: events.append("launch"),
        before_settle=lambda handle: events.append("settle"),
    )
    engine.add_request("a", [1, 2, 3], greedy(4))
    run_all(engine)
    assert events == ["launch", "launch", "settle", "launch", "settle", "launch", "settle", "settle"]


@BOTH
def test_an_end_token_ends_a_sequence_and_its_extra_token_is_dropped(overlap):
    out = say("abc", greedy(50), overlap)
    assert (out.text, out.token_ids, out.finish_reason, out.stop_reason) == ("abc", [*byte_ids("abc"), 1], "stop", None)


@BOTH
def test_ignore_eos_runs_to_the_length_but_own_stop_ids_still_count(overlap):
    out = say("abc", greedy(10, ignore_eos=True), overlap)
    assert (len(out.token_ids), out.finish_reason, out.text) == (10, "length", "abc")
    out = say("abc", greedy(10, ignore_eos=True, stop_token_ids=byte_ids("b")), overlap)
    assert (out.text, out.finish_reason, out.stop_reason) == ("a", "stop", byte_ids("b")[0])


@BOTH
def test_stop_strings_cut_the_text(overlap):
    out = say("one STOP two", greedy(50, stop=["STOP", "two"]), overlap)
    assert (out.text, out.finish_reason, out.stop_reason) == ("one ", "stop", "STOP")
    assert out.token_ids == byte_ids("one STOP")
    assert say("one STOP", greedy(50, stop="STOP", include_stop_str_in_output=True), overlap).text == "one STOP"
    assert say("one STO", greedy(50, stop="STOP"), overlap).text == "one STO", "held text is shown at the end"


def test_a_stop_token_shows_only_when_asked():
    params = {"stop_token_ids": byte_ids("c")}
    assert say("abcd", greedy(50, **params)).text == "ab"
    assert say("abcd", greedy(50, include_stop_str_in_output=True, **params)).text == "abc"


def test_min_tokens_keeps_every_stop_from_ending_early():
    out = say("aXbXcX", greedy(50, stop="X", min_tokens=3))
    assert (out.text, len(out.token_ids)) == ("aXb", 4)
    assert len(say("aXbXcX", greedy(50, stop="X", min_tokens=4)).token_ids) == 4
    out = say("abcdef", greedy(50, stop_token_ids=byte_ids("a") + byte_ids("d"), min_tokens=3))
    assert (out.text, out.stop_reason) == ("abc", byte_ids("d")[0])


@BOTH
def test_streamed_pieces_join_to_the_final_text(overlap):
    text = "né 漢字 🙂 ST 👩🏽 STOP rest"
    engine = make_engine(TOKENIZER, overlap=overlap, vocab_size=VOCAB, choose=scripted(text))
    engine.add_request("r", [5], greedy(200, stop="STOP"), stream=True)
    shown, ids, steps = "", [], 0
    while engine.has_unfinished:
        for output in engine.step():
            piece = output.outputs[0].text
            assert "\ufffd" not in piece and "STO" not in shown + piece
            shown, ids, steps = shown + piece, ids + output.outputs[0].token_ids, steps + 1
    assert shown == text.split("STOP")[0]
    assert ids == byte_ids(text[: text.index("STOP") + 4])
    assert steps == len(ids), "one delta a token"


def test_choices_have_their_own_seeds_and_share_the_prompt():
    engine = make_engine(vocab_size=512)
    engine.add_request("r", [1, 2, 3], SamplingParams(n=4, seed=9, max_tokens=20))
    outputs = run_all(engine)["r"].outputs
    assert [o.index for o in outputs] == [0, 1, 2, 3]
    for i, out in enumerate(outputs):
        assert out.token_ids == expected_tokens([1, 2, 3], 20, 512, signed_seed(choice_seed(9, i)))
    assert len({tuple(o.token_ids) for o in outputs}) == 4


def test_unseeded_requests_differ_and_a_new_engine_repeats_them():
    def run(seed):
        engine = make_engine(vocab_size=512, seed=seed)
        for name in "ab":
            engine.add_request(name, [1, 2, 3], SamplingParams(max_tokens=10))
        outputs = run_all(engine)
        return [outputs[name].outputs[0].token_ids for name in "ab"]

    first = run(0)
    assert first[0] != first[1]
    assert run(0) == first
    assert run(1) != first


@BOTH
def test_logprobs_come_with_the_chosen_token_first(overlap):
    engine = make_engine(TOKENIZER, overlap=overlap, vocab_size=VOCAB, choose=scripted("hi"))
    engine.add_request("r", [5], greedy(9, logprobs=2))
    engine.add_request("plain", [5], greedy(9))
    outputs = run_all(engine)
    out = outputs["r"].outputs[0]
    assert outputs["plain"].outputs[0].logprobs is None
    wanted = [[token] + [i for i in (0, 1) if i != token] for token in out.token_ids]
    assert [list(entry) for entry in out.logprobs] == wanted
    first = out.logprobs[0][out.token_ids[0]]
    assert (first.decoded_token, first.rank, first.logprob) == ("h", byte_ids("h")[0] + 1, -(1.0 + byte_ids("h")[0]))
    assert out.cumulative_logprob == sum(-(1.0 + token) for token in out.token_ids)


@BOTH
def test_prompt_logprobs_cover_the_prompt_once_whatever_the_chunks_and_preemptions(overlap):
    engine = make_engine(overlap=overlap, vocab_size=512, max_num_batched_tokens=64, num_blocks=3, max_model_len=384)
    prompts = {str(i): [(5 * j + i) % 512 for j in range(100 + 40 * i)] for i in range(3)}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, greedy(120, prompt_logprobs=1, n=2 if name == "0" else 1))
    outputs = run_all(engine)
    assert sum(out.metrics.preemptions for out in outputs.values()) > 0
    for name, prompt in prompts.items():
        found = outputs[name].prompt_logprobs
        assert found[0] is None and len(found) == len(prompt)
        assert [next(iter(entry)) for entry in found[1:]] == prompt[1:]


@BOTH
def test_a_nan_row_fails_its_request_alone(overlap):
    engine = make_engine(overlap=overlap, flag=lambda s, position: s.request.id == "bad" and position == 6)
    for name in ("good", "bad", "fine"):
        engine.add_request(name, [1, 2, 3], greedy(10))
    outputs = run_all(engine)
    assert outputs["bad"].outputs[0].finish_reason == "error" and "NaN" in outputs["bad"].error
    assert len(outputs["bad"].outputs[0].token_ids) == 3
    for name in ("good", "fine"):
        assert outputs[name].outputs[0].token_ids == expected_tokens([1, 2, 3], 10, 64) and outputs[name].error is None


@BOTH
@pytest.mark.parametrize("where", ["before_launch", "before_settle"])
def test_a_runner_fault_is_reported_to_the_requests_of_that_step_and_others_go_on(overlap, where):
    calls = []

    def break_once(_):
        calls.append(1)
        if len(calls) == 4:
            raise OSError("device lost")

    engine = make_engine(overlap=overlap, num_slots=2, **{where: break_once})
    for i in range(5):
        engine.add_request(str(i), [1, 2, i], greedy(10))
    outputs = run_all(engine)
    failed = [name for name, out in outputs.items() if out.error]
    assert failed == ["0", "1"]
    assert all("OSError: device lost" in outputs[name].error for name in failed)
    assert all(outputs[n].outputs[0].token_ids == expected_tokens([1, 2, int(n)], 10, 64) for n in ("2", "3", "4"))


def test_a_runner_that_always_fails_ends_everything():
    def broken(_):
        raise ValueError("no")

    engine = make_engine(before_launch=broken, num_slots=2)
    for i in range(9):
        engine.add_request(str(i), [1], greedy(10))
    assert all("ValueError: no" in out.error for out in run_all(engine, limit=50).values())


def test_a_state_in_which_nothing_can_run_is_an_error_and_no_hang():
    engine = make_engine(num_blocks=2, max_model_len=256)
    engine.scheduler.blocks.allocate(2)
    engine.add_request("r", [1], greedy(10))
    (output,) = engine.step()
    assert "fault of the engine" in output.error and not engine.requests


BAD_REQUESTS = {
    "empty prompt": ([], SamplingParams(), "prompt"),
    "no prompt": (None, SamplingParams(), "prompt"),
    "id past the vocabulary": ([1, 64], SamplingParams(), "prompt_token_ids"),
    "negative id": ([-1], SamplingParams(), "prompt_token_ids"),
    "id that is no number": (["a"], SamplingParams(), "prompt_token_ids"),
    "float array": (np.zeros(3), SamplingParams(), "prompt_token_ids"),
    "too long": ([1] * 2048, SamplingParams(), "prompt"),
    "text without a tokenizer": ("hello", SamplingParams(), "prompt"),
    "stop string without a tokenizer": ([1], SamplingParams(stop="a"), "stop"),
    "images": ({"prompt": "x", "multi_modal_data": {"image": b""}}, SamplingParams(), "multi_modal_data"),
    "unknown key": ({"text": "x"}, SamplingParams(), "prompt"),
    "stop id past the vocabulary": ([1], SamplingParams(stop_token_ids=[64]), "stop_token_ids"),
    "bias past the vocabulary": ([1], SamplingParams(logit_bias={64: 1}), "logit_bias"),
    "parameters of another kind": ([1], {"n": 1}, "sampling_params"),
    "an id in use": ([1], SamplingParams(), "request_id"),
}


@pytest.mark.parametrize("what", BAD_REQUESTS)
def test_a_bad_request_is_refused_by_name_and_leaves_nothing_behind(what):
    prompt, params, name = BAD_REQUESTS[what]
    engine = make_engine()
    engine.add_request("used", [1, 2], greedy(5))
    with pytest.raises(RequestError) as caught:
        engine.add_request("used" if what == "an id in use" else "new", prompt, params)
    assert caught.value.param == name
    assert list(run_all(engine)) == ["used"]


def test_a_prompt_may_fill_all_but_one_token():
    engine = make_engine(max_model_len=256)
    engine.add_request("r", [1] * 255, SamplingParams(max_tokens=None, temperature=0))
    out = run_all(engine)["r"].outputs[0]
    assert (len(out.token_ids), out.finish_reason) == (1, "length")


def test_a_tokenizer_larger_than_the_model_is_refused():
    with pytest.raises(ConfigError, match="do not belong together"):
        make_engine(TOKENIZER, vocab_size=64)


@BOTH
def test_planning_and_settling_64_sequences_is_cheap(overlap, capsys):
    engine = make_engine(
        TOKENIZER, overlap=overlap, vocab_size=VOCAB, num_slots=64, num_blocks=320, max_model_len=512, choose="fast",
        check=False, max_num_batched_tokens=8192,
    )  # fmt: skip
    for i in range(64):
        engine.add_request(str(i), [3 + i] * 128, greedy(300, ignore_eos=True, stop=["\x01\x02"]))
    spent, launch = [], engine.runner.launch

    def timed(plan):
        start = time.perf_counter()
        handle = launch(plan)
        spent.append(time.perf_counter() - start)
        return handle

    engine.runner.launch = timed
    engine.step()
    host = []
    for _ in range(150):
        spent.clear()
        start = time.perf_counter()
        engine.step()
        host.append(time.perf_counter() - start - sum(spent))
    with capsys.disabled():
        print(f"\nplan + settle of 64 sequences: median {np.median(host) * 1e3:.3f} ms (overlap={overlap})")
    assert len(engine.requests) == 64
