"""The timeline: what left and what came back in the last minutes, as marks with their reason.

All is read from the journal, each entry once, and from the stories of the cells. An event is ``[number, second, kind,
name, text]``: numbers count up by one, seconds are Unix seconds, the kind is ``"out"``, ``"in"``, ``"no"`` (room was
refused) or ``"cell"`` (one in which something happened has ended). It keeps texts and the
last entries of the journal, never a model. Sizes are bytes, shown as text. Takes no lock: one thread looks. Refuses to
know who decides.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from vram_magic.journal import entries_since
from vram_magic.notebook.report import shortened
from vram_magic.sizes import format_blocks, format_size

if TYPE_CHECKING:
    from vram_magic.journal import Arrival, Journal, Record, StepTaken
    from vram_magic.notebook.story import CellStory

__all__ = ["MOST_SENT", "SHOWN_S", "Event", "Timeline"]

Event = list[Any]

SHOWN_S = 300
"""How far back the timeline goes."""
MOST_SENT = 6
"""Events in one refresh; a view that finds a gap in the numbers asks for all."""
_MOST_KEPT = 200


class Timeline:
    """The events of one manager, as far as one panel has seen them."""

    def __init__(self) -> None:
        self._kept: deque[Event] = deque(maxlen=_MOST_KEPT)
        self._number = 0
        self._record: Record | None = None
        self._arrival: Arrival | None = None
        self._story: CellStory | None = None
        """The last entries that were seen."""

    def look(self, journal: Journal, stories: Sequence[CellStory] = ()) -> list[Event]:
        """What happened since the last look; at the first, what the journal tells of the last minutes."""
        oldest = time.time() - SHOWN_S
        untold = [*self._untold(journal), *self._cells(stories)]
        told = sorted((event for event in untold if event[0] > oldest), key=lambda event: event[0])
        new = [[self._number + n, int(moment), *rest] for n, (moment, *rest) in enumerate(told, 1)]
        self._number += len(new)
        self._kept += new
        return new

    def history(self) -> list[Event]:
        """Everything of the last minutes."""
        oldest = time.time() - SHOWN_S
        return [event for event in self._kept if event[1] > oldest]

    def _untold(self, journal: Journal) -> list[Event]:
        records = entries_since(journal[:], self._record)
        arrivals = entries_since(journal.arrivals.copy(), self._arrival)
        self._record = records[-1] if records else self._record
        self._arrival = arrivals[-1] if arrivals else self._arrival
        return [event for record in records for event in _events_of(record)] + list(map(_arrival, arrivals))

    def _cells(self, stories: Sequence[CellStory]) -> list[Event]:
        new = entries_since(stories, self._story)
        self._story = stories[-1] if stories else None
        return [[story.ended, "cell", story.name, story.headline] for story in new if story.eventful]


def _events_of(record: Record) -> Iterator[Event]:
    for step in record.left:
        if step.bytes:
            yield [record.time, "out", step.model, _departure(step, record.asked_by)]
    if not record.left and record.need_bytes > record.had_bytes:
        needed, had = format_size(record.need_bytes), format_size(record.had_bytes)
        text = f"{shortened(record.asked_by)}: refused, needed {needed}, had {had}: {record.reason}"
        yield [record.time, "no", record.asked_by, text]


def _departure(step: StepTaken, asked_by: str) -> str:
    what = f"{format_size(step.bytes)} in {format_blocks(step.blocks)}" if step.blocks else format_size(step.bytes)
    why = f"for {shortened(asked_by)} ({step.stage}: {step.reason})"
    if step.stage == "asked":
        why = "asked for by the user"
    return f"{shortened(step.model)} left: {what}, {step.ms:.0f} ms, {why}"


def _arrival(arrival: Arrival) -> Event:
    text = f"{shortened(arrival.model)} came: {format_size(arrival.bytes)}, {arrival.ms:.0f} ms"
    return [arrival.time, "in", arrival.model, text]
