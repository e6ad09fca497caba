"""`deepinfer hal prove` and `deepinfer hal explain`: candidate kernels shown right on this device, and errors in words."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from deepinfer.cli.terminal import note

_USAGE = 2


def hal_prove(
    backend: Annotated[str, typer.Option(help="A backend's name, with an index as in name:0.")],
    op: Annotated[list[str] | None, typer.Option(help="Only candidates for this op; may be repeated.")] = None,
    profile: Annotated[str, typer.Option(help="Cases to run: core or full.")] = "core",
) -> int:
    """Runs the conformance cases of kernels that are off until proven; those that pass are offered here from now on.

    A proof holds for exactly this chip, toolkit and binding. Exit 0: all were proven; 1: some were not; 2: nothing to prove.
    """
    from deepinfer_hal import proofs

    from deepinfer.errors import BackendUnavailable, BadCall

    try:
        made = proofs.prove(backend, tuple(op or ()), profile=profile)
    except (BadCall, BackendUnavailable) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return _USAGE
    for proof in made:
        print(proof.line())
    path = proofs.store(backend.partition(":")[0], made)
    note(f"wrote {path}")
    return 0 if all(proof.holds for proof in made) else 1


def hal_explain(
    text: Annotated[list[str], typer.Argument(help="An error code or message of a vendor's runtime; - reads standard input.")],
    backend: Annotated[str | None, typer.Option(help="Only what this backend knows.")] = None,
) -> int:
    """What an error of a device's runtime means, likely causes and the source. Exit 1 if no backend knows it."""
    from deepinfer_hal.registry import backend_names, load_backend

    message = sys.stdin.read() if text == ["-"] else " ".join(text)
    known = False
    for name in [backend] if backend else backend_names():
        lines = load_backend(name).explain_error(message)
        known = known or bool(lines)
        for line in lines:
            print(line)
    if not known:
        print("no backend here knows this error; send it with the report of `deepinfer hal list`", file=sys.stderr)
    return 0 if known else 1
