"""What the library of CUDA C++ kernels refuses before it starts anything; needs the library and no GPU."""

from __future__ import annotations

import pytest
import torch
from deepinfer_cuda.native_library import LIBRARY
from deepinfer_hal.c_abi import CLibrary, pack_tensor
from deepinfer_hal.card import Case, all_cards
from deepinfer_hal.errors import Unsupported
from deepinfer_hal.weights import prepare_canonical

pytestmark = pytest.mark.skipif(not LIBRARY.is_file(), reason="the CUDA C++ kernels are not built here")


def unpermute(rows, inverse, shared, out):
    library = CLibrary(LIBRARY, lambda: 0)
    library.bind(all_cards()["unpermute"])(rows, inverse, shared, None, out)


def zeros(*shape, dtype=torch.bfloat16):
    return torch.zeros(*shape, dtype=dtype)


@pytest.mark.parametrize("place", ["rows", "inverse", "shared", "out"])
def test_unpermute_refuses_rows_with_gaps_between_them(place):
    args = {"rows": zeros(8, 64), "inverse": zeros(4, 2, dtype=torch.int32), "shared": zeros(4, 64), "out": zeros(4, 64)}
    wide = args[place]
    args[place] = zeros(wide.shape[0], wide.shape[1] + 8, dtype=wide.dtype)[:, : wide.shape[1]]
    with pytest.raises(Unsupported, match="follow one another"):
        unpermute(**args)


def test_unpermute_refuses_rows_that_begin_between_multiples_of_16_bytes():
    rows = zeros(8 * 64 + 4)[4:].view(8, 64)
    with pytest.raises(Unsupported, match="multiples of 16 bytes"):
        unpermute(rows, zeros(4, 2, dtype=torch.int32), zeros(4, 64), zeros(4, 64))


def gapped(tensor):
    """The same rows with a gap after each."""
    return tensor.new_zeros(tensor.shape[0], tensor.shape[1] + 8)[:, : tensor.shape[1]]


ROUTE = {
    "logits": zeros(4, 96, dtype=torch.float32), "bias": zeros(96, dtype=torch.float32), "k": 6, "scaling": 1.5,
    "expert_map": None, "count": None, "ids": zeros(4, 6, dtype=torch.int32), "weights": zeros(4, 6, dtype=torch.float32),
    "counts": zeros(96, dtype=torch.int32),
}  # fmt: skip
PERMUTE = {
    "x": zeros(4, 64, dtype=torch.uint8), "x_scale": zeros(4, 2, dtype=torch.uint8), "ids": zeros(4, 2, dtype=torch.int32),
    "experts": 8, "count": None, "out": zeros(8, 64, dtype=torch.uint8), "out_scale": zeros(8, 2, dtype=torch.uint8),
    "offsets": zeros(9, dtype=torch.int32), "source": zeros(8, dtype=torch.int32), "inverse": zeros(4, 2, dtype=torch.int32),
}  # fmt: skip


@pytest.mark.parametrize(("op", "args", "place"), [
    *[("route_topk", ROUTE, name) for name in ("logits", "ids", "weights")],
    *[("permute", PERMUTE, name) for name in ("x_scale", "ids", "out", "out_scale", "inverse")],
])  # fmt: skip
def test_routing_refuses_rows_with_gaps_between_them(op, args, place):
    call = args | {place: gapped(args[place])}
    with pytest.raises(Unsupported, match="must follow one another"):
        CLibrary(LIBRARY, lambda: 0).bind(all_cards()[op])(*call.values())


@pytest.mark.parametrize("place", ["rows", "shared", "out"])
def test_unpermute_refuses_rows_that_are_not_bf16(place):
    args = {"rows": zeros(8, 64), "inverse": zeros(4, 2, dtype=torch.int32), "shared": zeros(4, 64), "out": zeros(4, 64)}
    with pytest.raises(Unsupported, match="BF16"):
        unpermute(**args | {place: args[place].float()})


@pytest.mark.parametrize("place", ["y", "out", "streams"])
def test_a_site_refuses_rows_that_are_not_bf16(place):
    card = all_cards()["residual_site"]
    args = card.generate(Case("residual_site", dict(T=2, m=4, H=64, dtype="bf16", codes=False)), 1, "cpu", prepare_canonical)
    with pytest.raises(Unsupported, match="BF16"):
        CLibrary(LIBRARY, lambda: 0).bind(card)(*(args | {place: args[place].float()}).values())


def test_a_site_of_no_columns_is_refused():
    card = all_cards()["hyper_connection_pre"]
    args = card.generate(Case("hyper_connection_pre", dict(T=2, m=4, H=32, dtype="bf16")), 1, "cpu", prepare_canonical)
    none = {"streams": args["streams"][..., :0], "fn": args["fn"][:, :0], "out": args["out"][:, :0]}
    with pytest.raises(Unsupported, match="positive multiple of 32"):
        CLibrary(LIBRARY, lambda: 0).bind(card)(*(args | none).values())


@pytest.mark.parametrize("place", ["window", "draft_kv"])
def test_draft_attention_refuses_rows_whose_places_do_not_fit_its_lists(place):
    card = all_cards()["draft_attention"]
    case = next(case for case in card.enumerate_cases() if case.params["anchors"] and case.params["format"] == "fp8_32")
    args = card.generate(case, 1, "cpu", prepare_canonical)
    far = ((64 << 30) // args[place].stride(0) + 1, args[place].shape[1])

    def pack(tensor):
        return pack_tensor(tensor, shape=far if tensor is args[place] else None)

    with pytest.raises(Unsupported, match="at most 64 GiB"):
        CLibrary(LIBRARY, lambda: 0, pack=pack).bind(card)(*args.values())
