"""Calls on a Hopper GPU whose workspace holds only some of their rows go in parts: with the bits of a call that goes in one, and
without a byte behind the workspace."""

from __future__ import annotations

import pytest
import torch
from deepinfer_cuda import native, native_library, packing
from deepinfer_cuda.backend import CudaBackend
from deepinfer_hal.c_abi import CLibrary
from deepinfer_hal.card import Case, get_card

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0) or not native_library.LIBRARY.is_file(),
    reason="needs a GPU of compute capability 9.0 and the built kernel library",
)

BEHIND_BYTES = 64 << 20
SITE = dict(T=700, m=4, H=5120, dtype="bf16", codes=True)
CALLS = [
    pytest.param("residual_site", SITE, 200 * 32 * 26 * 4, id="residual_site, 192 of 700 rows"),
    pytest.param("residual_site", {**SITE, "count": 430}, 200 * 32 * 26 * 4, id="residual_site, of which 430 count"),
    pytest.param("hyper_connection_pre", {**SITE, "T": 300}, 200 * 32 * 26 * 4, id="hyper_connection_pre, 192 of 300"),
    pytest.param("linear", dict(T=700, K=1280, N=256, x="u8", w="fp8_block32", out="bf16"), 1 << 20, id="linear, 320 of 700"),
    pytest.param(
        "grouped_gemm", dict(M=700, E=8, K=256, N=256, x="u8", w="fp4_row32", out="bf16"), 51_200, id="grouped_gemm, 100 of 700"
    ),
    pytest.param("top_logprobs", dict(S=9, V=129_280, k=20), 25_000, id="top_logprobs, three of nine"),
    pytest.param("verify_drafts", dict(R=33, B=5, V=2048, rule="rejection"), 800, id="verify_drafts, ten of 33"),
]


def run(op: str, args: dict, room: torch.Tensor, room_bytes: int) -> dict:
    """The call's arguments after it, with memory of their own; `room_bytes` of `room` are its workspace."""
    device = torch.device("cuda", 0)
    library = CLibrary(
        native_library.LIBRARY, stream=lambda: torch.cuda.current_stream(device).cuda_stream, pack=packing.tensors_of(device),
        pack_weight=packing.weights_of(device), workspace=(room.data_ptr(), room_bytes),
    )  # fmt: skip
    own = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in args.items()}
    library.bind(get_card(op))(*own.values())
    torch.cuda.synchronize()
    return own


@pytest.mark.parametrize(("op", "parameters", "room_bytes"), CALLS)
def test_rows_that_go_in_parts_have_the_bits_of_rows_that_go_at_once(op, parameters, room_bytes):
    card, backend = get_card(op), CudaBackend()
    args = card.generate(Case(op, parameters), 5, "cuda", lambda role, stored: backend.prepare_weight(0, role, stored))
    room = torch.full((native.WORKSPACE_BYTES,), 0x5A, dtype=torch.uint8, device="cuda")
    whole = run(op, args, room, native.WORKSPACE_BYTES)
    room.fill_(0x5A)
    parts = run(op, args, room, room_bytes)
    for name in card.outputs():
        if args[name] is not None:
            assert torch.equal(parts[name].view(torch.uint8), whole[name].view(torch.uint8)), name
    assert bool((room[room_bytes : room_bytes + BEHIND_BYTES] == 0x5A).all()), "bytes behind the workspace were written"
