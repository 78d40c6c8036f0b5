"""What a model's calls take beside its weights, learned from how high the device's use rose during them.

Bytes, the most so far: an upper bound, since other threads allocate meanwhile. Only told, never planned with. Measuring
costs some microseconds, so it is done twice a second at most. A call during which weights arrived tells nothing.
Takes no lock; a race loses one measurement.
"""

from __future__ import annotations

import time

from vram_magic.journal import Arrival, Journal
from vram_magic.peaks import Lap, Peaks

__all__ = ["Working"]

_EVERY_S = 0.5


class Working:
    """The working memory of one model."""

    def __init__(self, peaks: Peaks | None = None, journal: Journal | None = None) -> None:
        self.bytes = 0
        self._peaks = peaks
        self._arrivals = [] if journal is None else journal.arrivals
        self._due = 0.0

    def begin(self) -> tuple[Lap, Arrival | None] | None:
        """A call begins; None when it is not measured."""
        now = time.monotonic()
        if now < self._due or self._peaks is None:
            return None
        self._due = now + _EVERY_S
        return self._peaks.begin(), self._last_arrival()

    def end(self, begun: tuple[Lap, Arrival | None] | None) -> None:
        """The call has ended."""
        if begun is None or self._peaks is None:
            return
        lap, arrival = begun
        peak = self._peaks.end(lap)
        if arrival is self._last_arrival():
            self.bytes = max(self.bytes, peak - lap.start_bytes)

    def _last_arrival(self) -> Arrival | None:
        return self._arrivals[-1] if self._arrivals else None
