"""A managed model: one name, and what is known of its use. Two kinds: torch modules, and outside engines.

The fields are guarded by the registry's lock; the methods that look or move run in one thread at a time, which has set
``moving`` first. Sizes are bytes, ``last_used`` is a tick of the registry's clock. A model refuses to know other
models, and who leaves before whom.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from vram_magic.devices.meter import Reservation
from vram_magic.models.working import Working
from vram_magic.workers import Workers, settled

if TYPE_CHECKING:
    from vram_magic.devices.base import Device
    from vram_magic.models.entry import EntryPoints
    from vram_magic.registry import Lease
    from vram_magic.residency.body import Body
    from vram_magic.residency.parts import Block, Key

__all__ = ["Backend", "Candidates", "EngineModel", "ManagedModel", "TorchModel"]


class Backend(Protocol):
    """An outside engine's two verbs."""

    async def load(self, model_id: str) -> Any: ...
    async def unload(self, model_id: str) -> Any: ...


@dataclass(slots=True)
class Candidates:
    """What of a model could leave now: parts in module order with their sizes, and why others stay."""

    parts: list[tuple[Any, int]] = field(default_factory=list)
    demotable: list[tuple[Any, int]] = field(default_factory=list)
    """Parts that asked to stay, and whose weights are safe in their file."""
    kept: str = ""

    def without(self, keys: set[Key], reason: str) -> Candidates:
        """The same, less the blocks in which one of the spans lies."""
        if not keys:
            return self

        def free(parts: list[tuple[Any, int]]) -> list[tuple[Any, int]]:
            return [(block, size) for block, size in parts if not any(span.key in keys for span in block.spans)]

        return Candidates(free(self.parts), free(self.demotable), self.kept or reason)


class ManagedModel(ABC):
    """What both kinds have: a rank, marks, leases; and the moves that each makes in its own way."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.rank = 0
        self.tier: str | None = None
        """The rank's name; None for a bare priority."""
        self.residency = "auto"
        self.pinned = False
        self.used_at = 0.0
        """When ``last_used`` was set, in Unix seconds: for people only, since a clock may be turned back."""
        self.last_used = 0
        self.leases: set[Lease] = set()
        self.moving = ""
        """``"loading"`` or ``"leaving"`` while some thread moves it."""
        self.mover = 0
        """The thread that has set the mark."""
        self.forgotten = False
        self.workspace: Callable[[], Any] | None = None
        self.working = Working()
        """What its calls take beside the weights."""
        self.key: object = None
        """What tells a second load of the same source."""

    @property
    def last_used(self) -> int:
        """A tick of the registry's clock."""
        return self._last_used

    @last_used.setter
    def last_used(self, tick: int) -> None:
        self._last_used, self.used_at = tick, time.time()

    @property
    @abstractmethod
    def complete(self) -> bool:
        """Whether nothing is missing on the device."""

    @property
    def surely_complete(self) -> bool:
        """Whether the next call may go on without a look."""
        return self.complete

    @property
    @abstractmethod
    def total_bytes(self) -> int:
        """Its size, as of the last look."""

    @property
    @abstractmethod
    def device_bytes(self) -> int:
        """What of it is on the device, as of the last look."""

    @property
    @abstractmethod
    def state(self) -> str:
        """``"device"``, ``"partial"``, ``"host"`` or ``"disk"``, as of the last look."""

    @property
    @abstractmethod
    def blocks(self) -> tuple[int, int]:
        """(blocks whole on the device, blocks in all), as of the last look."""

    @property
    @abstractmethod
    def block_homes(self) -> tuple[str, ...]:
        """Where each block is, as of the last look: ``"device"``, ``"host"`` or ``"disk"``."""

    @property
    def leaving_blocks(self) -> int:
        """How many blocks some thread moves out just now."""
        return 0

    @property
    def demoted(self) -> bool:
        """Whether a part that asked to stay had to leave, as of the last look."""
        return False

    @abstractmethod
    def candidates(self, *, proven: bool = False, may_rest: bool = False, asked: bool = False) -> Candidates:
        """What could leave. ``proven``: of a model that asks to stay, also find out what is safe in its file.

        ``asked``: by its user, so that it does not matter whether it asks to stay. ``may_rest``: the asker is in no
        operation, so its frames that refer to a weight do not use it.
        """

    @abstractmethod
    def evict(self, parts: list[Any], *, only_proven: bool = False, may_rest: bool = False) -> tuple[int, str]:
        """Moves parts out; returns the bytes that left and why others stayed."""

    @abstractmethod
    def missing_bytes(self) -> int:
        """Looks anew; returns what a load would bring to the device."""

    @abstractmethod
    def load(self, reservation: Reservation) -> None:
        """Brings in what is missing, into memory that the reservation pays for."""

    @abstractmethod
    def let_go(self) -> None:
        """Ends all that is done for its sake. Moves nothing, and cannot fail."""

    @abstractmethod
    def release(self, reservation: Reservation | None = None) -> None:
        """Hands the model back as the user gave it; ``reservation`` pays for what is read back."""


