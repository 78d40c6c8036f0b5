"""Plain mode: the same cells print the same text, for notebooks whose saved outputs are compared.

It owns one switch for the process, `%config VRAMMagics.plain`. While it is on, times are left out of what is printed,
and no progress bars are shown. Takes no lock. Refuses to know what the text says.
"""

from __future__ import annotations

import re

__all__ = ["is_plain", "set_plain", "without_times"]

_TIME = re.compile(r"(, | \()?\b\d+(\.\d+)? m?s\b(, \d+ MB/s)?(?(1)\)?)")
_plain = False


def is_plain() -> bool:
    """Whether it is on."""
    return _plain


def set_plain(*, on: bool) -> None:
    """Switches it."""
    global _plain  # noqa: PLW0603  one for the process
    _plain = on


def without_times(text: str) -> str:
    """The text, in plain mode without how long things took: ``"a 1.0 MiB (3 ms, 350 MB/s)"`` is ``"a 1.0 MiB"``."""
    return _TIME.sub(_kept, text) if _plain else text


def _kept(found: re.Match[str]) -> str:
    """What of it is not about time: the bracket of ``"(pass 1, 3 ms)"``."""
    opened, whole = found[1] or "", found[0]
    return ")" if opened == ", " and whole.endswith(")") else ""
