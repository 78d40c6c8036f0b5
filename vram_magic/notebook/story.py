"""The story of a cell: what was in use before, after and at most, who left for it and who came back.

`Stories` owns the last hundred cells of one shell, each a frozen `CellStory` of numbers, names and journal records, so
it keeps no model and no manager. Sizes are bytes, times Unix seconds. A peak is the device's, other threads' too.
Takes no lock of its own. Refuses to know who decides, and what is printed unasked.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vram_magic.journal import Entry, entries_since
from vram_magic.sizes import format_size

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from vram_magic.journal import Arrival, Journal, Record
    from vram_magic.peaks import Lap
    from vram_magic.vram_manager import VRAMManager

__all__ = ["CellStory", "Stories", "log_lines", "stories_of"]

_KEPT = 100
_WORTH_TELLING = 2**20


@dataclass(frozen=True, slots=True)
class CellStory:
    """One cell that ran while there was a manager."""

    number: int | None
    """As in ``In [5]``; None where the cell is not in the history."""
    before_bytes: int | None
    """None when the manager was made in the cell."""
    after_bytes: int
    peak_bytes: int
    started: float
    ended: float
    records: tuple[Record, ...] = ()
    arrivals: tuple[Arrival, ...] = ()

    @property
    def eventful(self) -> bool:
        """Whether anything moved, or the use changed by more than what small tensors take."""
        floor = max(self.before_bytes or 0, self.after_bytes)
        change = abs(self.after_bytes - (self.before_bytes or 0))
        return bool(self.records or self.arrivals or max(change, self.peak_bytes - floor) >= _WORTH_TELLING)

    @property
    def name(self) -> str:
        return "a cell" if self.number is None else f"cell [{self.number}]"

    def __str__(self) -> str:
        return "\n".join([self.headline, *self._details()])

    @property
    def headline(self) -> str:
        """One line: how long it took, and what was in use."""
        before = "" if self.before_bytes is None else f"{format_size(self.before_bytes)} in use before, "
        after, peak = format_size(self.after_bytes), format_size(self.peak_bytes)
        return f"{self.name}, {self.ended - self.started:.1f} s: {before}{after} after, peak {peak}"

    def _details(self) -> Iterator[str]:
        for record in self.records:
            yield "  " + str(record).replace("\n", "\n  ")
        if self.arrivals:
            yield f"  came: {', '.join(map(str, self.arrivals))}"


class Stories:
    """The cells of one shell."""

    def __init__(self) -> None:
        self.told: deque[CellStory] = deque(maxlen=_KEPT)
        self._begun: _Begun | None = None

    def begin(self, manager: VRAMManager) -> None:
        """A cell begins."""
        self._begun = _Begun(manager)

    def end(self, manager: VRAMManager, number: int | None) -> CellStory:
        """It has ended; its story."""
        begun = self._begun
        if begun is None or begun.journal is not manager.journal:  # the manager was made in the cell
            begun = _Begun(None)
        story = begun.story(manager, number)
        self._begun = _Begun(manager)  # an empty cell, and one that ran another, end without having begun
        self.told.append(story)
        return story


class _Begun:
    """Where the journal and the device were when a cell began."""

    def __init__(self, manager: VRAMManager | None) -> None:
        self.started = time.time()
        self.journal: Journal | None = None
        self._lap: Lap | None = None
        self._record: Record | None = None
        self._arrival: Arrival | None = None
        if manager is not None:
            self.journal = manager.journal
            self._lap = manager.peaks.begin()
            self._record = _last(self.journal)
            self._arrival = _last(self.journal.arrivals)

    def story(self, manager: VRAMManager, number: int | None) -> CellStory:
        """What happened since."""
        lap, journal = self._lap, manager.journal
        return CellStory(
            number=number,
            before_bytes=None if lap is None else lap.start_bytes,
            after_bytes=manager.used_bytes,
            peak_bytes=manager.peak_bytes if lap is None else manager.peaks.end(lap),
            started=self.started,
            ended=time.time(),
            records=tuple(entries_since(list(journal), self._record)),
            arrivals=tuple(entries_since(journal.arrivals.copy(), self._arrival)),
        )


def _last(items: Sequence[Entry]) -> Entry | None:
    try:
        return items[-1]
    except IndexError:
        return None


def stories_of(shell: InteractiveShell | None) -> list[CellStory]:
    """The cells of the shell that ran since the extension was loaded, oldest first."""
    magics = None if shell is None else shell.magics_manager.registry.get("VRAMMagics")
    return [] if magics is None else list(magics.stories.told)


def log_lines(journal: Journal, stories: list[CellStory], count: int) -> list[str]:
    """The last ``count`` entries: cells in which something happened, and decisions outside of any, oldest first."""
    inside = {id(record) for story in stories for record in story.records}
    entries: list[tuple[float, str]] = [(story.ended, str(story)) for story in stories if story.eventful]
    entries += [(record.time, str(record)) for record in journal if id(record) not in inside]
    entries.sort(key=lambda entry: entry[0])
    return [text for _, text in entries[max(len(entries) - count, 0) :]]
