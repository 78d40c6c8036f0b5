"""The live panel: the report in a widget, refreshed while cells run, with buttons.

There is one panel in a kernel, shown any number of times; this module owns it. `live` keeps it fresh, `view` and
`timeline` say what is sent, `clicks` carries out what is clicked, `widget` is what travels to the browser, and
panel.js draws it. Importing this imports no widgets. Takes no lock; refuses to know figures.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vram_magic.notebook.panel.live import Panel

if TYPE_CHECKING:
    from vram_magic.vram_manager import VRAMManager

__all__ = ["Panel", "close_panel", "open_panel"]

_panel: Panel | None = globals().get("_panel")  # survives a reload of this module, or its threads would be orphaned


def open_panel(manager: VRAMManager) -> Any:
    """The kernel's panel widget, made at the first call. Raises `VRAMError` without anywidget or ipywidgets."""
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
