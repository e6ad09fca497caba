"""The scheduler and its pools: budgets, order, memory pressure, cancellation. The fake runner checks every plan."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.engine.pools import BlockPool
from deepinfer.errors import ConfigError
from deepinfer.sampling_params import SamplingParams
from tests.engine.fake_runner import expected_tokens, make_engine, run_all

VOCAB = 64


def greedy(tokens, **more):
    return SamplingParams(temperature=0, max_tokens=tokens, **more)


def prompt_of(length, salt=0):
    return [(7 * i + salt) % VOCAB for i in range(length)]


def test_prompts_are_cut_to_the_budget_and_decodes_go_first():
    engine = make_engine(max_num_batched_tokens=100)
    engine.add_request("a", prompt_of(250), greedy(5))
    run_all(engine)
    assert [tokens for tokens, _ in engine.runner.launches] == [100, 100, 50, 1, 1, 1, 1]
    assert [sampled for _, sampled in engine.runner.launches] == [0, 0, 1, 1, 1, 1, 1]

    engine = make_engine(max_num_batched_tokens=100)
    engine.add_request("a", prompt_of(90), greedy(5))
    engine.step()
    engine.add_request("b", prompt_of(150, 1), greedy(2))
    run_all(engine)
    assert engine.runner.launches == [(90, 1), (100, 1), (52, 2), (2, 2), (1, 1)]


def test_block_tables_end_with_the_blocks_of_the_tokens_so_far():
    engine, columns = make_engine(max_num_batched_tokens=100), []
    launch = engine.runner.launch

    def watched(plan):
        columns.append(plan.block_tables.shape[1])
        return launch(plan)

    engine.runner.launch = watched
    engine.add_request("a", prompt_of(310), greedy(2))
    run_all(engine)
    assert columns == [1, 2, 3, 3, 3]  # of 128 tokens: a chunk ends at 100, 200, 300 and 310


def test_without_chunking_a_prompt_waits_until_it_fits_whole():
    engine = make_engine(max_num_batched_tokens=256, max_model_len=200, chunked=False)
    engine.add_request("a", prompt_of(150), greedy(3))
    engine.add_request("b", prompt_of(150, 1), greedy(1))
    run_all(engine)
    assert engine.runner.launches == [(150, 1), (151, 2), (1, 1)]


def test_without_chunking_a_budget_below_the_longest_sequence_is_refused():
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        make_engine(max_num_batched_tokens=100, max_model_len=200, chunked=False)


def test_arrival_order_and_priority_decide_who_waits():
    engine = make_engine(num_slots=1)
    for name, priority in (("first", 0), ("late", 5), ("urgent", -1), ("second", 0)):
        engine.add_request(name, prompt_of(10), greedy(2), priority=priority)
    assert list(run_all(engine)) == ["urgent", "first", "second", "late"]


def test_many_sequences_share_a_tight_pool_and_all_finish_right():
    engine = make_engine(num_blocks=6, num_slots=8, max_model_len=700)
    wanted = {}
    for i in range(24):
        prompt, count = prompt_of(60 + 9 * i, i), 150 + 5 * i
        engine.add_request(str(i), prompt, greedy(count))
        wanted[str(i)] = expected_tokens(prompt, count, VOCAB)
    outputs = run_all(engine)
    assert {name: out.outputs[0].token_ids for name, out in outputs.items()} == wanted
    assert sum(out.metrics.preemptions for out in outputs.values()) > 0, "the pool was not tight"


def test_the_oldest_sequence_is_never_preempted():
    engine = make_engine(num_blocks=4, num_slots=4, max_model_len=512, max_num_batched_tokens=512)
    for i in range(4):
        engine.add_request(str(i), prompt_of(100, i), greedy(380))
    outputs = run_all(engine)
    assert outputs["0"].metrics.preemptions == 0
    assert list(outputs)[0] == "0"
    assert max(out.metrics.preemptions for out in outputs.values()) >= 1


def test_pressure_does_not_make_sequences_come_and_go_without_progress():
    engine = make_engine(num_blocks=8, num_slots=64, max_model_len=1024)
    for i in range(120):
        engine.add_request(str(i), prompt_of(120, i), greedy(60))
    outputs = run_all(engine)
    assert len(outputs) == 120
    tokens = sum(tokens for tokens, _ in engine.runner.launches)
    assert tokens < 2 * 120 * (120 + 60), "more recomputed than computed"


def test_admission_leaves_a_block_for_each_running_sequence_that_will_grow():
    engine = make_engine(num_blocks=3, max_model_len=384)
    engine.add_request("growing", prompt_of(100), greedy(100))
    engine.add_request("waits", prompt_of(200), greedy(1))
    engine.step()
    assert [s.request.id for s in engine.scheduler.running] == ["growing"]
    assert run_all(engine)["growing"].metrics.preemptions == 0

    engine = make_engine(num_blocks=3, max_model_len=384)
    engine.add_request("grown", prompt_of(100), greedy(20))
    engine.add_request("fits", prompt_of(200), greedy(1))
    engine.step()
    assert [s.request.id for s in engine.scheduler.running] == ["grown", "fits"]
    run_all(engine)


def test_cancellation_frees_slots_and_blocks_at_once():
    for overlap in (False, True):
        engine = make_engine(num_blocks=8, num_slots=4, max_model_len=1024, overlap=overlap)
        for i in range(6):
            engine.add_request(str(i), prompt_of(200, i), greedy(100))
        for _ in range(5):
            engine.step()
        for i in range(6):
            assert engine.abort(str(i)).outputs[0].finish_reason == "abort"
        assert engine.scheduler.blocks.available == 8
        assert engine.scheduler.slots.available == 4
        assert engine.abort("0") is None
        run_all(engine)


def test_a_reused_slot_shows_nothing_of_the_sequence_before():
    engine = make_engine(num_blocks=2, num_slots=1, max_model_len=256, overlap=True)
    engine.add_request("a", prompt_of(100), greedy(100))
    for _ in range(20):
        engine.step()
    engine.abort("a")
    engine.add_request("b", prompt_of(130, 3), greedy(50))
    assert run_all(engine)["b"].outputs[0].token_ids == expected_tokens(prompt_of(130, 3), 50, VOCAB)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(1, 200), st.integers(-1, 1), st.integers(0, 9)), max_size=12),
    st.integers(4, 9),
    st.integers(1, 5),
    st.integers(5, 300),
    st.booleans(),
)
def test_any_load_gives_each_request_the_tokens_it_gets_alone(load, blocks, slots, budget, overlap):
    engine = make_engine(
        num_blocks=blocks, num_slots=slots, max_model_len=512, max_num_batched_tokens=budget, overlap=overlap
    )
    cancelled, wanted, outputs = [], {}, {}
    for i, (length, count, priority, fate) in enumerate(load):
        engine.add_request(str(i), prompt_of(length, i), greedy(count), priority=priority)
        if fate == 0:
            cancelled.append(str(i))
        else:
            wanted[str(i)] = expected_tokens(prompt_of(length, i), min(count, 512 - length), VOCAB)
        outputs.update((output.request_id, output) for output in engine.step())
    for name in cancelled:
        engine.abort(name)
    engine.scheduler.check_integrity()
    outputs.update(run_all(engine))
    assert {name: outputs[name].outputs[0].token_ids for name in wanted} == wanted


def test_penalties_bias_and_minimum_reach_the_runner_in_the_ops_form():
    plans = []
    engine = make_engine(end_ids=frozenset({1}), before_launch=plans.append)
    engine.add_request("plain", prompt_of(4), SamplingParams(max_tokens=3, seed=5))
    engine.add_request(
        "full",
        prompt_of(6),
        SamplingParams(
            temperature=0.5, top_k=-1, top_p=0.9, min_p=0.1, presence_penalty=1, frequency_penalty=0.5, max_tokens=3,
            repetition_penalty=1.5, logit_bias={9: 2.0, 8: -1.0}, stop_token_ids=[7], min_tokens=1, logprobs=3, seed=-2,
        ),
    )  # fmt: skip
    run_all(engine)
    batch = plans[0].sampling
    assert batch.temperature.tolist() == [1.0, 0.5] and batch.temperature.dtype == np.float32
    assert batch.top_k.tolist() == [0, 0] and batch.top_k.dtype == np.int32
    assert batch.seeds.tolist() == [5, -2] and batch.seeds.dtype == np.int64
    assert batch.repetition.tolist() == [1.0, 1.5]
    assert (batch.presence.tolist(), batch.frequency.tolist()) == ([0.0, 1.0], [0.0, 0.5])
    assert (batch.prompt_len.tolist(), batch.length.tolist()) == ([4, 6], [4, 6])
    assert batch.needs_mask and batch.num_logprobs == 3
    assert batch.bias_offsets.tolist() == [0, 0, 4] and batch.bias_offsets.dtype == np.int32
    assert batch.bias_ids.tolist() == [9, 8, 1, 7]
    assert batch.bias_values.tolist() == [2.0, -1.0, -np.inf, -np.inf]
    later = plans[1].sampling
    assert later.bias_ids.tolist() == [9, 8], "the minimum is reached"
    assert (later.prompt_len.tolist(), later.length.tolist()) == ([4, 6], [5, 7])


def test_pools_refuse_double_frees_and_notice_losses():
    pool = BlockPool(4)
    ids = pool.allocate(3)
    with pytest.raises(RuntimeError, match="2 blocks asked of 1"):
        pool.allocate(2)
    pool.free(ids[:1])
    with pytest.raises(RuntimeError, match="freed twice"):
        pool.free(ids[:1])
    pool.check([ids[1:]])
    with pytest.raises(RuntimeError, match="accounted"):
        pool.check([ids[2:]])
    assert (pool.blocks_for(0), pool.blocks_for(128), pool.blocks_for(129)) == (0, 1, 2)
