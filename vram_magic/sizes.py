"""Sizes: bytes to text and back.

Owns the one way a size is read and the one way it is shown. Inside the package a size is an ``int`` in
bytes; text appears only at the edge. ``GiB`` is 2**30, ``GB`` is 10**9, a bare ``G`` means ``GiB``, and a
``*_gb`` float counts units of 2**30. Takes no lock and knows nothing of the rest of the package.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from numbers import Integral, Real

__all__ = ["bytes_to_gb", "format_blocks", "format_size", "gb_to_bytes", "parse_size"]

_KIB = 2**10
_GB = 2**30
_LARGEST = 2**62  # no memory is larger, and sums of a few of them still fit 64 bits elsewhere
_PREFIXES = "KMGTPE"
_SHOWN = 60  # characters of a refused value: a mistaken argument may be a whole array
_UNITS: dict[str, int] = {
    "": 1,
    "B": 1,
    **{f"{p}B": 10 ** (3 * i) for i, p in enumerate(_PREFIXES, 1)},
    **{f"{p}IB": _KIB**i for i, p in enumerate(_PREFIXES, 1)},
    **{p: _KIB**i for i, p in enumerate(_PREFIXES, 1)},
}
_SIZE = re.compile(r"\s*([0-9]+\.?[0-9]*|\.[0-9]+)\s*([A-Za-z]*)\s*")


def parse_size(value: float | str, *, what: str = "size") -> int:
    """Bytes meant by `value`: a whole number of bytes, or text such as ``"12GiB"`` or ``"800 MB"``.

    `what` names the argument in the message of the ValueError that anything else raises.
    """
    number = _read_text(value, what) if isinstance(value, str) else _read_number(value, what)
    if number < 0:
        raise _refusal(what, value, "is negative")
    if number > _LARGEST:
        raise _refusal(what, value, "is larger than any memory")
    return number


def format_size(n: int) -> str:
    """`n` bytes as people read them: ``"512 B"``, ``"1.0 KiB"``, ``"-3.2 GiB"``."""
    if abs(n) < _KIB:
        return f"{n} B"
    power = 1
    # rounded first: 1023.96 would print as 1024.0, which belongs to the next unit
    while round(abs(n) / _KIB**power, 1) >= _KIB and power < len(_PREFIXES):
        power += 1
    return f"{n / _KIB**power:.1f} {_PREFIXES[power - 1]}iB"


def format_blocks(n: int) -> str:
    """A count of blocks: ``"1 block"``, ``"14 blocks"``."""
    return "1 block" if n == 1 else f"{n} blocks"


def gb_to_bytes(x: float) -> int:
    """Bytes in `x` units of 2**30, rounded to a whole byte; refuses what no size can be."""
    if not _is_number(x) or not 0 <= x <= _LARGEST / _GB:
        raise ValueError(f"a size in units of 2**30 bytes must be a number of 0 or more, not {x!r}; try 4.0")
    return round(float(x) * _GB)


def bytes_to_gb(n: int) -> float:
    """`n` bytes in units of 2**30."""
    return n / _GB


def _read_text(text: str, what: str) -> int:
    match = _SIZE.fullmatch(text)
    if match is None or match[2].upper() not in _UNITS:
        negative = text.lstrip().startswith("-") and _SIZE.fullmatch(text.replace("-", "", 1))
        raise _refusal(what, text, "is negative" if negative else "is not a size")
    # Decimal, not float: "0.3GB" is 300000000 bytes, and a long row of digits is too large, not an error
    unit = _UNITS[match[2].upper()]
    number = Decimal(match[1]) * unit
    if number > _LARGEST:
        raise _refusal(what, text, "is larger than any memory")
    if unit == 1 and number % 1:
        raise _refusal(what, text, "is not a whole number of bytes")
    return round(number)


def _read_number(value: object, what: str) -> int:
    if not _is_number(value):
        raise _refusal(what, value, "is not a size")
    if isinstance(value, Integral):
        return int(value)
    number = float(value)  # type: ignore[arg-type]  # _is_number proved it Real
    if not math.isfinite(number) or not number.is_integer():
        raise _refusal(what, value, "is not a whole number of bytes")
    return int(number)


def _is_number(value: object) -> bool:
    # numpy's scalars are Real without being int or float; True is an int, but never meant as a size
    return isinstance(value, Real) and not isinstance(value, bool)


def _refusal(what: str, value: object, problem: str) -> ValueError:
    shown = repr(value)
    shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
    return ValueError(f'{what}: {shown} {problem}; try "12GiB", "800MB" or a whole number of bytes')
