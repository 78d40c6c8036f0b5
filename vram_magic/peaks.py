"""The peak of several spans of time at once, from a meter that keeps one: the manager's, a cell's, a call's.

Sizes are bytes. A lap's peak is the device's: what other threads allocate meanwhile is in it. An accelerator's
allocator keeps one peak, which users read, so it is not reset for a lap: a lap's peak below it is the most that was
seen. Lock: a leaf of its own, held for arithmetic only. Refuses to know whose lap it is.
"""

from __future__ import annotations

import os
import threading
import weakref

from vram_magic.devices.meter import Meter

__all__ = ["Lap", "Peaks"]


class Lap:
    """A span of time that has begun."""

    __slots__ = ("__weakref__", "peak_bytes", "start_bytes")

    def __init__(self, start_bytes: int) -> None:
        self.start_bytes = self.peak_bytes = start_bytes


_all: weakref.WeakSet[Peaks] = weakref.WeakSet()


def _in_child() -> None:
    for peaks in _all:
        peaks.become_child()


os.register_at_fork(after_in_child=_in_child)


class Peaks:
    """The laps of one meter."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._whole = 0
        self._laps: weakref.WeakSet[Lap] = weakref.WeakSet()  # an interrupted cell's is never ended
        self._lock = threading.RLock()
        _all.add(self)

    def become_child(self) -> None:
        """The lock may have been held by a thread that a forked child has not."""
        self._lock = threading.RLock()

    @property
    def peak_bytes(self) -> int:
        """The highest use since `reset`."""
        with self._lock:
            return max(self._whole, self._meter.peak_bytes)

    def reset(self) -> None:
        """Starts the whole anew; laps go on."""
        with self._lock:
            self._fold()
            self._whole = 0
            self._meter.reset_peak()

    def begin(self) -> Lap:
        """Starts a lap."""
        with self._lock:
            self._fold()
            lap = Lap(self._meter.live_bytes)
            self._laps.add(lap)
            return lap

    def end(self, lap: Lap) -> int:
        """Ends a lap; the highest use in it."""
        with self._lock:
            self._fold()
            self._laps.discard(lap)
            return lap.peak_bytes

    def _fold(self) -> None:
        peak = self._meter.start_lap()
        self._whole = max(self._whole, peak)
        for lap in self._laps:
            lap.peak_bytes = max(lap.peak_bytes, peak)
