"""The stored result of a run: one JSON document in one exact rendering, with a checksum over every byte of it."""

from __future__ import annotations

import datetime
import hashlib
import hmac
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepinfer_hal.conformance.host import describe_host, describe_suite
from deepinfer_hal.conformance.runner import Run
from deepinfer_hal.conformance.shapes import SEED
from deepinfer_hal.conformance.verdict import UNSUPPORTED
from deepinfer_hal.errors import BadCall

KIND = "deepinfer-hal-report"
SCHEMA = 1

_UNSEALED = ("checksum", "signature")

Report = Mapping[str, Any]


def make_report(run: Run) -> dict[str, Any]:
    """The document of a run, sealed."""
    unserved = sorted({r.op for r in run.results if r.verdict == UNSUPPORTED and not r.provider})
    document = {
        "kind": KIND,
        "schema": SCHEMA,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "suite": describe_suite(),
        "host": describe_host(),
        "subject": run.subject,
        "plan": run.plan.to_dict(),
        "whole": run.plan.whole,
        "seeds": {"cases": run.plan.seed, "shapes": SEED},
        "fallback": {"mode": "forbid", "ops_without_kernel": unserved, "served_by_reference": run.plan.reference},
        "counts": run.counts(),
        "waiver_problems": run.waiver_problems,
        "exit_status": run.exit_status(),
        "seconds": round(run.seconds, 3),
        "jobs": run.jobs,
        "resumed": run.resumed,
        "results": [result.to_dict() for result in run.results],
    }
    return sealed(document)


def render(document: Report) -> str:
    """The one text of a document: any other text, even with the same content, is not what the suite wrote."""
    return json.dumps(document, indent=1, sort_keys=True) + "\n"


def checksum(document: Report) -> str:
    """SHA-256 of the rendering without checksum and signature."""
    text = render({name: value for name, value in document.items() if name not in _UNSEALED})
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def sealed(document: Report) -> dict[str, Any]:
    """The document with its checksum, and without a signature."""
    bare = {name: value for name, value in document.items() if name not in _UNSEALED}
    return {**bare, "checksum": checksum(bare)}


def signed(document: Report, key: bytes) -> dict[str, Any]:
    """The document with a signature by whoever holds `key`. BadCall for a key of less than 16 bytes."""
    return {**document, "signature": {"scheme": "hmac-sha256", "key": key_id(key), "value": signature(document, key)}}


def signature(document: Report, key: bytes) -> str:
    """HMAC-SHA256 of the checksum. BadCall for a key that is too short to keep a secret."""
    if len(key) < 16:
        raise BadCall(f"a signing key needs at least 16 bytes, this one has {len(key)}")
    return hmac.new(key, str(document["checksum"]).encode(), hashlib.sha256).hexdigest()


def key_id(key: bytes) -> str:
    """A name for a key that does not give it away."""
    return hashlib.sha256(b"deepinfer-hal-key\0" + key).hexdigest()[:16]


def check_writable(path: str | Path) -> None:
    """BadCall if a report could not be stored there, told before the hours that it takes to make one. Makes its folder."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        there = path.exists()
        path.open("a", encoding="utf-8").close()
        if not there:
            path.unlink()
    except OSError as error:
        raise BadCall(f"report {path} cannot be written: {error.strerror}; name a file in a folder that can be") from None


def write_report(path: str | Path, document: Report) -> None:
    """Stores the rendering; BadCall if the file cannot be written."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(render(document), encoding="utf-8")
    except OSError as error:
        raise BadCall(f"report {path} cannot be written: {error.strerror}") from None


def require_intact(document: Report, use: str) -> None:
    """BadCall for a document that is not as the suite wrote it; `use`: what it was given for."""
    if document.get("checksum") != checksum(document):
        raise BadCall(f"the report to {use} was altered, its checksum does not match: give it as the suite wrote it, or none")


def read_report(path: str | Path) -> dict[str, Any]:
    """A stored document, unverified. BadCall if the file is no report that this suite can read."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadCall(f"report {path} cannot be read: {error}") from None
    if not isinstance(document, dict) or document.get("kind") != KIND:
        raise BadCall(f"{path} is no report of `deepinfer hal test --report`")
    if document.get("schema") != SCHEMA:
        raise BadCall(f"report {path} has schema {document.get('schema')}, this suite reads {SCHEMA}")
    return document
