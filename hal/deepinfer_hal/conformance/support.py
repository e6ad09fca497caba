"""docs/support.md: which backend serves which op, and how that is known. Made from stored files, never from claims.

| level | known from |
|---|---|
| runs | every case of the op passed on that silicon, in a report |
| emulated | the same, where the report's device says that it emulates one |
| assembles | an evidence file: machine code for the target was made |
| written | an evidence file: there is a source |

An evidence file is JSON: {"kind": "deepinfer-hal-evidence", "backend", "device", "level", "ops": [...], "source"}.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from deepinfer_hal.card import all_cards
from deepinfer_hal.conformance import report as stored
from deepinfer_hal.conformance.verdict import BROKEN, NOT_RUN, PASS, WAIVED
from deepinfer_hal.errors import BadCall

EVIDENCE = "deepinfer-hal-evidence"
LEVELS = ("written", "assembles", "emulated", "runs")

_HEAD = """# What runs where

Made by `deepinfer hal table` from the files in `reports/`; do not edit. A level says how it is known, not what is hoped:

| level | meaning |
|---|---|
| runs | every case of the op passed on that silicon, in a stored report |
| emulated | every case passed on an emulation of that silicon, in a stored report |
| assembles | machine code for that target was made from the source |
| written | there is a source; nothing more is known |

"""

Entry = tuple[str, str]
"""(level, file)"""


def support_page(folder: str | Path) -> str:
    """The page from every *.json of a folder. BadCall for a file that is neither report nor evidence."""
    columns: dict[str, dict[str, Entry]] = {}
    sources = []
    for path in sorted(Path(folder).glob("*.json")):
        document = _read(path)
        if document is None:
            continue
        column, entries, line = _evidence(document, path.name) if document["kind"] == EVIDENCE else _report(document, path.name)
        sources.append(line)
        mine = columns.setdefault(column, {})
        for op, entry in entries.items():
            if op not in mine or LEVELS.index(entry[0]) > LEVELS.index(mine[op][0]):
                mine[op] = entry
    return _HEAD + _table(columns) + _sources(sources)


def _read(path: Path) -> dict[str, Any] | None:
    """A report or an evidence file; None for other JSON, such as a benchmark's."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadCall(f"{path} cannot be read: {error}") from None
    kind = document.get("kind") if isinstance(document, dict) else None
    if kind not in (EVIDENCE, stored.KIND):
        return None
    if kind == EVIDENCE and document.get("level") not in LEVELS[:2]:
        allowed = " or ".join(LEVELS[:2])
        raise BadCall(f"{path}: an evidence file shows {allowed}, not {document.get('level')!r}; more takes a report")
    if kind == stored.KIND and document.get("checksum") != stored.checksum(document):
        raise BadCall(f"{path}: the checksum does not match, so it is no evidence")
    return document


def _evidence(document: Mapping[str, Any], name: str) -> tuple[str, dict[str, Entry], str]:
    column = f"{document['backend']} ({document['device']})"
    return column, {op: (document["level"], name) for op in document["ops"]}, f"{name}: {document['source']}"


def _report(document: Mapping[str, Any], name: str) -> tuple[str, dict[str, Entry], str]:
    subject = document["subject"]
    level = "emulated" if subject.get("emulated") else "runs"
    by_op: dict[str, list[str]] = {}
    for result in document["results"]:
        if result["symbol"] and not document["fallback"]["served_by_reference"]:
            by_op.setdefault(result["op"], []).append(result["verdict"])
    good = {op for op, words in by_op.items() if PASS in words and not set(words) & {*BROKEN, WAIVED, NOT_RUN}}
    suite = document["suite"]
    state = "clean" if suite["clean_tree"] else "not clean"
    line = (
        f"{name}: {subject['backend']}:{subject['index']} on {subject['device']}, {document['created'][:10]}, profile "
        f"{document['plan']['profile']}, suite {str(suite['commit'])[:12]} ({state}), "
        + ", ".join(f"{count} {word}" for word, count in document["counts"].items())
    )
    return f"{subject['backend']} ({subject['device']})", {op: (level, name) for op in good}, line


def _table(columns: Mapping[str, Mapping[str, Entry]]) -> str:
    if not columns:
        return "There is no report yet.\n"
    names = sorted(columns)
    rows = [f"| op | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for op in sorted(all_cards()):
        rows.append(f"| {op} | " + " | ".join(columns[name].get(op, ("", ""))[0] or "-" for name in names) + " |")
    return "\n".join(rows) + "\n"


def _sources(lines: Iterable[str]) -> str:
    listed = "".join(f"- {line}\n" for line in lines)
    return f"\n## Files\n\n{listed}" if listed else ""
