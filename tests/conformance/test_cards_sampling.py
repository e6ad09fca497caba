"""The sampling and draft-head cards against small independent formulations, and their edges."""

import itertools

import numpy as np
import pytest
import torch
from deepinfer_hal import philox
from deepinfer_hal.card import get_card
from deepinfer_hal.checks import check_call
from deepinfer_hal.errors import BadCall
from deepinfer_hal.weights import prepare_canonical
from harness import case_id, cases_of, run_case

NAMES = [
    "mask_logits",
    "sample",
    "top_logprobs",
    "verify_drafts",
    "nan_row_flags",
    "markov_logits",
    "confidence_head",
    "plan_verify_lengths",
]
INF = float("inf")


@pytest.mark.parametrize("card, case", cases_of(*NAMES), ids=case_id)
def test_case_matches_the_float64_run(card, case):
    run_case(card, case)


def draw(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seeds=None, positions=None, purpose=0):
    logits = torch.as_tensor(logits, dtype=torch.float32)
    rows = logits.shape[0]

    def full(value, dtype):
        return torch.as_tensor(value, dtype=dtype).expand(rows).contiguous()

    tokens = torch.full((rows,), -7, dtype=torch.int32)
    get_card("sample").reference(
        logits,
        full(temperature, torch.float32),
        full(top_k, torch.int32),
        full(top_p, torch.float32),
        full(min_p, torch.float32),
        full(0 if seeds is None else seeds, torch.int64),
        full(0 if positions is None else positions, torch.int32),
        purpose,
        tokens,
    )
    return tokens.numpy()


def survivors(logits, **settings):
    """Ids that ever come out over many positions."""
    many = torch.as_tensor(logits, dtype=torch.float32).expand(4000, -1)
    return set(draw(many, positions=torch.arange(4000), **settings).tolist())


def test_sampling_follows_the_softmax():
    rng = np.random.default_rng(1)
    logits = torch.tensor(rng.normal(size=32) * 1.5, dtype=torch.float32)
    draws, temperature = 40000, 0.8
    tokens = draw(logits.expand(draws, -1), temperature=temperature, seeds=42, positions=torch.arange(draws))
    expected = torch.softmax(logits.double() / temperature, -1).numpy() * draws
    counts = np.bincount(tokens, minlength=32)
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 61.1, "31 degrees of freedom, one in a thousand"


def test_seeds_and_purposes_give_independent_draws_and_the_same_one_repeats():
    logits = torch.zeros(2000, 1024)
    positions = torch.arange(2000)
    first = draw(logits, seeds=1, positions=positions)
    assert (first == draw(logits, seeds=1, positions=positions)).all()
    assert (first == draw(logits, seeds=2, positions=positions)).mean() < 0.02
    assert (first == draw(logits, seeds=1, positions=positions, purpose=1)).mean() < 0.02


def test_a_draw_does_not_depend_on_its_neighbours():
    logits = torch.randn(20, 300, generator=torch.Generator().manual_seed(2))
    settings = {"temperature": torch.linspace(0, 2, 20), "top_p": torch.linspace(0.1, 1, 20), "seeds": torch.arange(20)}
    whole = draw(logits, **settings)
    alone = [draw(logits[i : i + 1], **{k: v[i : i + 1] for k, v in settings.items()})[0] for i in range(20)]
    assert whole.tolist() == alone


def test_gumbel_max_is_the_published_formula():
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(3))
    seeds, positions = torch.arange(5) - 2, torch.arange(5) * 100
    noise = philox.gumbel_noise(seeds, positions, 0, 40)
    assert draw(logits, seeds=seeds, positions=positions).tolist() == (logits + noise).argmax(-1).tolist()


def test_greedy_takes_the_lowest_of_equal_ids():
    assert draw([[0.0, 2.0, 2.0, -INF], [5.0, 5.0, 5.0, 5.0]], temperature=0.0).tolist() == [1, 0]


def test_top_k_keeps_exactly_k_and_prefers_lower_ids_among_equals():
    logits = [[1.0, 3.0, 1.0, 1.0, 3.0]]
    assert survivors(logits, top_k=1) == {1}
    assert survivors(logits, top_k=2) == {1, 4}
    assert survivors(logits, top_k=3) == {0, 1, 4}
    assert survivors(logits, top_k=4) == {0, 1, 2, 4}
    for off in (0, -1, 5, 99):
        assert survivors(logits, top_k=off) == {0, 1, 2, 3, 4}


