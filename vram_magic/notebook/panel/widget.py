"""The widget: the four things that travel to the browser, and the script and style that draw them.

It holds numbers, names and texts only, so a widget that somebody keeps keeps no model. Sizes in it are bytes. The class
is made at first use, since anywidget and ipywidgets are slow to import. Takes no lock; refuses to know where its values
come from.
"""

from __future__ import annotations

import functools
from importlib.resources import files
from typing import Any

from vram_magic.errors import VRAMError

__all__ = ["widget_class"]


@functools.cache
def widget_class() -> Any:
    """The class of the panel's widget. Raises `VRAMError` without anywidget or ipywidgets."""
    try:
        import ipywidgets  # noqa: F401  anywidget may have been imported before ipywidgets broke
        from anywidget import AnyWidget
        from traitlets import Dict, List
    except ImportError as error:
        raise VRAMError(
            "The panel cannot be shown.\n0 panels are open.\n"
            f"It needs anywidget and ipywidgets, and one cannot be imported: {error}\n"
            "%pip install anywidget ipywidgets   (%vram shows the same without them)"
        ) from error

    folder = files("vram_magic.notebook.panel")

    class PanelWidget(AnyWidget):
        """Shown by its text where the widget is dead, as in a saved notebook: constant, so that outputs compare."""

        _esm = (folder / "panel.js").read_text(encoding="utf-8")
        _css = (folder / "panel.css").read_text(encoding="utf-8")

        about = Dict().tag(sync=True)
        """What hardly ever changes; see `view.about_of`."""
        state = Dict().tag(sync=True)
        """The figures, whole; see `view.state_of`."""
        events: Any = List().tag(sync=True)
        """The newest marks of the timeline; see `timeline`. A view asks for the older ones by a message."""
        notice = Dict().tag(sync=True)
        """The result of the last clicks; see `clicks`."""

        def __repr__(self) -> str:
            return "<vram_magic panel: live while its kernel runs; %vram is the report to keep>"

    return PanelWidget
