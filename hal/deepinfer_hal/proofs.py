"""Proofs that a backend's candidate kernels are right here: made by `deepinfer hal prove`, read when the backend starts.

A candidate is a kernel that somebody else wrote and that may change with a release: it is offered only where its
conformance cases passed on exactly this device with exactly these versions, which is what `Backend.proof_key` tells.
One JSON file for each backend, under `$DEEPINFER_CACHE/proofs` (default ~/.cache/deepinfer/proofs).
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer_hal.errors import BackendError, BackendUnavailable, BadCall

if TYPE_CHECKING:
    from deepinfer_hal.backend import Backend
    from deepinfer_hal.conformance.verdict import CaseResult

OPENER = "deepinfer_hal.proofs:open_candidates"
_KIND, _SCHEMA = "deepinfer-hal-proofs", 1


@dataclass(frozen=True)
class Proof:
    """What came out for one candidate: verdicts counted, and the first case that did not pass.

    key: see `Backend.proof_key`. declined: cases that the kernel said No to, which no proof needs.
    """

    op: str
    symbol: str
    key: dict[str, str]
    passed: int
    failed: int
    declined: int
    first_failure: str = ""
    made: str = ""

    @property
    def holds(self) -> bool:
        """Something ran and nothing failed."""
        return self.passed > 0 and self.failed == 0

    def line(self) -> str:
        """One line for people."""
        state = "proven" if self.holds else "NOT proven"
        why = f"; {self.first_failure}" if self.first_failure else "" if self.passed else "; no case of it ran"
        counts = f"{self.passed} passed, {self.failed} failed, {self.declined} declined"
        return f"{state:10} {self.symbol} for {self.op}: {counts}{why}"


def file_of(backend: str) -> Path:
    """Where the proofs of a backend are kept."""
    return Path(os.environ.get("DEEPINFER_CACHE", "~/.cache/deepinfer")).expanduser() / "proofs" / f"{backend}.json"


def read(backend: str) -> list[Proof]:
    """All stored proofs of a backend. BackendError for a file that this release did not write."""
    path = file_of(backend)
    if not path.is_file():
        return []
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if (document["kind"], document["schema"]) != (_KIND, _SCHEMA):
            raise ValueError(f"it is {document['kind']} {document['schema']}, wanted {_KIND} {_SCHEMA}")
        return [Proof(**one) for one in document["proofs"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        way_out = "remove it and run `deepinfer hal prove` again"
        raise BackendError(f"proof file {path} cannot be read ({error}); {way_out}") from error


def store(backend: str, made: Sequence[Proof]) -> Path:
    """Keeps these proofs; an older one of the same kernel and key is replaced."""
    fresh = {(one.symbol, tuple(sorted(one.key.items()))) for one in made}
    kept = [one for one in read(backend) if (one.symbol, tuple(sorted(one.key.items()))) not in fresh]
    path = file_of(backend)
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"kind": _KIND, "schema": _SCHEMA, "proofs": [asdict(one) for one in (*kept, *made)]}
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return path


def proven_symbols(backend: str, key: Mapping[str, str]) -> frozenset[str]:
    """Symbols of the candidates that were proven for exactly this key; none for an empty one."""
    return frozenset(one.symbol for one in read(backend) if key and one.key == dict(key) and one.holds)


def with_candidates(backend: Backend) -> Backend:
    """The same backend, offering its candidates and nothing else: the subject of a proof."""
    kind = type(backend)

    class Candidates(kind):
        def kernels(self, index: int) -> Sequence[Any]:
            return self.candidates(index)

    return Candidates()


def open_candidates(spec: str) -> tuple[Backend, int]:
    """Opens a backend for a proof; what the suite's worker processes call."""
    from deepinfer_hal.registry import open_backend

    backend, index = open_backend(spec)
    return with_candidates(backend), index


def prove(spec: str, ops: Sequence[str] = (), *, profile: str = "core", opener: str = OPENER) -> list[Proof]:
    """Runs the conformance cases of a backend's candidates, in processes of their own; one proof each, not yet stored.

    ops: only these (empty: all that have a candidate). BackendUnavailable if the device has none, BadCall for an op
    without one.
    """
    from deepinfer_hal.conformance import Plan, run_suite
    from deepinfer_hal.conformance.plan import open_subject

    backend, index = open_subject(Plan(spec=spec, opener=opener))
    offered = {kernel.symbol: kernel.op for kernel in backend.candidates(index)}
    if not offered:
        state = "; ".join(f"{part}: {told}" for part, told in backend.describe_build().items())
        raise BackendUnavailable(f"{backend.name}:{index} has no candidate to prove; {state or 'it says no more'}")
    unknown = sorted(set(ops) - set(offered.values()))
    if unknown:
        raise BadCall(f"{backend.name} has no candidate for {', '.join(unknown)}; it has {', '.join(sorted(offered.values()))}")
    wanted = {symbol: op for symbol, op in offered.items() if not ops or op in ops}
    run = run_suite(Plan(spec=spec, opener=opener, profile=profile, ops=tuple(sorted(set(wanted.values())))))
    key = dict(backend.proof_key(index))
    return [_proof(op, symbol, key, [r for r in run.results if r.symbol == symbol]) for symbol, op in sorted(wanted.items())]


def _proof(op: str, symbol: str, key: dict[str, str], results: Sequence[CaseResult]) -> Proof:
    counts = {verdict: sum(result.verdict == verdict for result in results) for verdict in ("pass", "unsupported")}
    broken = [result for result in results if result.verdict not in counts]
    made = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    first = broken[0].line() if broken else ""
    return Proof(op, symbol, key, counts["pass"], len(broken), counts["unsupported"], first, made)