class TorchModel(ManagedModel):
    """An object of the user's that is, or holds, torch modules."""

    def __init__(
        self,
        name: str,
        thing: object,
        body: Body,
        entries: EntryPoints,
        workers: Workers,
        *,
        when_gone: Callable[[str], None],
    ) -> None:
        super().__init__(name)
        self.body = body
        self._entries = entries
        self._workers = workers
        self.source: str | None = None
        """The path or hub id that it was loaded from; None for what was built by code."""
        self.dtype: str | None = None
        """What was asked for at loading."""
        self._leaving_blocks = 0
        self._finalizer: weakref.finalize[..., object] | None = None
        self._thing: Callable[[], object | None]
        try:
            self._thing = weakref.ref(thing)
        except TypeError:  # a class with __slots__ takes no weak reference
            self._thing = lambda: thing
        self._when_gone = when_gone

    def install(self) -> None:
        """From now on calls of the object hold leases, and its end is noticed."""
        self._entries.install(self)
        if not self.body.surely_complete:
            self._entries.watch_children(self)
        if isinstance(self._thing, weakref.ref) and (thing := self._thing()) is not None:
            # A finaliser may run anywhere, even under the lock: it only leaves a note, with the name as it is then.
            self._finalizer = weakref.finalize(thing, self._note_its_end)
            self._finalizer.atexit = False
            if self.forgotten:  # meanwhile: it would keep us for as long as the object lives
                self._finalizer.detach()

    def _note_its_end(self) -> None:
        self._when_gone(self.name)

    @property
    def thing(self) -> object | None:
        """The user's object, or None when it is gone."""
        return self._thing()

    @property
    def complete(self) -> bool:
        return self.body.complete

    @property
    def surely_complete(self) -> bool:
        return self.body.surely_complete

    @property
    def total_bytes(self) -> int:
        return self.body.figures.total_bytes

    @property
    def device_bytes(self) -> int:
        return self.body.figures.device_bytes

    @property
    def state(self) -> str:
        figures, (present, count) = self.body.figures, self.blocks
        if present == count:
            return "device"
        if present:
            return "partial"
        # Most models have a few bytes that are in no file (rotary frequencies, position ids): the larger part decides.
        return "host" if figures.host_bytes > figures.disk_bytes else "disk"

    @property
    def blocks(self) -> tuple[int, int]:
        sizes = self.body.figures.blocks
        return sum(resident == total for total, resident in sizes), len(sizes)

    @property
    def block_homes(self) -> tuple[str, ...]:
        return self.body.homes

    @property
    def leaving_blocks(self) -> int:
        return self._leaving_blocks

    def candidates(self, *, proven: bool = False, may_rest: bool = False, asked: bool = False) -> Candidates:
        found = Candidates()
        for block in self.body.look_for_idle(may_rest=may_rest):
            if not block.resident_bytes:
                continue
            asks_to_stay = self.residency == "device" and not asked and not self.body.demoted(block)
            reason = block.kept
            if asks_to_stay and not reason:
                reason = self.body.doubtful(block) if proven else ""
            if reason:
                found.kept = found.kept or reason
            elif not asks_to_stay:
                found.parts.append((block, block.resident_bytes))
            elif proven:
                found.demotable.append((block, block.resident_bytes))
        return found

    @property
    def demoted(self) -> bool:
        return self.body.figures.demoted_bytes > 0

    def evict(self, parts: list[Block], *, only_proven: bool = False, may_rest: bool = False) -> tuple[int, str]:
        # Children are watched before the first weight leaves: a call that comes in between must wait for us.
        self._entries.watch_children(self)
        self._leaving_blocks = len(parts)
        try:
            freed, stayed = self.body.evict(parts, only_proven=only_proven, may_rest=may_rest, residency=self.residency)
        finally:
            self._leaving_blocks = 0
        self._sync_entries()
        return freed, stayed[0] if stayed else ""

    def missing_bytes(self) -> int:
        missing = self.body.missing_bytes()
        self._sync_entries()
        return missing

    def load(self, reservation: Reservation) -> None:
        settled(self._workers.load(self.body.load, reservation))
        self._sync_entries()

    def _sync_entries(self) -> None:
        if self.body.surely_complete:
            self._entries.unwatch_children()
        else:
            self._entries.watch_children(self)

    def renew_entries(self) -> None:
        """Shadows anew what can be called."""
        self._entries.look_anew(self)

    def let_go(self) -> None:
        if self._finalizer is not None:
            self._finalizer.detach()
        self._entries.remove()

    def release(self, reservation: Reservation | None = None) -> None:
        self.let_go()
        self.body.hand_back(reservation)


