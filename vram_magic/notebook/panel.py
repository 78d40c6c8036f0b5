"""The live panel: the report in a widget, refreshed while cells run.

There is one panel in a kernel, shown any number of times. A thread of its own looks four times a second and sends
something only when the text has changed; it reads cached figures, so it costs no survey, and it sends with no lock
held. The panel holds the manager weakly and names only, so it keeps no model alive. It ends when it is closed, or its
manager is. Trouble in the thread never reaches a cell. Takes no lock but the registry's, for a list.
"""

from __future__ import annotations

import functools
import threading
import weakref
from typing import TYPE_CHECKING, Any

from vram_magic.errors import VRAMError
from vram_magic.notebook.current import is_open
from vram_magic.notebook.report import Report

if TYPE_CHECKING:
    from vram_magic.vram_manager import VRAMManager

__all__ = ["Panel", "close_panel", "open_panel"]

_PERIOD_S = 0.25
_panel: Panel | None = globals().get("_panel")  # survives a reload of this module, or its thread would be orphaned


def open_panel(manager: VRAMManager) -> Any:
    """The kernel's panel widget, made at the first call. Raises `VRAMError` without ipywidgets."""
    global _panel  # noqa: PLW0603  one per kernel
    if _panel is None or not _panel.shows(manager):
        close_panel()
        _panel = Panel(manager)
    return _panel.widget


def close_panel() -> None:
    """Takes the panel off the screen, if there is one."""
    global _panel  # noqa: PLW0603
    if _panel is not None:
        _panel.close()
        _panel = None


class Panel:
    """A widget and the thread that keeps it fresh."""

    def __init__(self, manager: VRAMManager) -> None:
        self.widget = _widget_class()()
        self._manager = weakref.ref(manager)
        self._shown = ""
        self._ended = threading.Event()
        self.refresh()
        threading.Thread(target=self._keep_fresh, name="vram-magic-panel", daemon=True).start()

    def shows(self, manager: VRAMManager) -> bool:
        """Whether it is alive and this manager's."""
        return not self._ended.is_set() and self._manager() is manager

    def refresh(self) -> None:
        """Sends the report if it changed. Ends the panel when there is nothing more to show."""
        manager = self._manager()
        if self.widget.comm is None:  # the user closed the widget
            self._ended.set()
        elif manager is None or not is_open(manager):
            self._ended.set()
            self.widget.value = "<i>The manager was closed.</i>"
        elif (text := repr(report := Report.of(manager))) != self._shown:
            self._shown = text
            self.widget.value = report._repr_html_()

    def close(self) -> None:
        """Ends the thread and closes the widget."""
        self._ended.set()
        self.widget.close()

    def _keep_fresh(self) -> None:
        while not self._ended.wait(_PERIOD_S):
            try:
                self.refresh()
            except Exception:  # noqa: BLE001  a figure missed is nothing; a printed error would land in some cell
                self._shown = ""


@functools.cache
def _widget_class() -> Any:
    try:
        from ipywidgets import HTML
    except ImportError as error:
        raise VRAMError(
            "The panel cannot be shown.\n0 panels are open.\n"
            f"It needs ipywidgets, which cannot be imported: {error}\n"
            "%pip install ipywidgets   (%vram shows the same without it)"
        ) from error

    class PanelWidget(HTML):  # type: ignore[misc]
        """Shown by its text where the widget is dead, as in a saved notebook: constant, so that outputs compare."""

        def __repr__(self) -> str:
            return "<vram_magic panel: live while its kernel runs; %vram is the report to keep>"

    return PanelWidget
