"""Which cases there are: from the cards, stored property-based shapes, recorded traces, and other packages.

A case id is the op with its parameters, so an id can be turned into its case again, whether or not it is in a list.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from deepinfer_hal.backend import Backend
from deepinfer_hal.card import Case, OpCard, all_cards, get_card
from deepinfer_hal.conformance.checks import Profile, get_profile
from deepinfer_hal.conformance.verdict import Waiver
from deepinfer_hal.errors import BadCall

GROUP = "deepinfer.hal_cases"

_IN_TREE = {"model": "deepinfer.hal_cases:cases"}
"""Providers of this source tree, found also when the tree is used without being installed."""

_NEXT_PARAMETER = re.compile(r",(?=[A-Za-z_]\w*=)")


@dataclass(frozen=True)
class SystemCase:
    """A case that is no single op: a whole model, a device's copies. Its id is `<name>(<parameters>)`.

    run(backend, index) raises CheckFailed, or Declined where the backend does not offer what is tested; it may return
    facts for the report. waiver: of a failure that is the case's own on every backend, not one backend's. group: cases of
    one group share what is costly to make, so one worker runs them all.
    """

    id: str
    why: str
    run: Callable[[Backend, int], dict[str, Any] | None]
    waiver: Waiver | None = None
    group: str = ""

    @property
    def op(self) -> str:
        return self.id.partition("(")[0]


def op_cases(card: OpCard, profile: str | Profile = "core") -> Iterator[Case]:
    """The cases of one card in a profile: enumerated ones, then stored property-based shapes."""
    from deepinfer_hal.conformance.shapes import stored_shapes

    yield from card.enumerate_cases()
    yield from stored_shapes(card.name)[: get_profile(profile).shapes]


def mandatory_ids(profile: str = "core") -> dict[str, list[str]]:
    """op -> ids that a complete report must have a verdict for, if the op is claimed."""
    return {name: [case.id for case in op_cases(card, profile)] for name, card in all_cards().items()}


def parse_case(id: str) -> Case:
    """The case of an id such as "linear(T=3,K=96)". BadCall when the op is unknown or the text is no id."""
    match = re.fullmatch(r"(\w+)\((.*)\)", id, flags=re.DOTALL)
    if match is None:
        raise BadCall(f"{id!r} is no case id; an id looks like linear(T=3,K=96,N=70,x=u8,w=fp8_block32,out=f32)")
    get_card(match[1])
    pairs = [part.partition("=") for part in _NEXT_PARAMETER.split(match[2])] if match[2] else []
    case = Case(match[1], {name: _value(text) for name, _, text in pairs})
    if case.id != id:
        raise BadCall(f"{id!r} is no case id; it reads as {case.id!r}")
    listed = {known.id: known for known in op_cases(get_card(case.op), "full")}
    return listed.get(id, case)


def _value(text: str) -> Any:
    words = {"True": True, "False": False, "None": None}
    if text in words:
        return words[text]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def check_ops(names: Iterable[str]) -> None:
    """BadCall with near names for the first that is neither an op nor the name of a system case."""
    known = {*all_cards(), *(case.op for case in system_cases("full"))}
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3)
            hint = f"; did you mean {', '.join(near)}?" if near else f"; `deepinfer hal list` and docs/ops.md name {len(known)}"
            raise BadCall(f"no op is named {name!r}{hint}")


def system_cases(profile: str) -> list[SystemCase]:
    """Cases of devices, of ranks, and of other packages. A provider that cannot be imported gives one failing case."""
    from deepinfer_hal.conformance.communication import communication_cases
    from deepinfer_hal.conformance.device_cases import device_cases

    found = [*device_cases(), *communication_cases()]
    entries = {name: EntryPoint(name, value, GROUP) for name, value in _IN_TREE.items()}
    entries.update({entry.name: entry for entry in entry_points(group=GROUP)})
    for name, entry in entries.items():
        try:
            found += entry.load()(profile)
        except ModuleNotFoundError as error:
            if error.name and entry.value.startswith(error.name) and name in _IN_TREE:
                continue  # the HAL is used without the layers above it
            found.append(_broken(entry, error))
        except Exception as error:
            found.append(_broken(entry, error))
    return found


def own_waivers(profile: str) -> list[Waiver]:
    """Waivers that cases bring along."""
    return [case.waiver for case in system_cases(profile) if case.waiver is not None]


def _broken(entry: EntryPoint, error: Exception) -> SystemCase:
    from deepinfer_hal.conformance.verdict import CheckFailed

    def run(backend: Backend, index: int) -> None:
        raise CheckFailed(f"{entry.value} offers no cases: {type(error).__name__}: {error}")

    return SystemCase(f"{entry.name}(import)", "Cases that a package offers can be listed.", run)
