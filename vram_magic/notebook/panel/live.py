"""The panel while it lives: a widget, and the thread that keeps it fresh.

The thread looks four times a second and sends something only when it has changed, in one message. It reads cached
figures, so it costs no survey, and it sends with no lock held. It alone sends: what a message from the browser asks for
is left for it. The panel holds the manager weakly and models by name only, so it keeps none alive. It ends when it is
closed, or its widget or manager is. Trouble in the thread never reaches a cell. Sizes are bytes. Takes no lock but the
registry's, for a list; refuses to know what the figures mean.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from IPython.core.getipython import get_ipython

from vram_magic.notebook.current import is_open, managed_models
from vram_magic.notebook.panel.clicks import Answer, Clicks
from vram_magic.notebook.panel.timeline import MOST_SENT, Timeline
from vram_magic.notebook.panel.view import CLOSED, about_of, state_of
from vram_magic.notebook.panel.widget import widget_class
from vram_magic.notebook.story import stories_of

if TYPE_CHECKING:
    from vram_magic.vram_manager import VRAMManager

__all__ = ["Panel"]

_PERIOD_S = 0.25


class Panel:
    """One manager's panel."""

    def __init__(self, manager: VRAMManager) -> None:
        widget = widget_class()
        self._manager = weakref.ref(manager)
        self._clicks = Clicks(self._manager)
        self._timeline = Timeline()
        self._since = int(time.time())
        self._ended = threading.Event()
        self._wants_history = False
        self.widget = widget(**self._now(manager))  # in the message that opens it, or a view would begin empty
        self.widget.on_msg(self._hear)
        threading.Thread(target=self._keep_fresh, name="vram-magic-panel", daemon=True).start()

    def shows(self, manager: VRAMManager) -> bool:
        """Whether it is alive and this manager's."""
        return not self._ended.is_set() and self._manager() is manager

    def refresh(self) -> None:
        """Sends what has changed. Ends the panel when there is nothing more to show."""
        manager = self._manager()
        shown = self._now(manager) if manager is not None and is_open(manager) else {}
        if self.widget.comm is None:  # the user closed the widget
            self._end()
        elif manager is None or not is_open(manager):  # asked once more: figures of one that was closing mean nothing
            self._end()
            self._send({"state": CLOSED})
        else:
            self._send(shown)
        if self._wants_history:
            self._wants_history = False
            self.widget.send({"kind": "history", "now": time.time(), "events": self._timeline.history()})

    def close(self) -> None:
        """Ends the threads and closes the widget."""
        self._end()
        layout = self.widget.layout  # a widget of its own, which nobody else closes
        self.widget.close()
        layout.close()

    def _end(self) -> None:
        self._ended.set()
        self._clicks.close()

    def _now(self, manager: VRAMManager) -> dict[str, Any]:
        """All that is shown, by trait; without what has no news."""
        models = managed_models(manager)
        shown: dict[str, Any] = {
            "about": about_of(manager, self._since),
            "state": state_of(manager, models, self._since, self._clicks.asked),
        }
        if news := self._timeline.look(manager.journal, stories_of(get_ipython())):
            shown["events"] = news[-MOST_SENT:]
        if answers := self._clicks.answers():
            shown["notice"] = _notice(answers)
        return shown

    def _send(self, shown: dict[str, Any]) -> None:
        with self.widget.hold_sync():  # one message, or none: what is equal is not sent
            for name, value in shown.items():
                setattr(self.widget, name, value)

    def _hear(self, _widget: object, content: object, _buffers: object) -> None:
        """A message from the browser, on any thread."""
        if isinstance(content, dict) and content.get("kind") == "history":
            self._wants_history = True
        else:
            self._clicks.take(content)

    def _keep_fresh(self) -> None:
        while not self._ended.wait(_PERIOD_S):
            try:
                self.refresh()
            except Exception:  # noqa: BLE001, S112  a figure missed is nothing; a printed error would land in some cell
                continue


def _notice(answers: list[Answer]) -> dict[str, Any]:
    return {
        "ids": [answer.id for answer in answers],
        "text": "\n".join(answer.text for answer in answers),
        "failed": any(answer.failed for answer in answers),
    }
