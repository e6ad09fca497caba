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

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "hal")]

from deepinfer_hal.conformance.report import read_report, require_intact  # noqa: E402
from deepinfer_hal.errors import BadCall  # noqa: E402

PARTS = ("cuda c++ kernels", "triton kernels")
PLANTED = ("planted memcheck", "planted racecheck")
"""What sanitize.py plants has no kernel."""
LISTED = re.compile(r"^[a-z_0-9]+(?:\[[^\]]*\])?: (?P<symbol>.+) by [a-z+]+, ")
"""A kernel as the engine lists it: op, role, symbol, provider, what it states."""


def items_of(document: Any) -> Iterator[tuple[str, Any]]:
    """Every key with its value, at any depth."""
    if isinstance(document, dict):
        for name, value in document.items():
            yield name, value
            yield from items_of(value)
    elif isinstance(document, list):
        for value in document:
            yield from items_of(value)


def symbols_of(document: Any) -> set[str]:
    """Symbols of all kernels told. BadCall for one in a form that is not read, where it might go unseen."""
    found: list[Any] = []
    for name, value in items_of(document):
        if name == "symbol" or name.endswith("_symbol"):
            found.append(value)
        elif name == "symbols":
            found += value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
        elif name == "kernels" and isinstance(value, list):
            lines = [line for line in value if not isinstance(line, dict)]
            found += [told["symbol"] if (told := LISTED.match(str(line))) else [line] for line in lines]
    if unread := [one for one in found if not isinstance(one, str)]:
        raise BadCall(f"it tells a symbol in a form that is not read: {json.dumps(unread[0])[:80]}")
    return {symbol for symbol in found if symbol and symbol not in PLANTED}


def build_of(document: Any) -> dict[str, Any] | None:
    """The build that a report or a part of it tells for all that is in it: its own or its subject's."""
    holders = (document, document.get("subject")) if isinstance(document, dict) else ()
    return next((one["build"] for one in holders if isinstance(one, dict) and isinstance(one.get("build"), dict)), None)


def parts_of(document: Any) -> Iterator[Any]:
    """The largest parts that tell a build, and what lies beside them."""
    if build_of(document) is not None or not _tells_build(document):
        yield document
    elif isinstance(document, list):
        for one in document:
            yield from parts_of(one)
    else:
        for name, value in document.items():
            yield from parts_of(value) if _tells_build(value) else [{name: value}]


def _tells_build(document: Any) -> bool:
    return any(name == "build" for name, _ in items_of(document))


def passed(conformance: dict[str, Any]) -> set[str]:
    """Symbols with a case that passed and none that failed."""
    verdicts: dict[str, set[str]] = {}
    for result in conformance["results"]:
        verdicts.setdefault(result["symbol"], set()).add(result["verdict"])
    return {symbol for symbol, told in verdicts.items() if "pass" in told and told <= {"pass", "waived", "unsupported"}}


def differences(conformance: dict[str, Any], report: Any) -> list[str]:
    """What of a report is not of the kernels that conformance ran; empty if all is."""
    wanted, symbols = conformance["subject"]["build"], symbols_of(report)
    builds = [value for name, value in items_of(report) if name == "build" and isinstance(value, dict)]
    others = ((build.get(part, ""), part) for build in builds for part in PARTS if build.get(part) != wanted[part])
    wrong = [f"{part} are {other!r}, there {wanted[part]!r}" for other, part in others]
    if not builds or not symbols:
        wrong += ["it tells no build"] * (not builds) + ["it tells no symbol"] * (not symbols)
    else:
        for part in parts_of(report):
            build, told = build_of(part), symbols_of(part)
            wrong += [f"no build is told for {', '.join(sorted(told))}"] if build is None and told else []
            wrong += ["a part of it tells a build and no symbol"] if build is not None and not told else []
    return [*dict.fromkeys(wrong), *(f"{symbol} did not pass there" for symbol in sorted(symbols - passed(conformance)))]


def conformance_of(path: Path) -> dict[str, Any]:
    """The conformance report. BadCall for one that is altered, not whole, or of a backend without these parts."""
    document = read_report(path)
    require_intact(document, "hold others against")
    lacking = [part for part in PARTS if not document["subject"]["build"].get(part)]
    if lacking or not document["whole"]:
        raise BadCall(f"{path} tells no {lacking[0]}" if lacking else f"{path} is not of a whole run")
    return document


def said_of(conformance: dict[str, Any], path: Path) -> tuple[bool, str]:
    """Whether a report agrees, and what to print of it."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        wrong = differences(conformance, report)
    except BadCall as error:
        wrong = [str(error)]
    except (OSError, ValueError) as error:
        wrong = [f"it cannot be read: {error}"]
    return not wrong, "; ".join(wrong) or f"the same build, {len(symbols_of(report))} symbols that passed"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("conformance", type=Path, help="the report of `deepinfer hal test`")
    parser.add_argument("reports", type=Path, nargs="+", help="reports of benchmarks and checks on the same device")
    options = parser.parse_args(arguments)
    try:
        conformance = conformance_of(options.conformance)
    except BadCall as error:
        parser.error(str(error))
    found = [(path, *said_of(conformance, path)) for path in options.reports]
    print("\n".join(f"{path}: {words}" for path, _, words in found))
    return 0 if all(agrees for _, agrees, _ in found) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
