"""Clicks: what the browser asks for, carried out one by one by a thread that does nothing else.

A message may come on the main thread after a cell or on another one in the middle of a cell, so `take` only queues it.
Front ends may send a message twice, so each number counts once. Whatever goes wrong becomes the text of the answer;
nothing is raised or printed. It knows names only and holds the manager weakly, but for the time of one request. Sizes
are bytes, shown as text. Takes a leaf lock of its own, for its lists; refuses to know how anything is done.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from vram_magic.errors import VRAMError
from vram_magic.notebook.current import is_open
from vram_magic.sizes import format_size, parse_size

if TYPE_CHECKING:
    from vram_magic.vram_manager import VRAMManager

__all__ = ["Answer", "Click", "Clicks"]

_MOST_REMEMBERED = 1000  # numbers of clicks
_LONGEST = 200  # characters of a name, as the manager allows them, and of a value
_LONGEST_ANSWER = 4000  # characters


@dataclass(frozen=True, slots=True)
class Click:
    """One request."""

    id: int
    kind: str
    name: str = ""
    value: str = ""

    @classmethod
    def read(cls, content: object) -> Self | None:
        """The request in a message, or None when it is none."""
        if not isinstance(content, dict):
            return None
        number, kind = content.get("id"), content.get("kind")
        name, value = content.get("name", ""), content.get("value", "")
        if not isinstance(number, int) or isinstance(number, bool) or kind not in list(_ACTIONS):
            return None
        if not all(isinstance(text, str) and len(text) <= _LONGEST and text.isprintable() for text in (name, value)):
            return None
        return cls(number, kind, name, value)


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a click."""

    id: int
    text: str
    failed: bool = False


class Clicks:
    """The queue of one panel, and the thread that works it off, started by the first click."""

    def __init__(self, manager: Callable[[], VRAMManager | None]) -> None:
        self._manager = manager
        self._lock = threading.Lock()
        self._waiting: deque[Click] = deque()
        """The first one is being carried out."""
        self._known: dict[int, None] = {}
        self._answers: list[Answer] = []
        self._thread: threading.Thread | None = None
        # Not a Condition: an interrupt in the middle of a lock that is written in Python would leave it held.
        self._queue: queue.SimpleQueue[Click | None] = queue.SimpleQueue()
        self._closed = False

    def take(self, content: object) -> None:
        """Queues the request of a message; ignores what is none, and what was there before."""
        click = Click.read(content)
        if click is None:
            return
        with self._lock:
            if self._closed or click.id in self._known:
                return
            self._known[click.id] = None
            if len(self._known) > _MOST_REMEMBERED:
                del self._known[next(iter(self._known))]
            self._waiting.append(click)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="vram-magic-clicks", daemon=True)
                self._thread.start()
            self._queue.put(click)

    @property
    def asked(self) -> dict[str, str]:
        """By model, the kind of the first request that is not done."""
        with self._lock:
            return {click.name: click.kind for click in reversed(self._waiting)}

    def answers(self) -> list[Answer]:
        """The answers since the last call."""
        with self._lock:
            answers, self._answers = self._answers, []
        return answers

    def close(self) -> None:
        """Ends the thread after what it is doing; what still waits is not done any more."""
        with self._lock:
            self._closed = True
            self._queue.put(None)

    def _work(self) -> None:
        while (click := self._queue.get()) is not None and not self._closed:
            answer = self._answer(click)
            with self._lock:
                self._waiting.popleft()
                self._answers.append(answer)

    def _answer(self, click: Click) -> Answer:
        try:
            text, failed = _ACTIONS[click.kind](self._open_manager(), click), False
        except (VRAMError, ValueError) as error:
            text, failed = str(error), True
        except BaseException as error:  # noqa: BLE001  a backend may raise anything, and there is nobody above
            text, failed = f"{click.kind} {click.name} failed. {_text_of(error)}", True
        return Answer(click.id, text[:_LONGEST_ANSWER], failed)

    def _open_manager(self) -> VRAMManager:
        manager = self._manager()
        if manager is None or not is_open(manager):
            raise VRAMError("The manager was closed.")
        return manager


def _text_of(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001  its text is somebody's code, too
        return type(error).__name__


# ------------------------------------------------------------------------------------------------------- the actions


def _load(manager: VRAMManager, click: Click) -> str:
    handle = manager[click.name].load()
    return f"{click.name}: {format_size(handle.device_bytes)} on the device"


def _evict(manager: VRAMManager, click: Click) -> str:
    handle = manager[click.name]
    text = f"{click.name}: freed {format_size(handle.evict())}"
    if kept := handle.device_bytes:
        return f"{text}, keeps {format_size(kept)} on the device:\n{handle.why()}"
    return text


def _pin(manager: VRAMManager, click: Click) -> str:
    manager[click.name].pin()
    return f"{click.name}: pinned"


def _unpin(manager: VRAMManager, click: Click) -> str:
    manager[click.name].unpin()
    return f"{click.name}: not pinned any more"


def _tier(manager: VRAMManager, click: Click) -> str:
    handle, tier = manager[click.name], click.value
    handle.tier = int(tier) if tier not in manager.tiers and tier.lstrip("-").isdecimal() else tier
    return f"{click.name}: tier {handle.tier}"


def _plan(manager: VRAMManager, click: Click) -> str:
    size = parse_size(click.value)
    return f"A request of {format_size(size)}: {manager.plan(size)}"


_ACTIONS: dict[str, Callable[[Any, Click], str]] = {
    "load": _load,
    "evict": _evict,
    "pin": _pin,
    "unpin": _unpin,
    "tier": _tier,
    "plan": _plan,
}
