"""The answer to the guard, when an allocation in the middle of an operation of any thread lacks room.

It must not raise, since an exception would cross C++ frames, and it must not wait for anything that waits for its
thread. An interrupt is remembered and raised by the guard when the operation has ended.
"""

from __future__ import annotations

import contextlib

from vram_magic.core import Core
from vram_magic.guard.native import GRANTED, INTERRUPTED, REFUSED, CpuGuard, NativeReservation
from vram_magic.policy import Request
from vram_magic.reclaim import Room
from vram_magic.workers import Outcome

__all__ = ["Pressure"]


class Pressure:
    """Called by the guard with the bytes that an allocation lacks room for."""

    def __init__(self, core: Core, guard: CpuGuard) -> None:
        self._core = core
        self._guard = guard

    def __call__(self, need_bytes: int) -> int:
        core, interrupted = self._core, 0
        question: Outcome[Room] | None = None
        changes = 0
        while True:
            try:
                if core.workers.is_ours or core.registry.held_by_me:
                    return REFUSED | interrupted  # a decision here would wait for ourselves
                if question is None:
                    changes = core.registry.changes
                    question = self._ask(need_bytes)
                room = question.result()
                if room.busy and core.registry.wait_for_moves(changes):
                    question = None
                    continue
                return self._answer(room) | interrupted
            except KeyboardInterrupt:
                interrupted = INTERRUPTED
            except BaseException as error:  # noqa: BLE001
                self._explain(error)
                return REFUSED | interrupted

    def _ask(self, need_bytes: int) -> Outcome[Room]:
        inside = self._core.registry.current
        asked_by = f"an allocation inside {inside.name}" if inside else "an allocation"
        request = Request(need_bytes, inside.rank if inside else None, asked_by=asked_by)
        return self._core.workers.decide(self._core.reclaimer.make_room, request, user_code=False)

    def _answer(self, room: Room) -> int:
        if isinstance(room.reservation, NativeReservation):
            room.reservation.transfer()
            return GRANTED
        self._core.note(room.error)
        self._explain(room.error)
        return REFUSED

    def _explain(self, error: BaseException | None) -> None:
        with contextlib.suppress(BaseException):
            self._guard.explain(str(error))
