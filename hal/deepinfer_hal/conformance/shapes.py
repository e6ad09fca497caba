"""Property-based shapes: variations of a card's cases that nobody thought of, found by hypothesis and stored.

The cases lie in shapes.json with the seed that made them, so that every run and every report has the same list and an id
replays without hypothesis. `python -m deepinfer_hal.conformance.shapes --write` draws them anew, which needs hypothesis.
"""

from __future__ import annotations

import functools
import json
import sys
import zlib
from pathlib import Path
from typing import Any

from deepinfer_hal.card import Case, OpCard, all_cards
from deepinfer_hal.checks import check_call
from deepinfer_hal.errors import DeepInferError
from deepinfer_hal.weights import prepare_canonical

FILE = Path(__file__).with_name("shapes.json")
SEED = 20260717
PER_OP = 24

_LARGEST_ELEMENTS = 4_000_000
"""Elements of all tensors of a drawn case together: cases stay fast."""

_EDGES = (1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65)
"""Row counts around the tile sizes of kernels."""

_ROWS = ("T", "rows", "S", "R", "M")
_GEMMS = ("linear", "grouped_linear", "grouped_gemm")


@functools.cache
def _stored() -> dict[str, list[dict[str, Any]]]:
    return json.loads(FILE.read_text(encoding="utf-8"))["cases"] if FILE.exists() else {}


def stored_shapes(op: str) -> list[Case]:
    """The stored property-based cases of an op."""
    return [Case(op, params) for params in _stored().get(op, [])]


def draw(card: OpCard, count: int, seed: int) -> list[Case]:
    """Up to `count` distinct legal cases of a card. DeepInferError if hypothesis is not installed."""
    try:
        import hypothesis
        from hypothesis import HealthCheck, Phase, settings
    except ImportError as error:
        raise DeepInferError("drawing shapes needs hypothesis: pip install hypothesis") from error
    known = {case.id for case in card.enumerate_cases()}
    found: dict[str, Case] = {}

    def collect(params: dict[str, Any]) -> None:
        case = Case(card.name, params)
        if len(found) < count and case.id not in known and case.id not in found and _is_legal(card, case):
            found[case.id] = case

    run = hypothesis.given(_parameters(card))(collect)
    run = settings(
        max_examples=6 * count, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )(run)  # fmt: skip
    hypothesis.seed(seed)(run)()
    return list(found.values())


def _parameters(card: OpCard) -> Any:
    """A strategy for the parameters of a case: an enumerated one with other rows, counts and free sizes."""
    from hypothesis import strategies as st

    bases = [dict(case.params) for case in card.enumerate_cases()]
    bases = [base for base in bases if all(base.get(name) != 0 for name in _ROWS) and base.get("requests", "-") != ""]
    row_counts = st.one_of(st.sampled_from(_EDGES), st.integers(1, 70))
    request = st.tuples(st.one_of(st.sampled_from((0, 1, 63, 127, 128, 129, 255)), st.integers(0, 400)), st.integers(1, 20))

    @st.composite
    def parameters(draw: Any) -> dict[str, Any]:
        params = dict(draw(st.sampled_from(bases)))
        for name in params:
            if name in _ROWS and not (name == "M" and card.name == "plan_verify_lengths") and isinstance(params[name], int):
                params[name] = draw(row_counts)
        if "requests" in params:
            params["requests"] = ",".join(f"{first}+{n}" for first, n in draw(st.lists(request, min_size=1, max_size=4)))
        if "anchors" in params:
            params["anchors"] = ",".join(map(str, draw(st.lists(st.integers(0, 500), min_size=1, max_size=4))))
        rows = next((params[name] for name in _ROWS if isinstance(params.get(name), int)), None)
        for name in ("count", "rows"):
            if name in params and rows is not None and name != "rows" or (name == "rows" and card.name == "swiglu_quantise"):
                if name in params:
                    params[name] = draw(st.integers(0, rows or 1))
        _draw_sizes(draw, card, params)
        return params

    return parameters()


def _draw_sizes(draw: Any, card: OpCard, params: dict[str, Any]) -> None:
    """Sizes that an op takes freely: widths of GEMMs, vocabularies, score columns."""
    from hypothesis import strategies as st

    if card.name in _GEMMS:
        step = 32 if "u8" in (params.get("out"), params.get("x")) or params.get("w") != "bf16" else 1
        params["N"] = draw(st.integers(1, 8 if step == 32 else 200)) * step
        params["K"] = draw(st.integers(1, 12)) * 32
    if "V" in params and params["V"] > 64 and card.name != "markov_logits":
        params["V"] = draw(st.integers(max(int(params.get("k", 1)), 65), 5000))
    if "columns" in params and params["columns"] > 1 and not params.get("candidates"):
        params["columns"] = draw(st.integers(1, 1500))
    if card.name in ("quantise", "dequantise", "rms_norm", "swiglu_quantise"):
        name = "I" if "I" in params else "N"
        params[name] = draw(st.integers(1, 24)) * 32


def _is_legal(card: OpCard, case: Case) -> bool:
    """Whether the card can make the case, small enough, and its reference runs it."""
    try:
        args = card.generate(case, 0, "cpu", prepare_canonical)
        check_call(card, args)
        if sum(v.numel() for v in args.values() if hasattr(v, "numel")) > _LARGEST_ELEMENTS:
            return False
        card.reference(*args.values())
    except Exception:
        return False
    return True


def main(arguments: list[str]) -> int:
    """Draws all shapes and writes shapes.json."""
    if arguments != ["--write"]:
        print("usage: python -m deepinfer_hal.conformance.shapes --write", file=sys.stderr)
        return 2
    cases = {}
    for name, card in sorted(all_cards().items()):
        if card.group == "communication":
            continue  # its shapes depend on a world of ranks
        cases[name] = [dict(case.params) for case in draw(card, PER_OP, SEED ^ zlib.crc32(name.encode()))]
        print(f"{name}: {len(cases[name])}")
    parts = []
    for name, drawn in cases.items():
        lines = ",\n".join(f"   {json.dumps(params)}" for params in drawn)
        parts.append(f"  {json.dumps(name)}: [\n{lines}\n  ]")
    text = ",\n".join(parts)
    FILE.write_text(f'{{"seed": {SEED}, "cases": {{\n{text}\n }}}}\n', encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
