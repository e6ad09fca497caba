"""What the CUDA C++ attention says of a call before it is made."""

import pytest
from deepinfer_cuda import native
from deepinfer_hal.card import all_cards
from deepinfer_hal.kernel import CallSpec, No, Yes
from deepinfer_hal.statics import call_spec
from deepinfer_hal.weights import prepare_canonical

SERVED = {"q": "bf16", "out": "bf16", "window_format": "fp8_32", "compressed_format": "fp4_16", "h": 64, "D": 512, "k": 512}


@pytest.mark.parametrize("change", [{}, {"h": 4}, {"compressed_format": "fp8_32"}, {"k": 1536}])
def test_heads_of_512_over_quantised_rows_are_served(change):
    assert native.supports(CallSpec("sparse_attention", SERVED | change)) == Yes()


@pytest.mark.parametrize("change", [{}, {"k": 1024}, {"k": 4096}])
def test_heads_of_512_over_decoded_rows_are_served(change):
    change = {"window_format": "bf16", "compressed_format": "bf16"} | change
    assert native.supports(CallSpec("sparse_attention", SERVED | change)) == Yes()


@pytest.mark.parametrize(
    ("change", "named"),
    [({"q": "f32"}, "q"), ({"out": "f32"}, "out"), ({"window_format": "f32"}, "window_format"), ({"h": 128}, "h = 128"),
     ({"compressed_format": "mxfp4_32"}, "compressed_format"), ({"D": 64}, "D"), ({"k": 4096}, "k = 4096"),
     ({"window_format": "bf16"}, "compressed_format")],
)  # fmt: skip
def test_what_is_not_served_is_refused_by_name(change, named):
    answer = native.supports(CallSpec("sparse_attention", SERVED | change))
    assert isinstance(answer, No) and named in answer.reason


@pytest.mark.parametrize("name", sorted(SERVED.keys() - {"k"}))
def test_what_a_binding_leaves_open_is_not_promised(name):
    assert isinstance(native.supports(CallSpec("sparse_attention", {k: v for k, v in SERVED.items() if k != name})), No)


def test_of_the_cards_cases_all_bf16_ones_over_fp8_or_bf16_windows_are_served():
    card = all_cards()["sparse_attention"]
    for case in card.enumerate_cases():
        served = isinstance(native.supports(call_spec(card, card.generate(case, 0, "cpu", prepare_canonical))), Yes)
        assert served == (case.params["dtype"] == "bf16" and case.params["window"] in ("fp8_32", "bf16")), case.id
