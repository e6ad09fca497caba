"""Holds reports of benchmarks against a conformance report: the same build, and no kernel that did not pass there.

    python tools/cuda/same_kernels.py reports/hal-cuda-full.json reports/h200/*.json

A report tells its build under `build`, once or for each part, and its kernels as `symbol`, `symbols` or lines under `kernels`. A
symbol passes where at least one case passed with it and none failed. Exit status 1 if a report differs, or tells no build or no
symbol.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PARTS = ("cuda c++ kernels", "triton kernels")
LISTED = re.compile(r"^[a-z_0-9]+(?:\[[^\]]*\])?: (?P<symbol>.+) by [a-z+]+, ")
"""A kernel as the engine lists it: op, role, symbol, provider, what it states."""


def values_of(document: Any, key: str) -> Iterator[Any]:
    """Every value under `key`, at any depth."""
    if isinstance(document, dict):
        for name, value in document.items():
            if name == key:
                yield value
            yield from values_of(value, key)
    elif isinstance(document, list):
        for value in document:
            yield from values_of(value, key)


def symbols_of(report: dict[str, Any]) -> set[str]:
    """Symbols of all kernels that a benchmark's report tells of. A check's planted errors have no kernel."""
    found: set[str] = set()
    for value in [*values_of(report, "symbol"), *values_of(report, "load_kv_symbol")]:
        found.add(value)
    for value in values_of(report, "symbols"):
        found.update(value.values() if isinstance(value, dict) else value)
    for value in values_of(report, "kernels"):
        lines = value if isinstance(value, list) else ()
        found.update(told["symbol"] for line in lines if isinstance(line, str) and (told := LISTED.match(line)))
    return {symbol for symbol in found if symbol and not symbol.startswith("planted ")}


def builds_of(report: dict[str, Any]) -> list[dict[str, str]]:
    """What each part of a report says of the kernels' build."""
    return [{part: build.get(part, "") for part in PARTS} for build in values_of(report, "build") if isinstance(build, dict)]


def passed(conformance: dict[str, Any]) -> set[str]:
    """Symbols with a case that passed and none that failed."""
    verdicts: dict[str, set[str]] = {}
    for result in conformance["results"]:
        verdicts.setdefault(result["symbol"], set()).add(result["verdict"])
    return {symbol for symbol, told in verdicts.items() if "pass" in told and told <= {"pass", "waived", "unsupported"}}


def differences(conformance: dict[str, Any], report: dict[str, Any]) -> list[str]:
    """What of a report is not of the kernels that conformance ran; empty if all is."""
    (wanted,), builds, symbols = builds_of(conformance["subject"]), builds_of(report), symbols_of(report)
    others = ((build, part) for build in builds for part in PARTS if build[part] != wanted[part])
    wrong = [f"{part} are {build[part]!r}, there {wanted[part]!r}" for build, part in others]
    wrong += [] if builds else ["it tells no build"]
    wrong += [] if symbols else ["it tells no symbol"]
    return wrong + [f"{symbol} did not pass there" for symbol in sorted(symbols - passed(conformance))]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("conformance", type=Path, help="the report of `deepinfer hal test`")
    parser.add_argument("reports", type=Path, nargs="+", help="reports of benchmarks and checks on the same device")
    options = parser.parse_args(arguments)
    conformance, found = json.loads(options.conformance.read_text(encoding="utf-8")), False
    for path in options.reports:
        report = json.loads(path.read_text(encoding="utf-8"))
        wrong = differences(conformance, report)
        print(f"{path}: " + ("; ".join(wrong) or f"the same build, {len(symbols_of(report))} symbols that passed"))
        found |= bool(wrong)
    return int(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
