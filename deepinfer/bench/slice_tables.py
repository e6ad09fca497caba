"""Tables in Markdown of what stored reports of `deepinfer bench rank-slice` hold: steps, ops, the engine's loop, prefills.

Reports of one expert-parallel size are one result: what a later report measured stands in the place of what an earlier one did.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from deepinfer.errors import ConfigError

Result = dict[str, Any]


def read_slices(paths: Sequence[Path]) -> list[Result]:
    """The slices of all reports, one for each expert-parallel size. ConfigError for a file that is no such report."""
    found: dict[int, Result] = {}
    for path in paths:
        try:
            report = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError("report", f"{path} cannot be read: {error}") from None
        if not isinstance(report, dict) or report.get("benchmark") != "rank-slice":
            raise ConfigError("report", f"{path} is no report of `deepinfer bench rank-slice`")
        for one in report["results"]["slices"]:
            found[one["ranks"]] = joined(found[one["ranks"]], one) if one["ranks"] in found else one
    return list(found.values())


def joined(before: Result, after: Result) -> Result:
    """One result of two of the same size."""
    lists = {
        "steps": ("kind", "requests", "tokens"), "whole_model": ("kind", "requests", "tokens"), "gaps": ("requests",),
    }  # fmt: skip
    return {**after, **{name: _newest(before[name], after[name], keys) for name, keys in lists.items()}}


def _newest(before: Iterable[Result], after: Iterable[Result], keys: tuple[str, ...]) -> list[Result]:
    """Entries of both, of each the last that has no error, else the last."""
    found: dict[tuple[Any, ...], Result] = {}
    for one in (*before, *after):
        key = tuple(one[name] for name in keys)
        if key not in found or "error" not in one or "error" in found[key]:
            found[key] = one
    return list(found.values())


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    lines = [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines) + "\n"


def steps_table(results: Sequence[Result]) -> str:
    """Every step of the whole model beside the slice's own, prefills last."""
    head = ("ranks", "step", "requests x tokens", "slice, ms", "whole model, ms", "tokens/s of the rank", "published, scaled")
    return markdown(head, (row for result in results for row in _step_rows(result)))


_ORDER = ("decode", "verify", "prefill", "replayed prefill")


def _step_rows(result: Result) -> Iterator[tuple[str, ...]]:
    measured = {_key(step): step for step in result["steps"] if "error" not in step}
    for one in sorted(result["whole_model"], key=lambda one: (_ORDER.index(one["kind"]), one["requests"], one["tokens"])):
        step = measured[one["kind"].removeprefix("replayed "), one["requests"], one["tokens"]]
        scaled = one["published_scaled"]
        yield (
            f"EP{result['ranks']}", "verify and draft" if one["kind"] == "verify" else one["kind"],
            f"{one['requests']} x {one['tokens']}", f"{1e3 * step['whole']['median']:.2f}", f"{1e3 * one['seconds']:.1f}",
            f"{one['tokens_per_second']:.0f}", f"{scaled['by_bandwidth']:.0f} / {scaled['by_compute']:.0f}" if scaled else "",
        )  # fmt: skip
    for step in result["steps"]:
        if "error" in step:
            yield f"EP{result['ranks']}", step["kind"], f"{step['requests']} x {step['tokens']}", step["error"], "", "", ""


def _key(step: Mapping[str, Any]) -> tuple[str, int, int]:
    return step["kind"], step["requests"], step["tokens"]


def ops_tables(results: Sequence[Result], most: int = 12) -> Iterator[tuple[str, str]]:
    """(title with the sum over all ops beside the step, table of the most expensive) of every step of which ops were timed."""
    for result in results:
        seconds = {_key(one): one["seconds"] for one in result["whole_model"]}
        for step in result["steps"]:
            if step.get("ops"):
                title = f"EP{result['ranks']}, {step['kind']} {step['requests']} x {step['tokens']}, whole model"
                title += f", its ops alone {1e3 * sum(op['seconds'] for op in step['ops']):.2f} ms"
                if _key(step) in seconds:
                    title += f" of {1e3 * seconds[_key(step)]:.2f}"
                yield title, markdown(("op", "role or layer kind", "us", "share", "of floor"), map(_op_row, step["ops"][:most]))


def _op_row(op: Mapping[str, Any]) -> tuple[str, ...]:
    reached = f"{op['floor_seconds'] / op['seconds']:.2f}" if op["seconds"] else ""
    return op["op"], op["role"], f"{1e6 * op['seconds']:.0f}", f"{100 * op['share']:.1f} %", reached


def loops_table(results: Sequence[Result]) -> str:
    """The engine's own loop at each size; empty where none was measured."""
    rows = [
        (f"EP{result['ranks']}", str(gap["requests"]), *_loop_cells(gap))
        for result in results for gap in result["gaps"] if "error" not in gap
    ]  # fmt: skip
    head = ("ranks", "sequences", "step, ms", "idle between steps, us", "share", "beyond the device's work, us", "share")
    return markdown(head, rows) if rows else ""


def _loop_cells(gap: Mapping[str, Any]) -> tuple[str, ...]:
    def cell(value: float | None, scale: float, digits: int) -> str:
        return "" if value is None else f"{scale * value:.{digits}f}"

    def share(value: float | None) -> str:
        return "" if value is None else f"{100 * value:.2f} %"

    return (
        cell(gap["step_seconds"], 1e3, 3), cell(gap.get("between_seconds"), 1e6, 1), share(gap.get("between_share")),
        cell(gap["gap_seconds"], 1e6, 1), share(gap["idle_share"]),
    )  # fmt: skip


def phase_totals(result: Result) -> dict[str, float]:
    """The benchmark's own seconds by phase, over all steps."""
    spent: dict[str, float] = dict(result.get("phases", {}))
    for part in (*result["steps"], *result["gaps"]):
        for name, seconds in part.get("phases", {}).items():
            spent[name] = spent.get(name, 0.0) + seconds
    return spent


def phases_table(results: Sequence[Result]) -> str:
    """Where the benchmark's own time went, in seconds."""
    rows = []
    for result in results:
        spent = phase_totals(result)
        told = ", ".join(f"{name} {seconds:.1f}" for name, seconds in sorted(spent.items(), key=lambda one: -one[1]))
        rows.append((f"EP{result['ranks']}", f"{sum(spent.values()):.1f}", told))
    return markdown(("ranks", "seconds", "of which"), rows)
