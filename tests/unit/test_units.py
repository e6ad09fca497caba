"""Numbers as people write and read them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.units import format_bytes, format_count, human_int


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0), ("4096", 4096), (4096, 4096), ("4k", 4096), ("4K", 4096), (" 4 k ", 4096), ("1.5M", 3 << 19),
        ("16GiB", 16 << 30), ("2T", 2 << 40), ("0.5k", 512),
    ],
)  # fmt: skip
def test_human_sized_numbers_are_powers_of_1024(text, value):
    assert human_int(text) == value


@pytest.mark.parametrize(
    "text", ["", "k", "-1", -1, "4kb", "4 096", "1e3", "0.3k", "1.5", "٤", True, "9" * 40, "4kk", "1_000"]
)
def test_anything_else_is_refused(text):
    with pytest.raises(ValueError):
        human_int(text)


@given(st.integers(0, 1 << 62))
def test_digits_are_taken_exactly(value):
    assert human_int(str(value)) == value


def test_bytes_have_a_binary_unit():
    shown = {0: "0 B", 1023: "1023 B", 1536: "1.50 KiB", 510286023000: "475.24 GiB", 1 << 51: "2048.00 TiB"}
    assert {nbytes: format_bytes(nbytes) for nbytes in shown} == shown


def test_counts_have_a_decimal_unit():
    shown = {0: "0", 999: "999", 1000: "1.0 k", 15_250_000: "15.2 M", 999_999: "1.0 M", 551_900_000_000: "552 G"}
    assert {count: format_count(count) for count in shown} == shown
