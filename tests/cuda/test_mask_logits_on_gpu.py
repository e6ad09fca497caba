"""mask_logits on a Hopper GPU: refused tokens are -inf, and all other bits stay, those of a NaN too."""

from __future__ import annotations

import pytest
import torch
from deepinfer_cuda import native, native_library
from deepinfer_hal.card import get_card
from deepinfer_hal.conformance.cases import parse_case
from deepinfer_hal.weights import prepare_canonical

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0) or not native_library.LIBRARY.is_file(),
    reason="needs a GPU of compute capability 9.0 and the built kernel library",
)

NEGATIVE_INFINITY = -0x800000
"""Its bits, as an int32."""


def words(allowed: torch.Tensor) -> torch.Tensor:
    """Bit i % 32 of word i // 32 of a row: whether token i is allowed."""
    bits = torch.nn.functional.pad(allowed, (0, -allowed.shape[1] % 32)).view(len(allowed), -1, 32).long()
    return (bits << torch.arange(32, device=bits.device)).sum(-1).int()


def masks(rows: int, tokens: int) -> dict[str, torch.Tensor]:
    gen = torch.Generator("cuda").manual_seed(11)
    half = torch.rand(rows, tokens, generator=gen, device="cuda") < 0.5
    some = torch.rand(rows, tokens, generator=gen, device="cuda") < 0.001
    runs = (torch.arange(tokens, device="cuda") // 100 % 2 == 0).expand(rows, tokens)
    return {"half": half, "few allowed": some, "few refused": ~some, "runs": runs, "none": half & ~half, "all": half | ~half}


@pytest.mark.parametrize("rows", [1, 31, 32, 64])  # from 32 on by fours that are read
@pytest.mark.parametrize(
    ("tokens", "pitch"),
    [
        pytest.param(129280, 129280, id="the model's"),
        pytest.param(8192, 8192, id="one block's"),
        pytest.param(16421, 16421, id="rows that begin at no multiple of 16 bytes"),
        pytest.param(8195, 8200, id="rows that are apart"),
        pytest.param(3, 3, id="three"),
    ],
)
def test_refused_tokens_are_infinitely_unlikely_and_others_keep_their_bits(rows, tokens, pitch):
    call = native.library(torch.device("cuda", 0)).bind(get_card("mask_logits"))
    given = torch.randint(-(2**31), 2**31, (rows, pitch), device="cuda").int()  # NaN of many payloads among them
    zeros, ones = torch.zeros(rows, dtype=torch.int32, device="cuda"), torch.ones(rows, device="cuda")
    offsets, no_ids, no_values = (
        torch.zeros(n, dtype=t, device="cuda") for n, t in ((rows + 1, torch.int32), (0, torch.int32), (0, torch.float32))
    )
    slots, history = torch.arange(rows, dtype=torch.int32, device="cuda"), torch.zeros(rows, 8, dtype=torch.int32, device="cuda")
    for name, allowed in masks(rows, tokens).items():
        got, wanted = given.clone(), given.clone()
        wanted[:, :tokens] = torch.where(allowed, given[:, :tokens], NEGATIVE_INFINITY)
        bias = (offsets, no_ids, no_values)
        call(history, slots, zeros, zeros, ones, 0 * ones, 0 * ones, *bias, words(allowed), got.view(torch.float32)[:, :tokens])
        assert torch.equal(got, wanted), name


@pytest.mark.parametrize("rows", [31, 33])
def test_penalties_and_biases_come_before_the_mask(rows):
    card, case = get_card("mask_logits"), parse_case(f"mask_logits(S={rows},V=8200,L=300,mode=all)")
    args = card.generate(case, 5, "cpu", prepare_canonical)
    given = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in args.items()}
    wanted = {**given, "logits": given["logits"].clone()}
    native.library(torch.device("cuda", 0)).bind(card)(*(given[name] for name in card.arg_names))
    card.reference(*(wanted[name] for name in card.arg_names))
    assert torch.equal(given["logits"].isinf(), wanted["logits"].isinf()) and bool(given["logits"].isinf().any())
    torch.testing.assert_close(given["logits"], wanted["logits"])
