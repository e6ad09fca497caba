"""compress_kv: gated pooling of groups of tokens into compressed latents, with a carry ring for unfinished groups.

c = sum_i v_i * softmax_i(g_i), per channel, over the `ratio` tokens of a group (V4.1 compressor, section 2.5 of the
model notes). A group whose early tokens came in earlier steps finds them in the request's carry ring, where position
p lies at p % L. Rolling back needs no work: the next step starts at an earlier position and overwrites the ring from
there on, which is right for up to L - ratio + 1 tokens.
"""

from __future__ import annotations

import torch

from deepinfer_hal.card import Case, OpCard, inout, out, register, scalar, sum_tolerance, tensor
from deepinfer_hal.errors import BadCall
from deepinfer_hal.ops import _cache_cases as cases
from deepinfer_hal.ops._common import dtype_of, generator, poisoned, wide
from deepinfer_hal.ops._cost import touching


def compress_kv(value, gate, positions, row_to_req, cu_q, state_slots, complete, ratio, carry, out) -> None:
    """value, gate float32 [T, D]; positions, row_to_req int32 [T]; cu_q int32 [R+1]; state_slots int32 [R]; complete
    int32 [G], the token row that ends group g (-1: none, out[g] untouched); carry float32 [slots, L, 2, D] (value,
    gate); out [G, D]. Rows outside cu_q are skipped; a request whose state slot is -1 keeps no carry."""
    last = complete[complete >= 0].long()
    if last.numel():
        members = _members(value, gate, positions, row_to_req, cu_q, state_slots, last, ratio, carry)
        values, gates = wide(members[:, :, 0]), wide(members[:, :, 1])
        weights = torch.exp(gates - gates.amax(1, keepdim=True))
        pooled = (weights * values).sum(1) / weights.sum(1)
        out[complete >= 0] = pooled.to(out.dtype)
    _store_carry(value, gate, positions, row_to_req, cu_q, state_slots, carry)


def _members(value, gate, positions, row_to_req, cu_q, state_slots, last, ratio: int, carry) -> torch.Tensor:
    """[g, ratio, 2, D]: value and gate of each group's tokens, from this step's rows or from the carry ring."""
    request = row_to_req[last].long()
    start = cu_q[request].long()
    position = positions[last].long()[:, None] - torch.arange(ratio - 1, -1, -1, device=last.device)
    offset = position - positions[start].long()[:, None]
    fresh = offset >= 0
    row = torch.where(fresh, start[:, None] + offset, start[:, None])
    current = torch.stack((value[row], gate[row]), dim=2)
    slot = state_slots[request].long()[:, None].expand_as(position)
    older = carry[slot.clamp_min(0), position % carry.shape[1]]
    return torch.where(fresh[:, :, None, None], current, older.to(current.dtype))


def _store_carry(value, gate, positions, row_to_req, cu_q, state_slots, carry) -> None:
    """Keeps the last min(L, q_len) tokens of each request."""
    length = carry.shape[1]
    row = torch.arange(value.shape[0], device=value.device)
    request = row_to_req.long()
    known = request.clamp_min(0)
    if state_slots.numel() == 0:
        return
    begin, end, slot = cu_q[:-1].long()[known], cu_q[1:].long()[known], state_slots.long()[known]
    keep = ((request >= 0) & (slot >= 0) & (row >= begin) & (row < end) & (row >= end - length)).nonzero().squeeze(1)
    place = positions[keep].long() % length
    carry[slot[keep], place] = torch.stack((value[keep], gate[keep]), dim=1).to(carry.dtype)


def _carry_bytes(args) -> int:
    """Of each request: its last tokens written, and the earlier tokens of a group that ends in this step read."""
    tokens, known = args["cu_q"].diff(), args["state_slots"] >= 0
    stored = int(tokens.clamp(max=args["carry"].shape[1])[known].sum())
    live = known & (tokens > 0)
    before = args["positions"][args["cu_q"][:-1][live].long()] % args["ratio"]
    read = int(before[before + tokens[live] >= args["ratio"]].sum())
    return (stored + read) * args["carry"].shape[2:].numel() * args["carry"].element_size()


