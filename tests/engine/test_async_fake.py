"""AsyncLLM around a fake runner: streams, cancellation, shutdown, faults. Nothing waits forever."""

import asyncio
import threading

import pytest

from deepinfer.async_llm import AsyncLLM
from deepinfer.errors import EngineStopped, RequestError
from deepinfer.sampling_params import SamplingParams
from tests.engine.fake_runner import expected_tokens, make_engine

VOCAB = 512
LIMIT_SECONDS = 30


def greedy(tokens, **more):
    return SamplingParams(temperature=0, max_tokens=tokens, **more)


def with_llm(body, **settings):
    """Runs `await body(llm)` under a deadline, shuts down, and checks that nothing is held."""
    llm = AsyncLLM.from_engine(make_engine(vocab_size=VOCAB, **settings))

    async def bounded():
        return await asyncio.wait_for(body(llm), LIMIT_SECONDS)

    try:
        return asyncio.run(bounded())
    finally:
        llm.shutdown(LIMIT_SECONDS)
        assert not llm._thread.is_alive()
        llm.engine.settle_in_flight()
        llm.engine.check_idle()


async def collect(llm, prompt, params, request_id=None, **more):
    return [output async for output in llm.generate(prompt, params, request_id, **more)]


@pytest.mark.parametrize("overlap", [False, True])
def test_concurrent_requests_each_get_their_own_tokens(overlap):
    async def body(llm):
        prompts = [list(range(1, 10 + i)) for i in range(20)]
        found = await asyncio.gather(*(collect(llm, p, greedy(15)) for p in prompts))
        for prompt, outputs in zip(prompts, found, strict=True):
            assert outputs[-1].outputs[0].token_ids == expected_tokens(prompt, 15, VOCAB)
            assert [len(o.outputs[0].token_ids) for o in outputs] == list(range(1, 16))

    with_llm(body, overlap=overlap)


def test_the_three_kinds_of_output_agree():
    async def body(llm):
        prompt, wanted = [1, 2, 3], expected_tokens([1, 2, 3], 8, VOCAB)
        whole = await collect(llm, prompt, greedy(8, logprobs=1), output_kind="cumulative")
        parts = await collect(llm, prompt, greedy(8, logprobs=1), output_kind="delta")
        final = await collect(llm, prompt, greedy(8, logprobs=1), "mine", output_kind="final")
        assert len(final) == 1 and final[0].request_id == "mine"
        assert whole[-1].outputs[0].token_ids == final[0].outputs[0].token_ids == wanted
        assert sum((p.outputs[0].token_ids for p in parts), []) == wanted
        assert whole[-1].outputs[0].logprobs == final[0].outputs[0].logprobs
        assert len(whole[2].outputs[0].logprobs) == 3

    with_llm(body)


def test_a_bad_request_raises_and_others_go_on():
    async def body(llm):
        good = asyncio.ensure_future(collect(llm, [1, 2], greedy(50)))
        with pytest.raises(RequestError, match="prompt_token_ids"):
            await collect(llm, [VOCAB], greedy(5))
        with pytest.raises(RequestError, match="output_kind"):
            await collect(llm, [1], greedy(5), output_kind="all")
        assert len((await good)[-1].outputs[0].token_ids) == 50

    with_llm(body)


def test_cancelling_the_task_aborts_the_request_and_its_id_is_free_at_once():
    async def body(llm):
        task = asyncio.ensure_future(collect(llm, [1, 2], SamplingParams(max_tokens=None), "mine"))
        while not llm.engine.requests:
            await asyncio.sleep(0)
        with pytest.raises(RequestError, match="in use"):
            await collect(llm, [1], greedy(1), "mine")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        outputs = await collect(llm, [3, 4], greedy(6), "mine")
        assert outputs[-1].outputs[0].token_ids == expected_tokens([3, 4], 6, VOCAB)

    with_llm(body)


def test_leaving_the_loop_early_aborts_the_request():
    async def body(llm):
        outputs = llm.generate([1, 2], SamplingParams(max_tokens=None))
        async for _ in outputs:
            break
        await outputs.aclose()
        while llm.engine.requests:
            await asyncio.sleep(0)
        assert llm.engine.generated_tokens < 50_000, "it ran to its end"

    with_llm(body, max_model_len=100_000, num_blocks=800, check=False, choose="fast")


def test_abort_by_id_ends_the_stream_with_that_reason():
    async def body(llm):
        last = None
        async for output in llm.generate([1, 2], SamplingParams(max_tokens=None), "mine"):
            last = output
            await llm.abort("mine")
        assert last.finished and last.outputs[0].finish_reason == "abort"
        await llm.abort("unknown")

    with_llm(body, max_model_len=100_000, num_blocks=800, check=False, choose="fast")


def test_shutdown_ends_open_streams_and_refuses_new_ones():
    async def body(llm):
        task = asyncio.ensure_future(collect(llm, [1, 2], SamplingParams(max_tokens=None)))
        while not llm.engine.requests:
            await asyncio.sleep(0)
        llm.shutdown()
        with pytest.raises(EngineStopped, match="shut down"):
            await task
        with pytest.raises(EngineStopped, match="has stopped"):
            await collect(llm, [1], greedy(1))
        llm.shutdown()

    with_llm(body, max_model_len=100_000, num_blocks=800, check=False, choose="fast")


def test_a_fault_of_the_engine_itself_reaches_every_stream():
    llm = AsyncLLM.from_engine(make_engine(vocab_size=VOCAB))

    def broken():
        raise ZeroDivisionError("a bug")

    llm.engine.step = broken

    async def body():
        found = await asyncio.gather(*(collect(llm, [1], greedy(5)) for _ in range(3)), return_exceptions=True)
        assert all(isinstance(error, EngineStopped) and "a bug" in str(error) for error in found)
        assert any(isinstance(error.__cause__, ZeroDivisionError) for error in found)

    asyncio.run(asyncio.wait_for(body(), LIMIT_SECONDS))
    llm._thread.join(LIMIT_SECONDS)
    assert not llm._thread.is_alive()


def test_a_runner_fault_is_the_requests_error_and_the_engine_lives_on():
    calls = []

    def break_once(_):
        calls.append(1)
        if len(calls) == 2:
            raise OSError("device lost")

    async def body(llm):
        outputs = await collect(llm, [1], greedy(5))
        assert outputs[-1].finished and "device lost" in outputs[-1].error
        assert (await collect(llm, [1], greedy(5)))[-1].error is None

    with_llm(body, before_launch=break_once)


def test_an_idle_engine_sleeps_and_wakes_for_the_next_request():
    async def body(llm):
        await collect(llm, [1], greedy(3))
        launches = len(llm.engine.runner.launches)
        await asyncio.sleep(0.02)
        assert len(llm.engine.runner.launches) == launches
        assert (await collect(llm, [1], greedy(3)))[-1].finished

    with_llm(body)


def test_requests_from_two_event_loops_share_one_engine():
    llm = AsyncLLM.from_engine(make_engine(vocab_size=VOCAB))
    found = {}

    def run(i):
        found[i] = asyncio.run(asyncio.wait_for(collect(llm, [1, i], greedy(20)), LIMIT_SECONDS))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_SECONDS)
    llm.shutdown()
    for i in range(2):
        assert found[i][-1].outputs[0].token_ids == expected_tokens([1, i], 20, VOCAB)
