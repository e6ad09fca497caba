"""Writes docs/ops.md from the op cards: `python -m deepinfer_hal.opdocs docs/ops.md` (standard output without a path)."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path

from deepinfer_hal.card import Arg, OpCard, all_cards

_GROUPS = ("input", "attention", "gemm", "moe", "residual", "draft", "sampling", "state", "step", "communication")

_HEAD = """# Ops of the HAL

Made from the op cards by `python -m deepinfer_hal.opdocs docs/ops.md`; edit the card, not this page.

Signatures are in calling order. `name: dtype[dims]` is an input tensor, `-> name` an output that the caller allocates,
`<-> name` a tensor updated in place, `W name[dims]` a weight handle, `?` an argument that may be None. Of the dtypes,
`stream` is bf16 or f32, `act` is stream or u8 codes of a row format, `float` any of bf16 and f32, `number` also i32, `any` also
u8 and i64. `count` is the device count of valid rows: outputs of rows past it stay untouched. `comm` is a Communicator of
`world` ranks, each of which makes the same call.

"""


def signature_text(card: OpCard) -> str:
    """The signature on one line per argument kind, as docs/ops.md explains it."""
    return ", ".join(_argument(arg) for arg in card.signature)


def _argument(arg: Arg) -> str:
    optional = "?" if arg.optional else ""
    dims = f"[{', '.join(arg.dims)}]"
    if arg.kind == "weight":
        return f"W {arg.name}{dims}{optional}"
    if arg.kind == "comm":
        return arg.name
    if not arg.is_tensor:
        return f"{arg.name}: {arg.kind}"
    arrow = {"in": "", "out": "-> ", "inout": "<-> "}[arg.kind]
    return f"{arrow}{arg.name}: {arg.dtype}{dims}{optional}"


def tolerance_text(card: OpCard) -> str:
    """"exact", or the first line of what the tolerance formula says of itself, or its name."""
    default = next(field.default for field in fields(OpCard) if field.name == "tolerance")
    if card.tolerance is default:
        return "exact"
    words = (card.tolerance.__doc__ or "").strip().splitlines()
    return words[0] if words else "FP32 sums in any order, then one rounding (see the card)"


def card_text(card: OpCard) -> str:
    """One card as a section of the page."""
    facts = [
        ("rounding", card.rounding),
        ("empty", card.empty),
        ("invariance", f"{card.invariance} (reference: {card.reference_invariant})"),
        ("tolerance", tolerance_text(card)),
    ]
    if card.discrete:
        facts.append(("discrete outputs", ", ".join(card.discrete)))
    if card.decomposition:
        facts.append(("composite of", ", ".join(card.decomposition)))
    lines = [f"### {card.name}", "", card.summary, "", "```", f"{card.name}({signature_text(card)})", "```", ""]
    lines += [f"- {name}: {text}" for name, text in facts]
    return "\n".join(lines) + "\n"


def page() -> str:
    """The whole of docs/ops.md: an overview table, then every card by group."""
    by_group: dict[str, list[OpCard]] = {}
    for card in all_cards().values():
        by_group.setdefault(card.group, []).append(card)
    order = sorted(by_group, key=lambda group: (_GROUPS.index(group) if group in _GROUPS else len(_GROUPS), group))
    rows = ["| group | ops |", "|---|---|"]
    sections = []
    for group in order:
        cards = sorted(by_group[group], key=lambda card: card.name)
        rows.append(f"| {group} | {', '.join(f'[{card.name}](#{card.name})' for card in cards)} |")
        sections.append(f"## {group}\n\n" + "\n".join(card_text(card) for card in cards))
    return _HEAD + "\n".join(rows) + "\n\n" + "\n".join(sections)


def main(arguments: list[str]) -> int:
    """Prints the page, or writes it to the given path."""
    if len(arguments) > 1:
        print("usage: python -m deepinfer_hal.opdocs [PATH]", file=sys.stderr)
        return 2
    if arguments:
        Path(arguments[0]).write_text(page(), encoding="utf-8")
    else:
        sys.stdout.write(page())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