def enumerate_cases():
    for requests in ("", "0+1", "0+2", "1+1", "7+1,10+3,5+6", "3+33,0+9"):
        yield Case("compress_kv", dict(requests=requests, ratio=2, L=7, D=512, dtype="bf16"))
    yield Case("compress_kv", dict(requests="7+5,12+4", ratio=4, L=9, D=128, dtype="f32", padding=32, pad_groups=3))
    yield Case("compress_kv", dict(requests="9+4,4+2", ratio=2, L=7, D=64, dtype="f32", padding_rows=2))
    yield Case("compress_kv", dict(requests="9+4,4+2", ratio=1, L=6, D=64, dtype="f32"))


def generate(case, seed, device, prepare) -> dict:
    p = {"padding": 0, "padding_rows": 0, "pad_groups": 1, **case.params}
    g, requests = generator(case, seed), cases.parse_requests(p["requests"])
    positions, row_to_req, cu_q = cases.token_rows(requests)
    complete = [t for t, position in enumerate(positions.tolist()) if (position + 1) % p["ratio"] == 0]
    complete = cases.ints(complete + [-1] * p["pad_groups"])
    extra = torch.full((p["padding_rows"],), -1, dtype=torch.int32)
    positions, row_to_req = torch.cat((positions, extra)), torch.cat((row_to_req, extra))
    rows = positions.shape[0]
    slots = len(requests) + 2
    carry = torch.full((slots, p["L"], 2, p["D"]), float("nan"))
    state_slots = torch.randperm(slots, generator=g)[: len(requests)].to(torch.int32)
    for slot, (first, _) in zip(state_slots.tolist(), requests, strict=True):
        for position in range(max(0, first - p["L"]), first):
            carry[slot, position % p["L"]] = torch.randn(2, p["D"], generator=g)
    args = dict(
        value=cases.values(g, (rows, p["D"]), "f32", p["padding"]),
        gate=cases.values(g, (rows, p["D"]), "f32", p["padding"]),
        positions=positions,
        row_to_req=row_to_req,
        cu_q=cu_q,
        state_slots=state_slots,
        complete=complete,
        ratio=p["ratio"],
        carry=carry,
        out=poisoned(complete.shape[0], p["D"], dtype=dtype_of(p["dtype"])),
    )
    return cases.on(device, args)


def tolerance(args, name):
    return sum_tolerance(args[name].dtype, 4 * args["ratio"], magnitude=4.0)


def check(args) -> None:
    if args["ratio"] < 1 or args["carry"].shape[1] < args["ratio"]:
        raise BadCall(
            f"compress_kv: ratio must be at least 1 and the carry ring at least as long, got ratio {args['ratio']} and "
            f"{args['carry'].shape[1]} tokens"
        )


CARD = register(
    OpCard(
        name="compress_kv",
        group="attention",
        summary="Gated pooling of token groups into compressed latents, with carry.",
        signature=(
            tensor("value", "f32", "T D"),
            tensor("gate", "f32", "T D"),
            tensor("positions", "i32", "T"),
            tensor("row_to_req", "i32", "T"),
            tensor("cu_q", "i32", "R+1"),
            tensor("state_slots", "i32", "R"),
            tensor("complete", "i32", "G"),
            scalar("ratio", "int"),
            inout("carry", "f32", "slots L 2 D"),
            out("out", "stream", "G D"),
        ),
        reference=compress_kv,
        rounding="float32 throughout, once to out's dtype; carry holds float32 copies",
        empty="zero token rows: nothing is written; zero groups: only carry is updated",
        invariance="a group depends on its own tokens alone, wherever the step boundaries lie",
        tolerance=tolerance,
        check=check,
        enumerate_cases=enumerate_cases,
        generate=generate,
        cost=touching(carry=_carry_bytes),
    )
)
