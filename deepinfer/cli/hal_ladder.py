"""`deepinfer hal ladder`: how far a port has come, and what to write next."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from deepinfer.cli.options import Json
from deepinfer.cli.terminal import print_json, print_rich, table


def hal_ladder(
    backend: Annotated[str, typer.Option(help="A backend's name, with an index as in cpu:0.")],
    rung: Annotated[int | None, typer.Option(min=1, help="This rung alone; the exit status tells if it is reached.")] = None,
    as_json: Json = False,
) -> int:
    """Rungs of a port: first token, KV and attention, GEMM and MoE, communication, graphs, speed; and what is missing.

    Runs one case of each op on the device. Exit status: 0, or 1 if the rung asked for is not reached.
    """
    from deepinfer_hal.ladder import RUNGS, climb, get_rung
    from deepinfer_hal.registry import open_backend

    opened, index = open_backend(backend)
    standings = list(climb(opened, index, RUNGS if rung is None else (get_rung(rung),)))
    if as_json:
        print_json({"backend": opened.name, "device": index, "rungs": [_describe(one) for one in standings]})
    else:
        _print(f"{opened.name}:{index}", standings)
    return 1 if rung is not None and not standings[0].reached else 0


def _describe(standing: Any) -> dict[str, Any]:
    return {
        "rung": standing.rung.name,
        "goal": standing.rung.goal,
        "reached": standing.reached,
        "ops_done": standing.done,
        "ops": standing.wanted,
        "missing": list(standing.missing),
    }


def _print(title: str, standings: list[Any]) -> None:
    rows = table(title, "")
    for standing in standings:
        state = "reached" if standing.reached else "not reached"
        ops = f", {standing.done} of {standing.wanted} ops" if standing.wanted else ""
        rows.add_row(f"  {standing.rung.name}", f"{state}{ops}: {standing.rung.goal}")
        falling = [one.partition(":")[0] for one in standing.missing if one.endswith(": falls to the reference")]
        if falling:
            rows.add_row("", f"on references: {', '.join(falling)}")
        for one in standing.missing:
            if not one.endswith(": falls to the reference"):
                rows.add_row("", one)
    print_rich(rows)