def test_top_p_keeps_the_token_that_crosses_the_mass():
    logits = np.log(np.array([[0.25, 0.5, 0.125, 0.125]]))
    assert survivors(logits, top_p=1e-9) == survivors(logits, top_p=0.0) == {1}
    assert survivors(logits, top_p=0.49) == {1}
    assert survivors(logits, top_p=0.51) == {0, 1}
    assert survivors(logits, top_p=0.80) == {0, 1, 2}
    assert survivors(logits, top_p=1.0) == {0, 1, 2, 3}


def test_top_p_counts_mass_within_what_top_k_left():
    logits = np.log(np.array([[0.4, 0.3, 0.2, 0.1]]))
    assert survivors(logits, top_k=2, top_p=0.56) == {0}
    assert survivors(logits, top_p=0.56) == {0, 1}


def test_min_p_is_relative_to_the_best():
    logits = np.log(np.array([[0.5, 0.3, 0.15, 0.05]]))
    assert survivors(logits, min_p=0.5) == {0, 1}
    assert survivors(logits, min_p=0.2) == {0, 1, 2}
    assert survivors(logits, min_p=1.0) == {0}


def test_banned_tokens_never_come_out():
    logits = torch.zeros(500, 64)
    logits[:, ::2] = -INF
    for settings in ({}, {"top_k": 40}, {"top_p": 0.99}, {"min_p": 0.5}, {"temperature": 50.0}):
        assert (draw(logits, positions=torch.arange(500), **settings) % 2 == 1).all()


def test_unusable_rows_give_minus_one_and_leave_others_alone():
    logits = torch.zeros(5, 8)
    logits[:, 3] = 9.0
    logits[1] = -INF
    logits[2, 5] = float("nan")
    logits[4, 0] = INF
    for temperature in (0.0, 0.01):
        assert draw(logits, temperature=temperature, top_k=2, top_p=0.9, min_p=0.1).tolist() == [3, -1, -1, 3, -1]


def test_top_logprobs_match_a_sorted_softmax():
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(4)).mul(4).round().div(4)
    logits[0, :10] = -INF
    chosen = torch.tensor([20, 0, 49, 7, -1, 3], dtype=torch.int32)
    logprob, rank = torch.empty(6), torch.empty(6, dtype=torch.int32)
    ids, values = torch.empty(6, 9, dtype=torch.int32), torch.empty(6, 9)
    get_card("top_logprobs").reference(logits, chosen, logprob, rank, ids, values)
    for row in range(6):
        x = logits[row].double().numpy()
        table = x - np.log(np.exp(x).sum())
        order = sorted(range(50), key=lambda i: (-x[i], i))
        assert ids[row].tolist() == order[:9]
        np.testing.assert_allclose(values[row], table[order[:9]], atol=1e-5)
        if chosen[row] < 0:
            assert rank[row] == 0 and logprob[row].isnan()
        else:
            assert rank[row] == order.index(int(chosen[row])) + 1
            assert float(logprob[row]) == pytest.approx(table[int(chosen[row])], abs=1e-5)


def test_top_logprobs_orders_logits_that_differ_though_their_log_probabilities_are_equal():
    logits = torch.tensor([[0.0, 1e-9, 0.0, -1e-9], [-INF, 2.0, -INF, 3.0], [1.0, INF, 0.0, 0.0]])
    chosen = torch.tensor([2, 0, 1], dtype=torch.int32)
    logprob, rank = torch.empty(3), torch.empty(3, dtype=torch.int32)
    ids, values = torch.empty(3, 4, dtype=torch.int32), torch.empty(3, 4)
    get_card("top_logprobs").reference(logits, chosen, logprob, rank, ids, values)
    assert values[0].unique().numel() == 1
    assert ids.tolist() == [[1, 0, 2, 3], [3, 1, 0, 2], [0, 1, 2, 3]]
    assert rank.tolist() == [3, 3, 1]
    assert logprob[1] == -INF and logprob[2].isnan() and bool((values[2] == -INF).all())


