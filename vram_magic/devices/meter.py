"""Counting bytes against a limit: the `Meter` protocol, and the one written in Python.

Words, all in bytes:

* *live*: in use now; *peak*: the highest live since the last reset
* *committed*: live plus what reservations still hold; a commit never takes it past the limit
* *reservation*: room taken out of the free bytes for someone who is about to use it

`LedgerMeter` counts what it is told. It serves declared sizes, and a device whose allocations nobody counts.
`MeasuredMeter` asks the device's allocator, where no guard stands before it. The third meter is the native guard, which
counts by itself. Lock: a leaf lock of the meter's own, held for arithmetic only.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

__all__ = ["LedgerMeter", "MeasuredMeter", "Meter", "Reservation"]


class Reservation(Protocol):
    """Bytes promised to one taker."""

    @property
    def left_bytes(self) -> int:
        """What has not been drawn yet."""

    def draw(self, *, own_move: bool = False) -> contextlib.AbstractContextManager[None]:
        """Inside, allocations of this thread are paid for by the reservation.

        With ``own_move`` they never ask for room, even beyond it: a move that waits for another would wait for itself.
        """

    def spend(self, size_bytes: int) -> None:
        """Turns reserved bytes into live ones that nobody allocates here (an outside engine's)."""

    def release(self) -> None:
        """Gives back what is left. Twice is once."""


class Meter(Protocol):
    """Live, committed and peak bytes under a limit."""

    counts_allocations: bool
    """Whether allocations and frees are seen without being told."""

    limit_bytes: int

    @property
    def live_bytes(self) -> int: ...
    @property
    def committed_bytes(self) -> int: ...
    @property
    def peak_bytes(self) -> int: ...
    @property
    def credit_bytes(self) -> int:
        """What the reservation that this thread draws on still holds."""

    def reset_peak(self) -> None: ...
    def start_lap(self) -> int:
        """Starts a new peak too, unseen by others who read the allocator's; returns the one until now."""

    def reserve(self, size_bytes: int) -> Reservation | None:
        """Takes the bytes out of the free room at once, or returns None."""

    def give_back(self, size_bytes: int) -> None:
        """Ends the life of bytes that were spent or adopted."""

    def adopt(self, storage_address: int, size_bytes: int) -> None:
        """Counts a storage that is live already, unless it was counted."""

    def owns(self, storage: Any) -> bool:
        """Whether the memory came from the allocator that is metered."""

    def counts(self, storage: Any) -> bool:
        """Whether the memory is in `live_bytes`, as far as that can be told."""


class _Drawn:
    """What a thread draws on, where no allocator is limited: only noted, for `Meter.credit_bytes`."""

    def __init__(self, thread: threading.local) -> None:
        self._thread = thread

    @contextlib.contextmanager
    def draw(self, *, own_move: bool = False) -> Iterator[None]:  # noqa: ARG002  nothing here ever asks for room
        before = getattr(self._thread, "drawn", None)
        self._thread.drawn = self
        try:
            yield
        finally:
            self._thread.drawn = before


class LedgerMeter:
    """A meter that believes what it is told."""

    counts_allocations = False

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._live = self._committed = self._peak = 0
        self._lock = threading.RLock()  # a dropped reservation may be released by a collection that starts under it
        self._thread = threading.local()

    @property
    def live_bytes(self) -> int:
        return self._live

    @property
    def committed_bytes(self) -> int:
        return self._committed

    @property
    def peak_bytes(self) -> int:
        return self._peak

    @property
    def credit_bytes(self) -> int:
        drawn: _LedgerReservation | None = getattr(self._thread, "drawn", None)
        return drawn.left_bytes if drawn else 0

    def reset_peak(self) -> None:
        self._peak = self._live

    def start_lap(self) -> int:
        with self._lock:
            peak, self._peak = self._peak, self._live
        return peak

    def reserve(self, size_bytes: int) -> Reservation | None:
        with self._lock:
            if self._committed + size_bytes > self.limit_bytes:
                return None
            self._committed += size_bytes
        return _LedgerReservation(self, size_bytes)

    def give_back(self, size_bytes: int) -> None:
        with self._lock:
            self._live -= size_bytes
            self._committed -= size_bytes

    def owns(self, storage: Any) -> bool:  # noqa: ARG002  it sees no allocator
        return False

    def counts(self, storage: Any) -> bool:  # noqa: ARG002  only what it was told
        return True

    def adopt(self, storage_address: int, size_bytes: int) -> None:  # noqa: ARG002  told once a storage
        with self._lock:
            self._committed += size_bytes
            self._take(size_bytes)

    def _take(self, size_bytes: int) -> None:
        self._live += size_bytes
        self._peak = max(self._peak, self._live)


class _LedgerReservation(_Drawn):
    def __init__(self, meter: LedgerMeter, size_bytes: int) -> None:
        super().__init__(meter._thread)
        self._meter = meter
        self.left_bytes = size_bytes

    def __del__(self) -> None:
        self.release()  # an interrupt may have dropped it on its way to its taker

    def spend(self, size_bytes: int) -> None:
        with self._meter._lock:
            beyond = max(0, size_bytes - self.left_bytes)
            self.left_bytes -= size_bytes - beyond
            self._meter._committed += beyond
            self._meter._take(size_bytes)

    def release(self) -> None:
        with self._meter._lock:
            self._meter._committed -= self.left_bytes
            self.left_bytes = 0


class MeasuredMeter:
    """A meter of a device whose allocator counts what it gives, while nobody can say no to an allocation.

    ``measure`` tells the bytes allocated now. A reservation shrinks as they grow, whoever allocates.
    """

    counts_allocations = True

    def __init__(self, measure: Callable[[], int]) -> None:
        self.limit_bytes = 0
        self._measure = measure
        self._spent = self._peak = 0
        self._reservations: weakref.WeakSet[_MeasuredReservation] = weakref.WeakSet()  # a dropped one counts no more
        self._lock = threading.RLock()
        self._thread = threading.local()

    @property
    def live_bytes(self) -> int:
        live = self._measure() + self._spent
        self._peak = max(self._peak, live)
        return live

    @property
    def committed_bytes(self) -> int:
        with self._lock:
            return self.live_bytes + sum(reservation.left_bytes for reservation in self._reservations)

    @property
    def peak_bytes(self) -> int:
        """The highest value that was seen at a look."""
        return max(self._peak, self.live_bytes)

    @property
    def credit_bytes(self) -> int:
        drawn: _MeasuredReservation | None = getattr(self._thread, "drawn", None)
        return drawn.left_bytes if drawn else 0

    def reset_peak(self) -> None:
        self._peak = 0

    def start_lap(self) -> int:
        peak, self._peak = self.peak_bytes, 0
        return peak

    def reserve(self, size_bytes: int) -> Reservation | None:
        with self._lock:
            if self.committed_bytes + size_bytes > self.limit_bytes:
                return None
            reservation = _MeasuredReservation(self, size_bytes)
            self._reservations.add(reservation)
        return reservation

    def give_back(self, size_bytes: int) -> None:
        with self._lock:
            self._spent -= size_bytes

    def owns(self, storage: Any) -> bool:  # noqa: ARG002  the device tells by the storage's place
        return True

    def counts(self, storage: Any) -> bool:  # noqa: ARG002  all that the allocator gives
        return True

    def adopt(self, storage_address: int, size_bytes: int) -> None:
        """The allocator has counted it since it was made."""


class _MeasuredReservation(_Drawn):
    def __init__(self, meter: MeasuredMeter, size_bytes: int) -> None:
        super().__init__(meter._thread)
        self._meter = meter
        self._size_bytes = size_bytes
        self._live_before = meter._measure()

    @property
    def left_bytes(self) -> int:
        return max(self._size_bytes - max(self._meter._measure() - self._live_before, 0), 0)

    def spend(self, size_bytes: int) -> None:
        with self._meter._lock:
            self._meter._spent += size_bytes
            self._size_bytes = max(self._size_bytes - size_bytes, 0)

    def release(self) -> None:
        with self._meter._lock:
            self._size_bytes = 0
            self._meter._reservations.discard(self)