class EngineModel(ManagedModel):
    """An outside engine of declared size: loaded or not, as a whole."""

    def __init__(self, name: str, backend: Backend, declared_bytes: int, device: Device, workers: Workers) -> None:
        super().__init__(name)
        self._backend = backend
        self._model_id = name  # the backend's word for it, whatever the model is called here
        self._declared_bytes = declared_bytes
        self._device = device
        self._workers = workers
        self._loaded = False
        self.key = (backend, declared_bytes)

    @property
    def complete(self) -> bool:
        return self._loaded

    @property
    def total_bytes(self) -> int:
        return self._declared_bytes

    @property
    def device_bytes(self) -> int:
        return self._declared_bytes if self._loaded else 0

    @property
    def state(self) -> str:
        return "device" if self._loaded else "disk"

    @property
    def blocks(self) -> tuple[int, int]:
        return int(self._loaded), 1

    @property
    def block_homes(self) -> tuple[str, ...]:
        return (self.state,)

    def candidates(  # an engine has no frames
        self,
        *,
        proven: bool = False,  # noqa: ARG002
        may_rest: bool = False,  # noqa: ARG002
        asked: bool = False,
    ) -> Candidates:
        if not self._loaded or (self.residency == "device" and not asked):  # nothing of an engine can be proven
            return Candidates()
        return Candidates([(self, self._declared_bytes)])

    def evict(self, parts: list[Any], *, only_proven: bool = False, may_rest: bool = False) -> tuple[int, str]:  # noqa: ARG002
        if not parts or not self._loaded or only_proven:
            return 0, ""
        self._workers.run_coroutine(self._backend.unload(self._model_id))  # raises: nothing is counted free
        self.let_go()
        return self._declared_bytes, ""

    def let_go(self) -> None:
        """Counts it no longer. Who could not unload it will not do so later: it would count for ever."""
        if self._loaded:
            self._loaded = False
            self._device.meter.give_back(self._declared_bytes)

    def missing_bytes(self) -> int:
        return 0 if self._loaded else self._declared_bytes

    def load(self, reservation: Reservation) -> None:
        self._workers.run_coroutine(self._load(reservation))

    async def _load(self, reservation: Reservation) -> None:
        await self._backend.load(self._model_id)
        # Here, at once: neither an interrupt nor a cancellation of who waits may keep it out of the books.
        reservation.spend(self._declared_bytes)
        self._loaded = True

    def release(self, reservation: Reservation | None = None) -> None:  # noqa: ARG002  nothing is read back
        with contextlib.suppress(Exception):  # closing: the engine's own trouble must not keep others
            self.evict([self])
        self.let_go()
