"""Philox4x32-10 against the published vectors, and the noise built on it."""

import numpy as np
import pytest
import torch
from deepinfer_hal import philox

# Random123's kat_vectors, philox4x32 with 10 rounds: counter, key, output.
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def philox_with_python_ints(counter, key):
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ k[1], p0 & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return tuple(c)


@pytest.mark.parametrize("counter, key, expected", VECTORS)
def test_published_vectors_hold_in_torch_and_numpy(counter, key, expected):
    with_torch = philox.philox4x32(*(torch.tensor([w]) for w in (*counter, *key)))
    with_numpy = philox.philox4x32(*(np.array([w], dtype=np.int64) for w in (*counter, *key)))
    assert tuple(int(w[0]) for w in with_torch) == expected
    assert tuple(int(w[0]) for w in with_numpy) == expected


def test_random_words_agree_with_unbounded_integers():
    words = np.random.default_rng(5).integers(0, 2**32, size=(200, 6))
    got = np.stack(philox.philox4x32(*words.T.copy()), axis=1)
    expected = [philox_with_python_ints(row[:4].tolist(), row[4:].tolist()) for row in words]
    assert got.tolist() == [list(row) for row in expected]


def test_noise_of_a_token_uses_its_own_counter_and_word():
    seed, position, purpose, vocab = -0x123456789ABCDEF, 77, 2, 11
    noise = philox.gumbel_noise(torch.tensor([seed]), torch.tensor([position], dtype=torch.int32), purpose, vocab)[0]
    bits = seed & (2**64 - 1)
    for token in range(vocab):
        block = philox_with_python_ints((position, purpose, token // 4, 0), (bits & 0xFFFFFFFF, bits >> 32))
        u = ((block[token % 4] >> 8) + 0.5) * 2.0**-24
        assert float(noise[token]) == pytest.approx(-np.log(-np.log(u)), rel=1e-5, abs=1e-6)
        ids = torch.tensor([token])
        got = philox.uniform_at(torch.tensor([seed]), torch.tensor([position]), purpose, ids)
        assert float(got) == pytest.approx(u, rel=1e-6)


def test_gumbel_is_finite_and_right_at_the_ends():
    words = torch.tensor([0, 1 << 8, 0x7FFFFFFF, 0x80000000, 0xFFFFFEFF, 0xFFFFFFFF])
    noise = philox.gumbel(words).double()
    exact = -torch.log(-torch.log(_exact_u(words)))
    assert torch.isfinite(noise).all()
    assert (noise - exact).abs().max() < 2e-6


def test_gumbel_has_the_right_mean_and_spread():
    seeds = torch.arange(50)
    noise = philox.gumbel_noise(seeds, torch.full((50,), 3), 0, 4096).double()
    assert abs(float(noise.mean()) - 0.57721566) < 0.01
    assert abs(float(noise.var()) - np.pi**2 / 6) < 0.02


def test_choice_seeds_are_distinct_and_stable():
    seeds = [philox.choice_seed(7, i) for i in range(100)]
    assert len(set(seeds)) == 100
    assert all(0 <= s < 2**64 for s in seeds)
    assert philox.choice_seed(7, 3) == philox.choice_seed(7 + 2**64, 3)
    assert philox.choice_seed(0, 0) == int.from_bytes(
        bytes.fromhex("374708fff7719dd5979ec875d56cd228"[:16]), "little"
    )


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, 2**63, 2**64 - 1])
def test_signed_seed_keeps_the_bits(seed):
    assert philox.signed_seed(seed) & (2**64 - 1) == seed
    assert -(2**63) <= philox.signed_seed(seed) < 2**63


def _exact_u(words):
    return ((words >> 8).double() + 0.5) * 2.0**-24
