"""One self-contained page of a report: facts, verdicts by op, error histograms, bandwidth, and every failure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from deepinfer_hal.conformance.verdict import BROKEN, VERDICTS

_STYLE = """
body{font:14px/1.45 system-ui,sans-serif;margin:2em auto;max-width:70em;padding:0 1em;color:#222}
table{border-collapse:collapse;margin:1em 0}
td,th{padding:.2em .7em;text-align:left;border-bottom:1px solid #ddd;vertical-align:top}
td.n{text-align:right}code{font-size:12px}.pass{color:#17692b}.fail,.crash,.timeout{color:#a51616;font-weight:600}
.waived,.unsupported,.not-run{color:#7a5b00}svg{background:#fafafa;border:1px solid #ddd}svg text{font:10px system-ui,sans-serif}
"""

_BINS = ("exact", "2^-7", "2^-6", "2^-5", "2^-4", "2^-3", "2^-2", "2^-1", "1", "over")
"""Upper edges of the error histogram, as shares of what is allowed."""

_BAR, _WIDE = "#3b6ea5", 640


def page(report: Mapping[str, Any]) -> str:
    """The whole page."""
    subject, suite = report["subject"], report["suite"]
    title = f"HAL conformance of {subject['backend']}:{subject['index']} ({subject['device']})"
    facts = {
        "verdict": {0: "passed", 1: "FAILED", 2: "nothing was claimed or run"}[report["exit_status"]],
        "results": ", ".join(f"{count} {word}" for word, count in report["counts"].items()),
        "profile": report["plan"]["profile"] + ("" if report["whole"] else ", cut to a selection"),
        "suite": f"HAL {suite['hal_version']}, commit {suite['commit']}, {'clean' if suite['clean_tree'] else 'not clean'}",
        "created": f"{report['created']}, {report['seconds']:.0f} s",
        "host": f"{report['host']['processor']}, {report['host']['platform']}",
        "versions": ", ".join(f"{name} {version}" for name, version in report["host"]["versions"].items()),
        "device": ", ".join(f"{name}: {value}" for name, value in subject["details"].items()),
        "seeds": ", ".join(f"{name} {value}" for name, value in report["seeds"].items()),
        "checksum": report["checksum"],
    }
    body = [
        f"<h1>{escape(title)}</h1>",
        _table([], ([escape(name), escape(str(value))] for name, value in facts.items())),
        "<h2>Failures</h2>", _failures(report["results"]),
        "<h2>Ops</h2>", _ops(report["results"]),
        "<h2>Errors, as shares of what is allowed</h2>", _histograms(report["results"]),
        "<h2>Bandwidth of the cases, GB/s</h2>", _bandwidth(report["results"]),
        "<h2>All cases</h2>", _cases(report["results"]),
    ]  # fmt: skip
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    return head + "\n".join(body) + "</html>\n"


def _table(head: list[str], rows: Iterable[list[str]]) -> str:
    top = "<tr>" + "".join(f"<th>{name}</th>" for name in head) + "</tr>" if head else ""
    lines = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table>{top}{lines}</table>"


def _word(verdict: str) -> str:
    return f'<span class="{escape(verdict)}">{escape(verdict)}</span>'


def _failures(results: list[Mapping[str, Any]]) -> str:
    rows = [
        [_word(r["verdict"]), f"<code>{escape(r['id'])}</code>", escape(r["symbol"]), escape(check), escape(message)]
        for r in results
        if r["verdict"] in BROKEN
        for check, message in r["failures"].items()
    ]
    return _table(["verdict", "case", "kernel", "check", "what was found"], rows) if rows else "<p>None.</p>"


def _by_op(results: list[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    found: dict[str, list[Mapping[str, Any]]] = {}
    for result in results:
        found.setdefault(result["op"], []).append(result)
    return dict(sorted(found.items()))


def _ops(results: list[Mapping[str, Any]]) -> str:
    rows = []
    for op, mine in _by_op(results).items():
        words = {word: sum(r["verdict"] == word for r in mine) for word in VERDICTS}
        kernels = sorted({r["symbol"] for r in mine if r["symbol"]})
        worst = max((value for r in mine for value in r["used"].values()), default=None)
        reasons = sorted({r["reason"] for r in mine if r["reason"]})
        rows.append(
            [
                escape(op), escape(", ".join(kernels)), ", ".join(f"{n} {_word(word)}" for word, n in words.items() if n),
                "" if worst is None else f"{worst:.2f}", escape("; ".join(reasons)),
            ]
        )  # fmt: skip
    return _table(["op", "kernels", "cases", "largest error", "reason"], rows)


def _histograms(results: list[Mapping[str, Any]]) -> str:
    """A row of bars per op: how many values lie in each share of the tolerance, on a square-root scale."""
    rows = []
    for op, mine in _by_op(results).items():
        total = [0] * len(_BINS)
        for counts in (counts for r in mine for counts in r["histogram"].values()):
            total = [a + b for a, b in zip(total, counts, strict=True)]
        if sum(total):
            rows.append((op, total))
    if not rows:
        return "<p>No float output was compared.</p>"
    step, left, cell = 22, 170, (_WIDE - 170) / len(_BINS)
    parts = [f'<text x="{left + i * cell:.0f}" y="12">{name}</text>' for i, name in enumerate(_BINS)]
    for n, (op, counts) in enumerate(rows):
        base, most = 18 + (n + 1) * step, max(counts)
        parts.append(f'<text x="4" y="{base - 4}">{escape(op)}</text>')
        for i, count in enumerate(counts):
            height = (step - 4) * (count / most) ** 0.5
            parts.append(
                f'<rect x="{left + i * cell:.1f}" y="{base - height:.1f}" width="{cell - 4:.1f}" height="{height:.1f}" '
                f'fill="{_BAR}"><title>{escape(op)}, {_BINS[i]}: {count} values</title></rect>'
            )
    return _svg(_WIDE, 24 + step * (len(rows) + 1), parts)


def _bandwidth(results: list[Mapping[str, Any]]) -> str:
    """The fastest case of each op: bytes that its card counts over the median time of a call."""
    best: dict[str, tuple[float, str]] = {}
    for r in results:
        if r["kernel_seconds"] and r["bytes"]:
            best[r["op"]] = max(best.get(r["op"], (0.0, "")), (r["bytes"] / r["kernel_seconds"] / 1e9, r["id"]))
    if not best:
        return "<p>No case was timed.</p>"
    most, step, left, parts = max(value for value, _ in best.values()), 16, 170, []
    for n, (op, (value, id)) in enumerate(sorted(best.items(), key=lambda entry: -entry[1][0])):
        y, width = 4 + n * step, (_WIDE - left - 70) * value / most
        parts.append(f'<text x="4" y="{y + 11}">{escape(op)}</text>')
        parts.append(
            f'<rect x="{left}" y="{y + 2}" width="{width:.1f}" height="{step - 4}" fill="{_BAR}">'
            f"<title>{escape(id)}</title></rect>"
        )
        parts.append(f'<text x="{left + width + 4:.1f}" y="{y + 11}">{value:.2f}</text>')
    return _svg(_WIDE, 8 + step * len(best), parts)


def _svg(width: int, height: int, parts: list[str]) -> str:
    return f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img">' + "".join(parts) + "</svg>"


def _cases(results: list[Mapping[str, Any]]) -> str:
    rows = (
        [
            _word(r["verdict"]), f"<code>{escape(r['id'])}</code>", escape(r["symbol"]),
            "" if not r["kernel_seconds"] else f"{1e6 * r['kernel_seconds']:.0f} us",
            escape(", ".join(f"{name} {value:.2f}" for name, value in r["used"].items())),
        ]
        for r in results
    )  # fmt: skip
    return _table(["verdict", "case", "kernel", "time", "errors"], rows)
