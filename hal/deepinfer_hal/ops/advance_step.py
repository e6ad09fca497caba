"""advance_step: appends sampled tokens to the token history, on the device.

history[slots[s], positions[s]] = tokens[s]; a token, slot or position of -1 appends nothing. The next step gathers
its ids and n-grams from the history (gather_tokens), so the host need not see a token before the step that consumes
it.
"""

from __future__ import annotations

import torch

from deepinfer_hal.card import Case, OpCard, inout, register, tensor
from deepinfer_hal.ops import _cache_cases as cases
from deepinfer_hal.ops._common import generator, poisoned
from deepinfer_hal.ops._cost import touching


def advance_step(tokens, slots, positions, history) -> None:
    """tokens, slots, positions int32 [S] ((slot, position) pairs distinct); history int32 [slots, L]."""
    live = ((tokens >= 0) & (slots >= 0) & (positions >= 0)).nonzero().squeeze(1)
    history[slots[live].long(), positions[live].long()] = tokens[live]


def enumerate_cases():
    for rows, skip in ((0, 0), (1, 0), (3, 2), (33, 0), (33, 3)):
        yield Case("advance_step", dict(rows=rows, slots=40, length=64, skip=skip))


def generate(case, seed, device, prepare) -> dict:
    p, g = case.params, generator(case, seed)
    args = dict(
        tokens=torch.randint(0, 2048, (p["rows"],), generator=g, dtype=torch.int32),
        slots=cases.distinct_slots(g, p["rows"], p["slots"], p["skip"]),
        positions=torch.randint(0, p["length"], (p["rows"],), generator=g, dtype=torch.int32),
        history=poisoned(p["slots"], p["length"], dtype=torch.int32),
    )
    if p["skip"]:
        args["tokens"][:: p["skip"] + 1] = -1
        args["positions"][1 :: p["skip"] + 2] = -1
    return cases.on(device, args)


CARD = register(
    OpCard(
        name="advance_step",
        group="state",
        summary="Appends sampled tokens to the token history.",
        signature=(
            tensor("tokens", "i32", "S"),
            tensor("slots", "i32", "S"),
            tensor("positions", "i32", "S"),
            inout("history", "i32", "slots_total L"),
        ),
        reference=advance_step,
        discrete=("history",),
        enumerate_cases=enumerate_cases,
        generate=generate,
        cost=touching(history=lambda args: 4 * args["tokens"].shape[0]),
    )
)
