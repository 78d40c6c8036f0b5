"""Sizes read and shown.

Without these a budget of "12GB" could silently mean 12 GiB, and a mistyped one could pass for another.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vram_magic.sizes import bytes_to_gb, format_blocks, format_size, gb_to_bytes, parse_size

pytestmark = pytest.mark.cpu_only("no device")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("12GiB", 12 * 2**30),
        ("800MB", 800 * 10**6),
        ("1.5 GB", 1_500_000_000),
        ("64 MiB", 64 * 2**20),
        ("4096", 4096),
        ("4096 B", 4096),
        ("10kB", 10_000),
        ("  2tib ", 2 * 2**40),
        ("1TB", 10**12),
        ("3G", 3 * 2**30),
        ("3m", 3 * 2**20),
        ("3K", 3 * 2**10),
        (".5MiB", 2**19),
        ("0", 0),
        ("0.3GB", 300_000_000),  # as a float 0.3 * 10**9 is a hair below
    ],
)
def test_a_size_is_read_from_text(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_whole_numbers_pass() -> None:
    assert parse_size(5) == 5
    assert parse_size(2.0**31) == 2**31
    assert type(parse_size(5.0)) is int


@pytest.mark.parametrize(
    "value",
    [-1, -1.0, 1.5, True, False, math.nan, math.inf, -math.inf, 2**62 + 1, 1e300, None, [1], b"1GiB"],
)
def test_numbers_that_are_no_size_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match=r"budget: .* try"):
        parse_size(value, what="budget")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GiB",
        "-1GiB",
        "1.5",
        "1,5GB",
        "1 2GB",
        "1e3",
        "nan",
        "inf",
        "12GiBB",
        "1 GiB x",
        "٣GB",
        "9" * 5000,
    ],
)
def test_text_that_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"budget: .* try"):
        parse_size(text, what="budget")


def test_a_refusal_names_what_the_value_and_an_example_that_works() -> None:
    with pytest.raises(ValueError, match="budget") as caught:
        parse_size("-3GiB", what="budget")
    assert str(caught.value) == 'budget: \'-3GiB\' is negative; try "12GiB", "800MB" or a whole number of bytes'


def test_the_largest_size_still_passes() -> None:
    assert parse_size(2**62) == parse_size("4EiB") == 2**62


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (2**20 - 1, "1.0 MiB"),  # not 1024.0 KiB
        (int(3.2 * 2**30), "3.2 GiB"),
        (-1024, "-1.0 KiB"),
        (-5, "-5 B"),
        (2**62, "4.0 EiB"),
        (2**75, "32768.0 EiB"),
    ],
)
def test_a_size_is_shown_in_one_form(size: int, text: str) -> None:
    assert format_size(size) == text


@given(st.integers(0, 2**62))
def test_what_is_shown_reads_back_within_a_twentieth_of_its_unit(size: int) -> None:
    shown = format_size(size)
    unit = parse_size(f"1{shown.split()[1]}")
    assert abs(parse_size(shown) - size) <= unit * 0.0501


def test_blocks_are_counted_in_english() -> None:
    assert [format_blocks(n) for n in (0, 1, 14)] == ["0 blocks", "1 block", "14 blocks"]


@given(st.integers(0, 2**50))
def test_gb_is_a_unit_of_two_to_the_thirty(size: int) -> None:
    assert gb_to_bytes(bytes_to_gb(size)) == size
    assert gb_to_bytes(1) == 2**30
    assert bytes_to_gb(-(2**29)) == -0.5


@pytest.mark.parametrize("x", [-0.1, math.nan, math.inf, True, "4", None, 1e30, 10**400])
def test_gb_that_are_no_size_are_refused(x: float) -> None:
    with pytest.raises(ValueError, match="try"):
        gb_to_bytes(x)
