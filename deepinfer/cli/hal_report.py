"""`deepinfer hal verify | diff | report | table`: readers of stored conformance reports."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from deepinfer.cli.terminal import note

Stored = Annotated[Path, typer.Argument(help="A report of `hal test --report`.", show_default=False)]


def hal_verify(
    file: Stored,
    key: Annotated[Path | None, typer.Option(help="File with the key that the report was signed with.")] = None,
    sign: Annotated[Path | None, typer.Option(help="Sign the report, if it verifies, with the key in this file.")] = None,
) -> int:
    """Is a report intact, complete and from a clean tree? Offline."""
    from deepinfer_hal.conformance.report import read_report, sealed, signed, write_report
    from deepinfer_hal.conformance.verify import verify_report

    found = verify_report(file, key.read_bytes() if key else None)
    for line in found.problems:
        print(f"problem: {line}")
    for line in found.notes:
        print(f"note: {line}")
    print(f"{file}: {'verified' if found.holds else 'NOT verified'}")
    if sign is not None and found.holds:
        write_report(file, signed(sealed(read_report(file)), sign.read_bytes()))
        note(f"signed {file}")
    return 0 if found.holds else 1


def hal_diff(before: Stored, after: Stored) -> int:
    """What changed between two reports; exit 1 if a case that passed does not any more."""
    from deepinfer_hal.conformance.diff import compare_reports
    from deepinfer_hal.conformance.report import read_report

    difference = compare_reports(read_report(before), read_report(after))
    for line in difference.lines():
        print(line)
    print(f"{len(difference.regressions)} regressions, {len(difference.repairs)} repaired")
    return 1 if difference.regressions else 0


def hal_report(
    file: Stored,
    html: Annotated[bool, typer.Option("--html", help="One self-contained page.")] = False,
    out: Annotated[Path | None, typer.Option(help="File to write; default: beside the report, or standard output.")] = None,
) -> int:
    """A report for people: a summary, or with --html a page with error and bandwidth plots."""
    from deepinfer_hal.conformance.report import read_report

    document = read_report(file)
    if html:
        from deepinfer_hal.conformance.html import page

        target = out or file.with_suffix(".html")
        target.write_text(page(document), encoding="utf-8")
        note(f"wrote {target}")
        return 0
    from deepinfer_hal.conformance.verdict import CaseResult

    lines = [CaseResult.from_dict(result).line() for result in document["results"] if result["verdict"] != "pass"]
    lines.append(", ".join(f"{count} {word}" for word, count in document["counts"].items()))
    text = "\n".join(lines) + "\n"
    if out is not None:
        out.write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)
    return 0


def hal_table(
    reports: Annotated[Path, typer.Option(help="Folder with stored reports and evidence files.")] = Path("reports"),
    out: Annotated[Path, typer.Option(help="Page to write.")] = Path("docs/support.md"),
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit 1 if the page is out of date.")] = False,
) -> int:
    """Writes the support table from stored reports."""
    from deepinfer_hal.conformance.support import support_page

    from deepinfer.errors import ConfigError

    if not any(_may_show_something(path) for path in reports.glob("*.json")):
        raise ConfigError("reports", f"{reports} holds no report: give the folder of a clone's reports with --reports")
    page = support_page(reports)
    if check:
        current = out.is_file() and out.read_text(encoding="utf-8") == page
        print(f"{out} is {'up to date' if current else 'out of date: run deepinfer hal table'}")
        return 0 if current else 1
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page, encoding="utf-8")
    note(f"wrote {out}")
    return 0


def _may_show_something(path: Path) -> bool:
    """Whether a file is a report or evidence, or cannot be read, which support_page tells."""
    from deepinfer_hal.conformance.report import KIND
    from deepinfer_hal.conformance.support import EVIDENCE

    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return True
    return isinstance(document, dict) and document.get("kind") in (EVIDENCE, KIND)
