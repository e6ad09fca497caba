"""docs/ops.md says what the cards say."""

from __future__ import annotations

from pathlib import Path

from deepinfer_hal.card import all_cards
from deepinfer_hal.opdocs import page, signature_text

PAGE = Path(__file__).resolve().parents[2] / "docs" / "ops.md"


def test_the_page_of_ops_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m deepinfer_hal.opdocs docs/ops.md"


def test_every_card_has_a_section_with_its_whole_signature():
    text = page()
    for name, card in all_cards().items():
        assert f"### {name}\n" in text
        assert all(arg.name in signature_text(card) for arg in card.signature)
