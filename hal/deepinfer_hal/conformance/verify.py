"""Checks a stored report offline: intact, from a clean tree, complete, and consistent with itself."""

from __future__ import annotations

import hmac
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepinfer_hal.conformance import report as stored
from deepinfer_hal.conformance.cases import mandatory_ids
from deepinfer_hal.conformance.host import source_digest
from deepinfer_hal.conformance.verdict import BROKEN, NOT_RUN, VERDICTS
from deepinfer_hal.errors import BadCall

NO_PROOF = (
    "A checksum shows that the file is as it was written. It is no proof of who wrote it or on which machine: "
    "whoever can edit the file can make the checksum anew. `--sign KEY` adds such a proof for holders of the key."
)


@dataclass
class Verification:
    """What was found: `problems` keep a report from verifying, `notes` do not."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        return not self.problems


def verify_report(path: str | Path, key: bytes | None = None) -> Verification:
    """Verifies the file; `key` checks its signature. Reads nothing but the file and this suite's own case list."""
    found = Verification()
    try:
        document = stored.read_report(path)
    except BadCall as error:
        found.problems.append(str(error))
        return found
    try:
        _verify_bytes(path, document, found)
        _verify_signature(document, key, found)
        _verify_suite(document, found)
        _verify_results(document, found)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        found.problems.append(f"the report is malformed: {type(error).__name__}: {error}")
    return found


def _verify_bytes(path: str | Path, document: dict[str, Any], found: Verification) -> None:
    if document.get("checksum") != stored.checksum(document):
        found.problems.append("the checksum does not match: the report was altered")
    elif Path(path).read_bytes() != stored.render(document).encode():
        found.problems.append("the file is not in the form in which the suite writes it: it was altered")


def _verify_signature(document: dict[str, Any], key: bytes | None, found: Verification) -> None:
    given = document.get("signature")
    if given is None:
        if key is not None:
            found.problems.append("a key was given, but the report is not signed")
        else:
            found.notes.append(NO_PROOF)
        return
    if key is None:
        found.problems.append(f"the report is signed with key {given['key']}; give that key to check it")
    elif set(given) != {"scheme", "key", "value"} or given["scheme"] != "hmac-sha256" or given["key"] != stored.key_id(key):
        found.problems.append(f"the signature is by key {given.get('key')}, not by the key given ({stored.key_id(key)})")
    elif not hmac.compare_digest(str(given["value"]), stored.signature(document, key)):
        found.problems.append("the signature does not match: the report was altered or signed by another key")
    else:
        found.notes.append(f"signed with key {given['key']}: made or vouched for by a holder of that key")


def _verify_suite(document: dict[str, Any], found: Verification) -> None:
    suite = document["suite"]
    if suite["commit"] is None:
        found.problems.append("the suite's commit is unknown: it did not run from a checkout")
    if suite["clean_tree"] is not True:
        found.problems.append("the suite's tree was not clean: commit the changes and run again")
    if suite["source_sha256"] != source_digest():
        found.notes.append("made by other sources of the suite than these; the mandatory list is the one of these")


def _verify_results(document: dict[str, Any], found: Verification) -> None:
    results = document["results"]
    if not document["whole"] or any(document["plan"][name] for name in ("ops", "cases", "checks")):
        found.problems.append("the run was cut to some ops, cases or checks; only a whole one verifies")
    words = Counter(result["verdict"] for result in results)
    if set(words) - set(VERDICTS) or dict(words) != document["counts"]:
        found.problems.append("the counts do not add up to the results")
    keys = Counter((result["id"], result["symbol"]) for result in results)
    if any(count > 1 for count in keys.values()):
        found.problems.append("a case has two results")
    _verify_mandatory(document, set(keys), found)
    idle = [result["id"] for result in results if result["verdict"] == NOT_RUN]
    if idle:
        found.problems.append(f"{len(idle)} cases were not run, the first is {idle[0]}")
    broken = [result["id"] for result in results if result["verdict"] in BROKEN]
    if broken or document["exit_status"]:
        found.notes.append(f"the run itself did not succeed: {len(broken)} cases broken, exit status {document['exit_status']}")


def _verify_mandatory(document: dict[str, Any], keys: set[tuple[str, str]], found: Verification) -> None:
    """Every case of every op has a verdict: on each kernel offered, or as unsupported."""
    symbols: dict[str, list[str]] = {}
    for kernel in document["subject"]["kernels"]:
        symbols.setdefault(kernel["op"], []).append(kernel["symbol"])
    if document["fallback"]["served_by_reference"]:
        symbols = {op: [f"reference::{op}"] for op in mandatory_ids()}
    missing = []
    for op, ids in mandatory_ids(document["plan"]["profile"]).items():
        for id in ids:
            if op in symbols:
                missing += [f"{id} @ {symbol}" for symbol in symbols[op] if (id, symbol) not in keys]
            elif not any(known == id for known, _ in keys):
                missing.append(id)
    if missing:
        found.problems.append(f"{len(missing)} mandatory cases are missing, the first is {missing[0]}")
