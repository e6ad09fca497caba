"""The references use the aten ops of hal/ATEN_FLOOR.txt, no more and no fewer: what a chip's torch device must offer.

To write the list anew after a reference changed: `python tests/conformance/test_aten_floor.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

FLOOR_FILE = Path(__file__).resolve().parents[2] / "hal" / "ATEN_FLOOR.txt"

SEED = 20240


class RecordOps(TorchDispatchMode):
    """Collects the name of every op that is dispatched inside, without overloads."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.name().split(".")[0])
        return func(*args, **(kwargs or {}))


def ops_of_reference(card) -> set[str]:
    """Ops that the reference dispatches over all enumerated cases of its card."""
    from deepinfer_hal.weights import prepare_canonical

    recorder = RecordOps()
    for case in card.enumerate_cases():
        args = card.generate(case, SEED, torch.device("cpu"), prepare_canonical)
        with recorder:
            card.reference(**args)
    return recorder.names


def read_floor() -> list[str]:
    lines = FLOOR_FILE.read_text(encoding="ascii").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


@pytest.fixture(scope="module")
def used() -> dict[str, set[str]]:
    from deepinfer_hal.card import all_cards

    return {name: ops_of_reference(card) for name, card in all_cards().items()}


def test_every_op_that_a_reference_uses_is_listed(used):
    floor = set(read_floor())
    beyond = {card: sorted(names - floor) for card, names in used.items() if names - floor}
    assert not beyond, f"references use ops that are not in {FLOOR_FILE.name}: {beyond}"


def test_every_listed_op_is_used_by_a_reference(used):
    unused = set(read_floor()) - set().union(*used.values())
    assert not unused, f"{FLOOR_FILE.name} lists ops that no reference uses: {sorted(unused)}"


def test_the_list_is_sorted_and_names_no_op_twice():
    floor = read_floor()
    assert floor == sorted(set(floor))


def test_the_floor_asks_for_no_custom_op():
    assert all(name.startswith("aten::") for name in read_floor())


def test_an_op_outside_the_list_is_noticed():
    recorder = RecordOps()
    with recorder:
        torch.linalg.det(torch.eye(2))
    assert recorder.names - set(read_floor())


def _write_floor() -> None:
    from deepinfer_hal.card import all_cards

    names = set().union(*(ops_of_reference(card) for card in all_cards().values()))
    head = "# aten ops that the reference of every op card needs from a torch device; tests/conformance/test_aten_floor.py\n"
    FLOOR_FILE.write_text(head + "".join(f"{name}\n" for name in sorted(names)), encoding="ascii")


if __name__ == "__main__":
    _write_floor()
