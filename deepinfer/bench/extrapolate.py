"""From a slice's measured parts to the whole model, by arithmetic that is shown, and the published curve to hold it against.

whole step = input + sum over kinds (layers of the kind in the model * mean measured time of its layers in the slice)
           + Engram layers * engram + features + head + gate columns that the slice lacks (bytes / copy ceiling).
A drafted step is a verify step and a draft block. A replayed prefill counts only the layers that a bounded replay runs on every
token, and leaves out the replay of the last window through the others: a bound from above on its speed. Exchanges between ranks
are in none of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DRAFTS, ACCEPTED = 3, 0.75
"""Fixed drafts of a step and the share of them that is accepted: the conditions of the published decode figures."""

TOKENS_PER_STEP = 1 + ACCEPTED * DRAFTS
"""Tokens that a drafted step gives a sequence, under the conditions of the published figures: 3.25."""


@dataclass(frozen=True)
class PublishedPoint:
    """A figure of the public system: `size` requests a rank (decode) or tokens a step (prefill); tokens per second and GPU."""

    size: int
    tokens_per_second: float


PUBLISHED_DECODE = (PublishedPoint(8, 2_600), PublishedPoint(256, 26_300))
"""64 SM100 GPUs, EP64, context 131 072, 3 drafts at an assumed 75 % acceptance; partly read off charts."""

PUBLISHED_PREFILL = (PublishedPoint(4_096, 60_000), PublishedPoint(65_536, 89_500))
"""4 SM100 GPUs, few ranks; uncached input tokens."""

SM100_BANDWIDTH, SM100_FLOPS = 8.0e12, 4.5e15
"""Datasheet peaks of the published figures' GPU: bytes/s, and dense FP8 FLOP/s."""

SM90_BANDWIDTH, SM90_FLOPS = 4.8e12, 1.979e15
"""The same of an H200."""


BY_BANDWIDTH, BY_COMPUTE = SM90_BANDWIDTH / SM100_BANDWIDTH, SM90_FLOPS / SM100_FLOPS


def published_scaled(kind: str, size: int) -> dict[str, float]:
    """The published figure of a kind of step at that size, scaled to an H200 by bandwidth and by compute; empty without one."""
    points = {"verify": PUBLISHED_DECODE, "prefill": PUBLISHED_PREFILL, "replayed prefill": PUBLISHED_PREFILL}.get(kind, ())
    found = [point.tokens_per_second for point in points if point.size == size]
    return {"by_bandwidth": found[0] * BY_BANDWIDTH, "by_compute": found[0] * BY_COMPUTE} if found else {}


def scaled(points: tuple[PublishedPoint, ...], factor: float) -> list[tuple[int, float]]:
    """(size, tokens per second) of published points on a part with `factor` of the speed."""
    return [(point.size, point.tokens_per_second * factor) for point in points]


@dataclass(frozen=True)
class Term:
    """One summand: `count` times `seconds`."""

    name: str
    count: float
    seconds: float

    @property
    def total(self) -> float:
        return self.count * self.seconds


def part_kind(part: str) -> str:
    """The layer kind of a part's name, or the name itself."""
    return part.rpartition(" ")[2] if part.startswith("layer ") else part


def step_terms(
    result: Mapping[str, Any], step: Mapping[str, Any], hidden: int, experts: int, kinds: str = "model_kinds"
) -> list[Term]:
    """The whole model's step as summands. hidden, experts: of the model; kinds: which of the result's counts to take. Kinds of
    which the slice has no layer are left out; `missing_kinds` names them."""
    times: dict[str, list[float]] = {}
    for name, timing in step["parts"].items():
        times.setdefault(part_kind(name), []).append(timing["median"])
    counts = {"input": 1, **result[kinds], "engram": result["model_engram_layers"], "features": 1, "head": 1}
    terms = [Term(name, count, sum(times[name]) / len(times[name])) for name, count in counts.items() if name in times]
    lacking = (experts - result["experts"]) * hidden * 2 / result["ceilings"]["bandwidth"]
    return [*terms, Term("gate columns of other ranks' experts", sum(result[kinds].values()), max(lacking, 0.0))]


def missing_kinds(result: Mapping[str, Any]) -> list[str]:
    """Kinds of the model that the slice has no layer of: with any, it says nothing of the whole."""
    return [kind for kind in result["model_kinds"] if kind not in result["kinds"]]


def extrapolate(result: Mapping[str, Any], hidden: int, experts: int) -> list[dict[str, Any]]:
    """The whole model at each measured size: step seconds, tokens per second of this rank, and the terms. Empty if the slice
    lacks a kind."""
    if missing_kinds(result):
        return []
    good = [step for step in result["steps"] if "error" not in step]
    drafted = {step["requests"]: step["parts"]["draft"]["median"] for step in good if "draft" in step["parts"]}
    found = []
    for step in good:
        requests, verify = step["requests"], step["kind"] == "verify"
        if verify and requests not in drafted:
            continue
        tokens = step["tokens"] if step["kind"] == "prefill" else requests * (TOKENS_PER_STEP if verify else 1)
        extra = [Term("draft", 1, drafted[requests])] if verify else []
        found.append(_whole(step, step["kind"], [*step_terms(result, step, hidden, experts), *extra], tokens))
        if step["kind"] == "prefill":
            found.append(_whole(step, "replayed prefill", step_terms(result, step, hidden, experts, "replayed_kinds"), tokens))
    return found


def _whole(step: Mapping[str, Any], kind: str, terms: list[Term], tokens: float) -> dict[str, Any]:
    seconds = sum(term.total for term in terms)
    return {
        "kind": kind, "requests": step["requests"], "tokens": step["tokens"], "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "published_scaled": published_scaled(kind, step["tokens"] if "prefill" in kind else step["requests"]),
        "terms": [{"name": term.name, "count": term.count, "seconds": term.seconds} for term in terms],
    }  # fmt: skip


def whole_model_ops(result: Mapping[str, Any], step: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Seconds of every op in a step of the whole model: each call counts as often as its part does there. Largest first."""
    have: dict[str, int] = {}
    for kind in result["kinds"]:
        have[kind] = have.get(kind, 0) + 1
    weights = {kind: result["model_kinds"][kind] / count for kind, count in have.items()}
    weights["engram"] = float(result["model_engram_layers"])
    rows = []
    for op in step.get("ops", ()):
        times = sum(weights.get(part_kind(part), 1.0) for part in op["parts"]) / op["calls"]
        rows.append({**op, "seconds": op["seconds"] * times, "floor_seconds": op["floor_seconds"] * times})
    total = sum(row["seconds"] for row in rows) or 1.0
    return sorted(({**row, "share": row["seconds"] / total} for row in rows), key=lambda row: -row["seconds"])