def mask_with_loops(history, slots, prompt_len, length, rep, pres, freq, offsets, ids, values, allowed, logits):
    result = logits.clone()
    for s in range(logits.shape[0]):
        row = result[s]
        past = history[int(slots[s]), : int(length[s])].tolist()
        output = past[int(prompt_len[s]) :]
        for token in set(past):
            row[token] = row[token] / rep[s] if row[token] > 0 else row[token] * rep[s]
        for token in set(output):
            row[token] -= freq[s] * output.count(token)
            row[token] -= pres[s]
        for at in range(int(offsets[s]), int(offsets[s + 1])):
            row[int(ids[at])] += values[at]
        for token in range(row.shape[0]):
            if allowed is not None and not (int(allowed[s, token // 32]) >> (token % 32)) & 1:
                row[token] = -INF
    return result


@pytest.mark.parametrize("mode", ["off", "penalties", "all"])
def test_mask_logits_matches_loops(mode):
    card = get_card("mask_logits")
    case = next(c for c in card.enumerate_cases() if c.params["S"] == 3 and c.params["mode"] == mode)
    args = card.generate(case, 9, "cpu", prepare_canonical)
    expected = mask_with_loops(*args.values())
    card.reference(**args)
    torch.testing.assert_close(args["logits"], expected, rtol=1e-5, atol=1e-5)


def test_mask_logits_skips_ids_outside_the_vocabulary_and_empty_slots():
    logits = torch.ones(2, 4)
    history = torch.tensor([[-1, 9, 2, 2]], dtype=torch.int32)
    one, i32 = torch.ones(2), torch.int32
    get_card("mask_logits").reference(
        history,
        torch.tensor([0, -1], dtype=i32),
        torch.tensor([0, 0], dtype=i32),
        torch.tensor([4, 4], dtype=i32),
        one * 2,
        one * 0,
        one * 0.25,
        torch.tensor([0, 2, 2], dtype=i32),
        torch.tensor([7, -1], dtype=i32),
        torch.tensor([5.0, 5.0]),
        None,
        logits,
    )
    assert logits.tolist() == [[1, 1, 0, 1], [1, 1, 1, 1]]


def verify(target, drafts, counts, rule="coupled", p=None, q=None, seeds=None, positions=None):
    target, drafts = torch.tensor(target, dtype=torch.int32), torch.tensor(drafts, dtype=torch.int32)
    rows = target.shape[0]
    accepted, tokens = torch.empty(rows, dtype=torch.int32), torch.empty_like(target)
    seeds = torch.zeros(rows, dtype=torch.int64) if seeds is None else seeds
    positions = torch.zeros(rows, dtype=torch.int32) if positions is None else positions
    counts = torch.tensor(counts, dtype=torch.int32)
    get_card("verify_drafts").reference(target, drafts, counts, p, q, seeds, positions, rule, accepted, tokens)
    return accepted.tolist(), tokens.tolist()


def test_coupled_verification_accepts_the_longest_matching_prefix():
    accepted, tokens = verify(
        [[4, 5, 6, 7], [4, 5, 6, 7], [4, 5, 6, 7], [4, 5, 6, 7], [-1, 5, 6, 7]],
        [[4, 5, 6], [4, 9, 6], [4, 5, 6], [9, 5, 6], [-1, 5, 6]],
        [3, 3, 1, 3, 3],
    )
    assert accepted == [3, 1, 1, 0, 0]
    assert tokens == [[4, 5, 6, 7], [4, 5, -1, -1], [4, 5, -1, -1], [4, -1, -1, -1], [-1, -1, -1, -1]]


def test_rejection_sampling_keeps_the_target_distribution():
    rows, vocab = 30000, 8
    gen = torch.Generator().manual_seed(6)
    p, q = (torch.randn(vocab, generator=gen) for _ in range(2))
    seeds, positions = torch.full((rows,), 11), torch.arange(rows, dtype=torch.int32)
    drafts = draw(q.expand(rows, -1), seeds=11, positions=positions)
    target = np.stack([draw(p.expand(rows, -1), seeds=99, positions=positions)] * 2, axis=1)
    logits = p.expand(rows, 2, vocab), q.expand(rows, 1, vocab)
    accepted, tokens = verify(target, drafts[:, None], [1] * rows, "rejection", *logits, seeds, positions)
    expected = torch.softmax(p.double(), -1).numpy() * rows
    counts = np.bincount(np.array(tokens)[:, 0], minlength=vocab)
    assert float(((counts - expected) ** 2 / expected).sum()) < 24.3, "7 degrees of freedom, one in a thousand"
    overlap = float(torch.minimum(p.softmax(-1), q.softmax(-1)).sum())
    assert np.mean(accepted) == pytest.approx(overlap, abs=0.01)


def test_rejection_with_equal_distributions_accepts_everything():
    logits = torch.randn(1, 1, 64, generator=torch.Generator().manual_seed(8))
    both = logits.expand(500, 3, 64), logits.expand(500, 2, 64)
    drafts = [[3, 4]] * 500
    seeds = torch.arange(500)
    accepted, tokens = verify([[1, 2, 5]] * 500, drafts, [2] * 500, "rejection", *both, seeds)
    assert accepted == [2] * 500 and tokens[0] == [3, 4, 5]


def test_rejection_without_logits_is_a_bad_call():
    card = get_card("verify_drafts")
    case = next(c for c in card.enumerate_cases() if c.params["rule"] == "coupled")
    args = card.generate(case, 0, "cpu", prepare_canonical)
    with pytest.raises(BadCall, match="target_logits"):
        check_call(card, {**args, "rule": "rejection"})
    with pytest.raises(BadCall, match="coupled, rejection"):
        check_call(card, {**args, "rule": "typical"})


def plan(confidence, cost, base_rows):
    confidence = torch.tensor(confidence, dtype=torch.float32)
    lengths = torch.empty(confidence.shape[0], dtype=torch.int32)
    get_card("plan_verify_lengths").reference(confidence, torch.tensor(cost), base_rows, lengths)
    return lengths.tolist()


def test_planned_lengths_are_the_best_of_all_lengths():
    rng = np.random.default_rng(7)
    for _ in range(40):
        confidence = rng.uniform(0, 1, size=(3, 3)).astype(np.float32)
        cost = np.cumsum(rng.uniform(0, 1, size=rng.integers(4, 14))).astype(np.float32)

        def rate(lengths, confidence=confidence, cost=cost):
            gain = sum(float(np.cumprod(row)[:n].sum()) for row, n in zip(confidence, lengths, strict=True))
            return (3 + gain) / float(cost[min(3 + sum(lengths), len(cost) - 1)])

        best = max(rate(lengths) for lengths in itertools.product(range(4), repeat=3))
        lengths = plan(confidence, cost, 3)
        assert rate(lengths) == pytest.approx(best, rel=1e-5)
        assert rate(lengths) >= rate((0, 0, 0)) * (1 - 1e-6)


def test_planning_takes_every_draft_when_rows_are_free_and_none_when_they_are_dear():
    assert plan([[0.9, 0.1], [0.5, 1.0]], [1.0] * 8, 2) == [2, 2]
    assert plan([[0.9, 0.9], [0.9, 0.9]], [1.0, 1.0, 1.0, 9.0], 2) == [0, 0]
    assert plan([[float("nan"), 1.0], [1.0, 1.0]], [1.0, 1.0, 1.0, 1.001, 1.002, 9.0], 2) == [0, 2]


def test_nan_rows_are_flagged_alone():
    logits = torch.zeros(5, 6)
    logits[1, 2], logits[2], logits[3, 0], logits[4, 1:] = float("nan"), -INF, INF, -INF
    flags = torch.full((5,), 9, dtype=torch.uint8)
    get_card("nan_row_flags").reference(logits, flags)
    assert flags.tolist() == [0, 1, 1, 1, 0]


def test_markov_term_and_confidence_follow_their_formulas():
    gen = torch.Generator().manual_seed(10)
    args = get_card("markov_logits").generate(
        next(c for c in get_card("markov_logits").enumerate_cases() if c.params["R"] == 3), 1, "cpu", prepare_canonical
    )
    get_card("markov_logits").reference(**args)
    embed, head = args["embed"].dequantise().double(), args["head"].dequantise().double()
    for row, prev in enumerate(args["prev"].tolist()):
        mu = embed[prev] if prev >= 0 else torch.zeros(embed.shape[1], dtype=torch.float64)
        expected = args["base"][row].double() + (head * mu).sum(-1)
        torch.testing.assert_close(args["out"][row].double(), expected, rtol=1e-5, atol=1e-4)
        assert torch.equal(args["mu"][row].double(), mu)
    raw, mu, weight = (torch.randn(*shape, generator=gen) for shape in ((2, 8), (2, 4), (1, 12)))
    raw[1] = 1e4 * weight[0, :8].sign()
    logit, probability = torch.empty(2), torch.empty(2)
    get_card("confidence_head").reference(raw, mu, weight, 2.0, logit, probability)
    expected = (torch.cat([raw, mu], 1) * weight).sum(1)
    torch.testing.assert_close(logit, expected)
    assert float(probability[0]) == pytest.approx(1 / (1 + np.exp(-float(expected[0]) / 2)), abs=1e-6)
    assert probability[1] == torch.sigmoid(torch.tensor(60.0))
