"""What a failed cell leaves behind: the frames of its traceback, whose locals hold memory of the device.

Python keeps the last exception in ``sys.last_*`` and the shell keeps its traceback once more; dropping one of them is
not enough. After a cell that ran out of memory they go when the next cell begins, before any model has to leave; the
frames of other failures are ``%debug``'s, and only the doctor offers to let go of them. What earlier failures left in
cycles, which nobody can look at any more, goes after any failed cell.

A `Debris` remembers that a cell failed, never the exception. Sizes are bytes. Takes no lock. Refuses to know
the user's variables and ``Out``: no name is deleted, and a frame that still runs, or will go on, is left alone.
"""

from __future__ import annotations

import contextlib
import gc
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from vram_magic.sizes import format_size

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from vram_magic.vram_manager import VRAMManager

__all__ = ["Debris", "failed_frames", "let_go"]

_WORTH_A_LINE = 1 << 20
_OF_PYTHON = ("last_type", "last_value", "last_traceback", "last_exc")
_OF_SHELL = ("etype", "evalue", "tb")

_LOOKS_AT_FAILURE = re.compile(
    r"""
      ^\s* (%\w+\s+)* %%? (debug|tb|pdb) \b         # a line or cell magic, or one behind another
    | \A\s* (debug|tb|pdb) \s*\Z                    # as automagic has it
    | magic\( \s* ["'] (debug|tb|pdb) | \.debugger\(  # as programs call it
    | \b pm\( | \b print_last\( | \b sys\.last_       # what the magics do
    """,
    re.VERBOSE | re.MULTILINE,
)


class Debris:
    """What failed cells of one shell left behind.

    ``keeps`` tells whether the user wants it to stay.
    """

    def __init__(self, shell: InteractiveShell, keeps: Callable[[], bool]) -> None:
        self._shell = shell
        self._keeps = keeps
        self.waits = False
        """Whether there may be some."""

    def notice(self, result: Any) -> None:
        """Told of each cell's end, with IPython's result."""
        if getattr(result, "error_in_exec", None) is not None:
            self.waits = True

    def sweep(self, cell: str, manager: VRAMManager) -> str:
        """Lets go of it when another cell begins; a line to print if much was released."""
        if _LOOKS_AT_FAILURE.search(cell):
            return ""
        for_memory = any(map(_ran_out_of_memory, _last_errors(self._shell)))
        if for_memory and self._keeps():
            return ""
        self.waits, before = False, manager.used_bytes
        if for_memory:
            let_go(self._shell)
        gc.collect()  # exceptions like to lie in cycles with the frames that caught them: those of earlier cells
        released = before - manager.used_bytes
        if not for_memory or released < _WORTH_A_LINE:
            return ""
        return f"vram_magic: released {format_size(released)} that the failed cell still held"


def failed_frames(shell: InteractiveShell) -> Iterator[FrameType]:
    """The ended frames of the last failure, and of what caused it, outermost first."""
    seen: set[int] = set()
    for trace in _last_traces(shell):
        for frame, _ in traceback.walk_tb(trace):
            if id(frame) not in seen and _has_ended(frame):
                seen.add(id(frame))
                yield frame


def let_go(shell: InteractiveShell) -> None:
    """Empties the frames of the last failure, whatever it was, and drops what refers to them."""
    for frame in failed_frames(shell):
        with contextlib.suppress(Exception):  # it lives again, or is a class body's over a mapping that fails
            frame.clear()
            _ = frame.f_locals  # before 3.13 a copy that a formatter has asked for lives on until it is renewed
    for name in _OF_PYTHON:
        vars(sys).pop(name, None)
    kept = vars(shell.InteractiveTB)
    kept.update((name, None) for name in _OF_SHELL if name in kept)


def _last_errors(shell: InteractiveShell) -> list[BaseException]:
    """The exceptions that are kept of the last failure."""
    result = shell.last_execution_result
    found = [getattr(sys, "last_exc", None), getattr(sys, "last_value", None), getattr(result, "error_in_exec", None)]
    return [error for error in found if isinstance(error, BaseException)]


def _last_traces(shell: InteractiveShell) -> Iterator[TracebackType | None]:
    for error in _last_errors(shell):
        for cause in _with_causes(error):
            yield cause.__traceback__
    yield getattr(sys, "last_traceback", None)
    yield vars(shell.InteractiveTB).get("tb")


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    """The exception, and all that led to it."""
    found, seen = [error], set()
    while found:
        error = found.pop()
        if id(error) in seen:
            continue
        seen.add(id(error))
        yield error
        found += [cause for cause in (error.__cause__, error.__context__) if cause is not None]
        found += error.exceptions if isinstance(error, BaseExceptionGroup) else ()


def _ran_out_of_memory(error: BaseException) -> bool:
    return any(map(_is_out_of_memory, _with_causes(error)))


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    # Libraries on an accelerator report it as they like; CUDA's own error is a plain RuntimeError of this wording.
    return isinstance(error, RuntimeError) and any(
        isinstance(text, str) and "out of memory" in text.lower() for text in error.args
    )


def _has_ended(frame: FrameType) -> bool:
    """Whether nobody will go on with it: only then its code and locals are its own.

    While it runs, or while its generator may still be asked for more, they belong to the thread or the generator, and
    to clear it would end the user's generator.
    """
    return any(thing is frame.f_code for thing in gc.get_referents(frame))
