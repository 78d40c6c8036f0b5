"""The answer to the guard, when an allocation in the middle of an operation of any thread lacks room.

It must not raise, since an exception would cross C++ frames, and it must not wait for anything that waits for its
thread. So the work is done by the deciding thread: here runs no user code, no collection and no finaliser. An
interrupt, and whatever else a signal handler raises while we wait, is remembered, and the guard interrupts when the
operation has ended. While a CUDA graph is being captured the answer is no, as memory may not be freed then.
"""

from __future__ import annotations

import contextlib

from vram_magic.core import Core
from vram_magic.decision import Room, extra_bytes
from vram_magic.errors import VRAMError
from vram_magic.guard.native import (
    GRANTED,
    INTERRUPTED,
    OUT_OF_MEMORY,
    OVER_BUDGET,
    REFUSED,
    NativeGuard,
    NativeReservation,
)
from vram_magic.oom import VRAMOutOfMemoryError
from vram_magic.policy import Request
from vram_magic.sizes import format_size
from vram_magic.workers import Outcome, outlasted

__all__ = ["Pressure"]


class Pressure:
    """Called by the guard with the bytes that an allocation lacks room for, why it does, and its size."""

    def __init__(self, core: Core, guard: NativeGuard) -> None:
        self._core = core
        self._guard = guard

    def __call__(self, need_bytes: int, why: int, size_bytes: int) -> int:
        core, interrupted = self._core, 0
        question: Outcome[Room] | None = None
        changes = 0
        while True:
            try:
                if core.workers.is_ours or core.registry.held_by_me:
                    return REFUSED | interrupted  # a decision here would wait for ourselves
                if question is None:
                    if core.device.capturing():
                        return self._refuse(self._captured(need_bytes, size_bytes), size_bytes) | interrupted
                    changes = core.registry.changes
                    question = self._ask(need_bytes, why, size_bytes)
                if outlasted(question) is not None:
                    interrupted = INTERRUPTED
                room = question.result()
                if room.busy and core.registry.wait_for_moves(changes):
                    question = None
                    continue
                if why > OUT_OF_MEMORY and room.reservation is not None and not room.freed_bytes:
                    room.release()  # the figures say that there is room, and still the allocator found none
                    question, why = None, why + 1
                    continue
                return self._answer(room, size_bytes) | interrupted
            except KeyboardInterrupt:
                interrupted = INTERRUPTED
            except BaseException as error:  # noqa: BLE001
                self._explain(error)
                return REFUSED | interrupted

    def _ask(self, need_bytes: int, why: int, size_bytes: int) -> Outcome[Room]:
        inside, decide = self._core.registry.current, self._core.workers.decide
        rank, asked_by = inside.rank if inside else None, self._asked_by
        if why == OVER_BUDGET:
            request = Request(need_bytes, rank, asked_by=asked_by)
            return decide(self._core.reclaimer.make_room, request, user_code=False)
        # Room within the budget is not enough: the device itself must have the bytes, all of them.
        extra = extra_bytes(why - OUT_OF_MEMORY, size_bytes)
        if extra:
            asked_by += f" of {format_size(size_bytes)}"
        request = Request(size_bytes + extra, rank, asked_by=asked_by)
        credit_bytes = size_bytes - need_bytes
        make_room = self._core.reclaimer.make_room
        return decide(make_room, request, user_code=False, flushed=True, credit_bytes=credit_bytes, spare_bytes=extra)

    @property
    def _asked_by(self) -> str:
        inside = self._core.registry.current
        return f"an allocation inside {inside.name}" if inside else "an allocation"

    def _answer(self, room: Room, size_bytes: int) -> int:
        if isinstance(room.reservation, NativeReservation):
            room.reservation.transfer()
            return GRANTED
        return self._refuse(room.error, size_bytes)

    def _refuse(self, error: BaseException | None, size_bytes: int) -> int:
        if isinstance(error, VRAMOutOfMemoryError):
            error.needed_bytes = min(error.needed_bytes, size_bytes)  # the request, not what it would take to meet it
        self._core.note(error)
        self._explain(error)
        return REFUSED

    def _captured(self, need_bytes: int, size_bytes: int) -> VRAMOutOfMemoryError:
        device = self._core.device
        free_bytes = max(device.budget_bytes - device.meter.committed_bytes, 0)
        text = (
            f"Not enough memory on {device.name}: {self._asked_by} needs {format_size(size_bytes)} while a CUDA graph "
            f"is being captured.\n"
            f"The budget is {format_size(device.budget_bytes)}, {format_size(free_bytes)} of it are free.\n"
            f"Nothing may leave during a capture: freeing memory would break the graph.\n"
            f"Make room before it with: mgr.make_room({need_bytes})   or %vram evict NAME"
        )
        return VRAMOutOfMemoryError(
            text,
            needed_bytes=size_bytes,
            free_bytes=free_bytes,
            budget_bytes=device.budget_bytes,
            holders=self._core.reclaimer.holders(),
        )

    def _explain(self, error: BaseException | None) -> None:
        with contextlib.suppress(BaseException):
            ours = error is None or isinstance(error, VRAMError)
            self._guard.explain(str(error) if ours else f"{type(error).__name__}: {error}")
