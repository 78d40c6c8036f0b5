"""The errors of vram_magic: one class for each mistake or mishap a user can meet.

::

    VRAMError(Exception)
    ├── VRAMOutOfMemoryError(also torch.OutOfMemoryError)   in oom.py, since it needs torch
    ├── UnknownModelError(also KeyError)
    ├── SourceError(also ValueError)        the source cannot be read or is not a model
    ├── BackingLostError(also OSError)      the file behind an evicted model is gone, short or replaced
    └── ModelInUseError(also RuntimeError)

A message has four parts, one a line: what happened, the numbers, the cause, the command that helps.
This module knows nothing of torch, devices or notebooks, except that IPython asks an exception for
``_render_traceback_``: there the few lines are worth more than a traceback. `closest` is for their last part.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = [
    "BackingLostError",
    "ModelInUseError",
    "SourceError",
    "UnknownModelError",
    "VRAMError",
    "closed_manager",
    "closest",
]


def closest(word: str, known: Iterable[str]) -> str:
    """The one of the words that was probably meant; empty when none is alike."""
    from difflib import get_close_matches  # here: only who mistyped pays for it

    folded = {name.casefold(): name for name in known}
    alike = get_close_matches(word.casefold(), folded, n=1)
    return folded[alike[0]] if alike else ""


class VRAMError(Exception):
    """Base of all errors that vram_magic raises itself."""

    def __str__(self) -> str:
        # KeyError shows repr(args[0]), OSError looks for errno: a message of several lines wants neither.
        return str(self.args[0]) if self.args else ""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in place of a traceback."""
        return [f"{type(self).__name__}: {self}"]


def closed_manager() -> VRAMError:
    """What any call of a manager raises after its end."""
    return VRAMError(
        "This manager is closed.\nIt manages 0 models.\nmgr.close() was called, or the extension was unloaded.\n"
        "Take the current one: vram_magic.manager()"
    )


class UnknownModelError(VRAMError, KeyError):
    """No model of that name is registered."""


class SourceError(VRAMError, ValueError):
    """The source cannot be read, or what it gives is not a model."""


class BackingLostError(VRAMError, OSError):
    """The file behind an evicted model is gone, short or replaced."""


class ModelInUseError(VRAMError, RuntimeError):
    """The model is leased or pinned, so it stays where it is."""
