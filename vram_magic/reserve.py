"""Room kept for the body of a ``with``: what `VRAMManager.reserve` returns."""

from __future__ import annotations

import contextlib

from vram_magic.core import Core
from vram_magic.decision import Room
from vram_magic.policy import Request

__all__ = ["Reserve"]


class Reserve:
    """Room from ``with`` to its end: the body's allocations in this thread draw on it."""

    def __init__(self, core: Core, request: Request) -> None:
        self._core = core
        self._request = request
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> None:
        self._enter(self._core.room(self._request))

    def _enter(self, room: Room) -> None:
        assert room.reservation is not None  # noqa: S101  a room without an error has one
        self._stack.callback(room.release)
        self._stack.enter_context(room.reservation.draw())

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    async def __aenter__(self) -> None:
        self._enter(await self._core.workers.call(lambda: self._core.room(self._request), Room.release))

    async def __aexit__(self, *exc: object) -> None:
        self._stack.close()
