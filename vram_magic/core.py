"""The core: what the parts of one manager share, and the requests that they make of each other.

Public only inside the package: the manager, its handles and the magics are faces of it. It joins the register, the
deciding thread and the device; it takes the register's lock for no longer than it takes to look something up, and waits
only with the lock given away.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass, field

from torch import OutOfMemoryError

from vram_magic.decision import Room, extra_bytes
from vram_magic.devices.base import Device
from vram_magic.errors import ModelInUseError, VRAMError, closed_manager
from vram_magic.journal import Arrival, Journal
from vram_magic.models.managed import EngineModel, ManagedModel, TorchModel
from vram_magic.oom import VRAMOutOfMemoryError
from vram_magic.peaks import Peaks
from vram_magic.policy import Request
from vram_magic.reclaim import Reclaimer
from vram_magic.registry import Registry
from vram_magic.workers import Workers, settled

__all__ = ["Core"]

_LOAD_ATTEMPTS = 8


@dataclass(eq=False)
class Core:
    """One device's register, threads, journal and decisions."""

    device: Device
    workers: Workers = field(default_factory=Workers)
    journal: Journal = field(default_factory=Journal)
    last_error: VRAMOutOfMemoryError | None = None

    def __post_init__(self) -> None:
        self.peaks = Peaks(self.device.meter)
        self.registry = Registry(self.workers, self.bring)
        self.reclaimer = Reclaimer(self.registry, self.device, self.journal)

    @property
    def closed(self) -> bool:
        """Nothing is managed any more."""
        return self.registry.closed

    # ---------------------------------------------------------------------------------------------------- room

    def room(
        self,
        request: Request,
        required: ManagedModel | None = None,
        credit_bytes: int = 0,
        *,
        flushed: bool = False,
        spare_bytes: int = 0,
        wait: bool = True,
    ) -> Room:
        """The room, reserved; waits for moves in progress where they may help. Raises the reason why not.

        ``credit_bytes``: what of it the caller has already, in a reservation or in a model that it is about to unload.
        ``flushed``: the device's allocator has just failed, after giving up its cache; ``spare_bytes`` of the request
        are then a guess.
        """
        decide = functools.partial(
            self.reclaimer.make_room,
            request,
            required=required,
            credit_bytes=credit_bytes,
            flushed=flushed,
            spare_bytes=spare_bytes,
        )
        while True:
            changes = self.registry.changes
            room = settled(self.workers.decide(decide))
            if wait and room.busy and self.registry.wait_for_moves(changes, required):
                continue
            if room.error is None:
                return room
            self.note(room.error)
            try:
                raise room.error
            finally:
                del room  # the error refers to this frame: a cycle would keep the caller's tensors

    def note(self, error: BaseException | None) -> None:
        """Keeps the last out-of-memory for whoever asks afterwards."""
        if isinstance(error, VRAMOutOfMemoryError):
            self.last_error = error.bare()

    # ------------------------------------------------------------------------------------------------- one model

    def bring(self, model: ManagedModel) -> None:
        """Loads what is missing of a model that this thread has marked."""
        for attempt in range(_LOAD_ATTEMPTS):
            missing = settled(self.workers.decide(model.missing_bytes))
            if not missing and model.complete:
                return
            self.check_not_captured(model)
            # The first time the books decide. If the device itself then has no room, in one piece, more has to leave.
            extra = extra_bytes(max(attempt - 1, 0), missing)
            request = Request(missing + extra, model.rank, asked_by=f"loading {model.name}")
            # Who waits does so without the mark (`Registry`): those who hold leases may need what it keeps.
            room = self.room(request, required=model, flushed=attempt > 0, spare_bytes=extra, wait=False)
            try:
                assert room.reservation is not None  # noqa: S101  a room without an error has one
                begun, before = time.perf_counter(), model.device_bytes
                model.load(room.reservation)
            except OutOfMemoryError as error:
                # An engine's size is declared: to give it more than that would only take it from others.
                final = attempt == _LOAD_ATTEMPTS - 1 or isinstance(model, EngineModel)
                if final or isinstance(error, VRAMOutOfMemoryError):
                    raise
            else:
                arrived, ms = model.device_bytes - before, 1000 * (time.perf_counter() - begun)
                self.journal.arrivals.append(Arrival(model.name, arrived, ms))
                return
            finally:
                room.release()

    def evict(self, model: ManagedModel) -> int:
        """Moves out all that can leave of an idle model; returns the bytes. Raises `ModelInUseError`."""
        with self.registry.moving(model, "leaving"):
            if model.forgotten:
                return 0
            self.check_idle(model)
            return settled(self.workers.decide(self.reclaimer.evict, model, f"evict {model.name}"))

    def forget(self, model: ManagedModel) -> None:
        """Takes a model out of management; what was spilled is read back where there is room.

        Raises what an engine's unload raises: it then stays.
        """
        with self.registry.moving(model, "leaving"):
            if model.forgotten:
                return
            if isinstance(model, EngineModel) and not self.closed:
                settled(self.workers.decide(self.reclaimer.evict, model, f"forget {model.name}"))
            room, sharing = self._room_to_read_back(model), self._sharing(model)
            self.registry.remove(model)
            try:
                settled(self.workers.decide(model.release, room.reservation))
            finally:
                room.release()
                for other in sharing:
                    other.renew_entries()  # its modules may have been shadowed on behalf of this one

    def _sharing(self, model: ManagedModel) -> list[TorchModel]:
        """The other models that have some of its weights."""
        with self.registry.lock:
            others = [other for other in self.registry.models.values() if other is not model]
        if not isinstance(model, TorchModel):
            return []
        return [other for other in others if isinstance(other, TorchModel) and other.body.keys & model.body.keys]

    def forget_all(self) -> None:
        """Takes every model out of management, whatever becomes of one; then raises the first failure."""
        models, failure = list(self.registry.models.values()), None
        for model in models:
            try:
                self.forget(model)
            except BaseException as error:  # noqa: BLE001  raised below
                failure = failure or error
                self.registry.remove(model)  # or its calls would wait for threads that are gone
                model.let_go()
        if failure is not None:
            raise failure

    def _room_to_read_back(self, model: ManagedModel) -> Room:
        need = settled(self.workers.decide(model.body.hand_back_bytes)) if isinstance(model, TorchModel) else 0
        if not need or self.closed:
            return Room(self.device.meter.reserve(need)) if need else Room()
        try:
            return self.room(Request(need, model.rank, asked_by=f"handing back {model.name}"), required=model)
        except VRAMOutOfMemoryError:
            return Room()  # it stays mapped, and whole

    def check_not_captured(self, model: ManagedModel) -> None:
        """Raises `ModelInUseError` while a graph is captured: then nothing may move."""
        if self.device.capturing():
            raise ModelInUseError(
                f"{model.name!r} cannot be moved now.\n0 B were moved.\nA graph of the device's operations is being "
                f"captured, and memory may neither be taken nor freed meanwhile.\nBefore the capture: %vram load "
                f"{model.name}   and %vram pin {model.name}"
            )

    def check_idle(self, model: ManagedModel) -> None:
        """Raises `ModelInUseError` for a leased or pinned model, and while nothing may be moved."""
        self.check_not_captured(model)
        with self.registry.lock:
            leased, pinned = bool(model.leases), model.pinned
        if leased or pinned:
            reason = "in use by a call in progress" if leased else "pinned"
            remedy = "Wait for the call, or interrupt it" if leased else f"Let it leave with: %vram unpin {model.name}"
            raise ModelInUseError(f"{model.name!r} stays where it is.\n0 B were freed.\nIt is {reason}.\n{remedy}")

    def look(self, model: ManagedModel) -> None:
        """Brings figures up to date, unless somebody is moving the model or we would wait for ourselves."""
        if not (model.moving or model.forgotten or self.closed or self.workers.is_ours):
            try:
                settled(self.workers.decide(self.reclaimer.look, model))
            except VRAMError:
                if not self.closed:  # meanwhile: the last figures do
                    raise

    def promote(self, model: ManagedModel) -> None:
        """After a new wish for its residency: what had to leave although it asked to stay begins anew."""
        if isinstance(model, TorchModel) and not self.closed:
            with self.registry.moving(model, "leaving"):
                if not model.forgotten:
                    settled(self.workers.decide(model.body.promote))

    def clear_up(self) -> None:
        """Forgets models whose objects have died."""
        if self.registry.gone and not self.workers.is_ours and not self.closed:
            settled(self.workers.decide(self.reclaimer.clear_up))

    def check_open(self) -> None:
        """Raises `VRAMError` after `close`."""
        if self.closed:
            raise closed_manager()
