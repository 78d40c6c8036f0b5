"""Out of memory in a plain cell: the few lines that say what helps, in place of a traceback.

Our own errors render themselves. A bare allocation raises torch's class, so the shell is given a handler for it: only
once a manager is open (torch must not be imported for it), and only where the user has no handler of his own. The cell
still counts as failed, ``%tb`` and ``%debug`` still have the traceback. Takes no lock.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from vram_magic.notebook.current import open_manager

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["ShortFailures"]


class ShortFailures:
    """The handler in one shell."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._handled: tuple[type[BaseException], ...] = ()

    def install(self) -> None:
        """Sets the handler, if there is a manager and the user has set none."""
        if not self._shell.custom_exceptions and open_manager() is not None:
            from torch import OutOfMemoryError

            self._handled = (OutOfMemoryError,)
            self._shell.set_custom_exc(self._handled, _show)  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        """Takes it out, if it is still ours."""
        if self._handled and self._shell.custom_exceptions is self._handled:
            self._shell.set_custom_exc((), None)  # type: ignore[no-untyped-call]
        self._handled = ()


def _show(
    shell: InteractiveShell,
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
    tb_offset: int | None = None,
) -> None:
    """Shows the error as the shell does; only what our guard has refused, and explained, is shown short."""
    if _is_ours(error) and not hasattr(error, "_render_traceback_"):
        lines = [f"{kind.__name__}: {error}"]  # no reference to the error itself: a cycle would keep the cell's tensors
        error._render_traceback_ = lambda: lines  # type: ignore[attr-defined]
    shell.showtraceback((kind, error, trace), tb_offset=tb_offset)


def _is_ours(error: BaseException) -> bool:
    manager = open_manager()
    return manager is not None and manager.last_error is not None and str(manager.last_error) == str(error)
