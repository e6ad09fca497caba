"""draft_features: the mean over the streams, which the draft model reads at its target layers.

out[t] = mean_j streams[t, j] in float32, rounded once (V4.1 DSpark, section 2.11 of the model notes). `out` may be a
slice of the concatenated features of several layers.
"""

from __future__ import annotations

from deepinfer_hal.card import COUNT, Case, OpCard, out, register, sum_tolerance, tensor
from deepinfer_hal.ops import _cache_cases as cases
from deepinfer_hal.ops._common import count_tensor, dtype_of, generator, largest, poisoned, valid_rows, wide


def draft_features(streams, count, out) -> None:
    """streams [T, m, H]; out [T, H], which may be strided. Streams are added in ascending order."""
    n = valid_rows(count, streams.shape[0])
    total = wide(streams[:n, 0])
    for j in range(1, streams.shape[1]):
        total = total + wide(streams[:n, j])
    out[:n] = (total / streams.shape[1]).to(out.dtype)


def enumerate_cases():
    for rows, dtype in ((0, "bf16"), (1, "bf16"), (3, "f32"), (33, "bf16")):
        yield Case("draft_features", dict(rows=rows, m=4, H=256, dtype=dtype))
    yield Case("draft_features", dict(rows=9, m=4, H=5120, dtype="bf16", padding=10240, count=5))


def generate(case, seed, device, prepare) -> dict:
    p = {"padding": 0, "count": None, **case.params}
    wider = poisoned(p["rows"], p["H"] + p["padding"], dtype=dtype_of(p["dtype"]))
    args = dict(
        streams=cases.values(generator(case, seed), (p["rows"], p["m"], p["H"]), p["dtype"]),
        count=count_tensor(p["count"]),
        out=wider[:, : p["H"]],
    )
    return cases.on(device, args)


def tolerance(args, name):
    return sum_tolerance(args["out"].dtype, args["streams"].shape[1], magnitude=largest(args["streams"]))


CARD = register(
    OpCard(
        name="draft_features",
        group="draft",
        summary="Mean over the streams.",
        signature=(tensor("streams", "stream", "T m H"), COUNT, out("out", "stream", "T H")),
        reference=draft_features,
        rounding="float32 sum in stream order, once to out's dtype",
        tolerance=tolerance,
        enumerate_cases=enumerate_cases,
        generate=generate,
    )
)
