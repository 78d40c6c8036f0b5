"""A managed model: one name, and what is known of its use. Two kinds: torch modules, and outside engines.

The fields are guarded by the registry's lock; the methods that look or move run in one thread at a time, which has set
``moving`` first. Sizes are bytes, ``last_used`` is a tick of the registry's clock. A model refuses to know other
models, and who leaves before whom.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from vram_magic.devices.meter import Reservation
from vram_magic.workers import Workers, settled

if TYPE_CHECKING:
    from vram_magic.devices.base import Device
    from vram_magic.models.entry import EntryPoints
    from vram_magic.registry import Lease
    from vram_magic.residency.body import Block, Body

__all__ = ["Backend", "Candidates", "EngineModel", "ManagedModel", "TorchModel"]


class Backend(Protocol):
    """An outside engine's two verbs."""

    async def load(self, model_id: str) -> Any: ...
    async def unload(self, model_id: str) -> Any: ...


@dataclass(slots=True)
class Candidates:
    """What of a model could leave now: parts in module order, their sizes, and why others stay."""

    parts: list[Any]
    sizes: tuple[int, ...]
    kept: str = ""


class ManagedModel:
    """What both kinds have: a rank, marks, leases."""

    def __init__(self, name: str, *, rank: int, tier: str | None, residency: str = "auto", pinned: bool = False) -> None:
        self.name = name
        self.rank = rank
        self.tier = tier
        self.residency = residency
        self.pinned = pinned
        self.last_used = 0
        self.leases: set[Lease] = set()
        self.moving = ""
        self.forgotten = False
        self.workspace: Callable[[], Any] | None = None
        self.key: object = None
        """What tells a second load of the same source."""

    complete: bool
    """Nothing is missing on the device."""
    total_bytes: int
    device_bytes: int
    state: str

    def candidates(self, *, proven: bool = False) -> Candidates:
        """What could leave; with ``proven`` only what is unmodified and safe in its own file."""
        raise NotImplementedError

    def evict(self, parts: list[Any], *, only_proven: bool = False) -> tuple[int, str]:
        """Moves parts out; returns the bytes that left and why others stayed."""
        raise NotImplementedError

    def missing_bytes(self) -> int:
        raise NotImplementedError

    def load(self, reservation: Reservation) -> None:
        raise NotImplementedError

    def release(self, reservation: Reservation | None = None) -> None:
        """Hands the model back as the user gave it; ``reservation`` pays for what is read back."""


class TorchModel(ManagedModel):
    """An object of the user's that is, or holds, torch modules."""

    def __init__(  # noqa: PLR0913
        self,
        name: str,
        thing: object,
        body: Body,
        entries: EntryPoints,
        workers: Workers,
        *,
        rank: int,
        tier: str | None,
        residency: str,
        pinned: bool,
        when_gone: Callable[[str], None],
    ) -> None:
        super().__init__(name, rank=rank, tier=tier, residency=residency, pinned=pinned)
        self.body = body
        self._entries = entries
        self._workers = workers
        try:
            self._thing: Callable[[], object | None] = weakref.ref(thing)
            # A finaliser may run anywhere, even under the lock: it only leaves a note.
            self._finalizer = weakref.finalize(thing, when_gone, name)
            self._finalizer.atexit = False
        except TypeError:  # a class with __slots__ takes no weak reference
            self._thing = lambda: thing
            self._finalizer = None
        entries.install(self)

    @property
    def thing(self) -> object | None:
        """The user's object, or None when it is gone."""
        return self._thing()

    @property
    def complete(self) -> bool:  # type: ignore[override]
        return self.body.complete

    @property
    def total_bytes(self) -> int:  # type: ignore[override]
        return self.body.figures.total_bytes

    @property
    def device_bytes(self) -> int:  # type: ignore[override]
        return self.body.figures.device_bytes

    @property
    def state(self) -> str:  # type: ignore[override]
        figures = self.body.figures
        if not figures.host_bytes and not figures.disk_bytes:
            return "device"
        if figures.device_bytes:
            return "partial"
        return "host" if figures.host_bytes else "disk"

    def candidates(self, *, proven: bool = False) -> Candidates:
        blocks = self.body.look_for_idle()
        present = [block for block in blocks if block.resident_bytes]
        free = [block for block in present if not block.kept and (not proven or self.body.proven(block))]
        kept = next((block.kept for block in present if block.kept), "")
        if proven and not kept and len(free) < len(present):
            kept = "it was edited, or its file does not hold it"
        return Candidates(free, tuple(block.resident_bytes for block in free), kept)

    def evict(self, parts: list[Block], *, only_proven: bool = False) -> tuple[int, str]:
        # Children are watched before the first weight leaves: a call that comes in between must wait for us.
        self._entries.watch_children(self)
        freed, stayed = self.body.evict(parts, only_proven=only_proven)
        self._sync_entries()
        return freed, stayed[0] if stayed else ""

    def missing_bytes(self) -> int:
        return self.body.missing_bytes()

    def load(self, reservation: Reservation) -> None:
        settled(self._workers.load(self.body.load, reservation))
        self._sync_entries()

    def _sync_entries(self) -> None:
        if self.body.complete:
            self._entries.unwatch_children()
        else:
            self._entries.watch_children(self)

    def release(self, reservation: Reservation | None = None) -> None:
        if self._finalizer is not None:
            self._finalizer.detach()
        self._entries.remove()
        self.body.read_back_spilled(reservation)


class EngineModel(ManagedModel):
    """An outside engine of declared size: loaded or not, as a whole."""

    def __init__(  # noqa: PLR0913
        self,
        name: str,
        backend: Backend,
        declared_bytes: int,
        device: Device,
        workers: Workers,
        *,
        rank: int,
        tier: str | None,
        pinned: bool = False,
    ) -> None:
        super().__init__(name, rank=rank, tier=tier, pinned=pinned)
        self._backend = backend
        self._device = device
        self._workers = workers
        self.total_bytes = declared_bytes
        self.complete = False
        self.key = (backend, declared_bytes)

    @property
    def device_bytes(self) -> int:  # type: ignore[override]
        return self.total_bytes if self.complete else 0

    @property
    def state(self) -> str:  # type: ignore[override]
        return "device" if self.complete else "disk"

    def candidates(self, *, proven: bool = False) -> Candidates:  # noqa: ARG002  nothing of an engine can be proven
        return Candidates([self], (self.total_bytes,)) if self.complete else Candidates([], ())

    def evict(self, parts: list[Any], *, only_proven: bool = False) -> tuple[int, str]:
        if not parts or not self.complete or only_proven:
            return 0, ""
        self._workers.run_coroutine(self._backend.unload(self.name))  # raises: nothing is counted free
        self.complete = False
        self._device.meter.give_back(self.total_bytes)
        return self.total_bytes, ""

    def missing_bytes(self) -> int:
        return 0 if self.complete else self.total_bytes

    def load(self, reservation: Reservation) -> None:
        self._workers.run_coroutine(self._backend.load(self.name))
        reservation.spend(self.total_bytes)
        self.complete = True

    def release(self, reservation: Reservation | None = None) -> None:  # noqa: ARG002  nothing is read back
        with contextlib.suppress(Exception):  # closing: the engine's own trouble must not keep others
            self.evict([self])
