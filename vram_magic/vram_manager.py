"""The manager: the one place that joins device, guard, planner, models and journal.

How a decision flows: something allocates, the guard (or a call of a managed model) asks for room, the `Reclaimer` plans
it whole and lets victims leave one by one, the device measures, the journal tells, and the room goes to who asked.

The lock is the registry's; this module takes it for no longer than it takes to look something up. It refuses to know
how bytes move.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from vram_magic.devices.ledger import LedgerDevice
from vram_magic.errors import UnknownModelError, VRAMError
from vram_magic.handle import Handle, check_residency, in_use
from vram_magic.journal import Journal
from vram_magic.models.managed import Backend, EngineModel, ManagedModel, TorchModel
from vram_magic.oom import VRAMOutOfMemoryError
from vram_magic.policy import DEFAULT_TIERS, Plan, Request
from vram_magic.reclaim import Reclaimer, Room
from vram_magic.registry import Registry
from vram_magic.sizes import bytes_to_gb, format_size, gb_to_bytes, parse_size
from vram_magic.workers import Workers, settled

if TYPE_CHECKING:
    from vram_magic.devices.base import Device
    from vram_magic.guard.native import CpuGuard
    from vram_magic.models.sources import Source

__all__ = ["ModelSlot", "VRAMManager", "manager"]

_open: dict[str, VRAMManager] = globals().get("_open", {})
"""The open manager of each device; survives a reload of this module."""

_NAME_LIMIT = 200


@dataclass(frozen=True, slots=True)
class ModelSlot:
    """A loaded outside engine, as `VRAMManager.get_loaded_models` lists it; sizes in units of 2**30 bytes."""

    model_id: str
    model_type: str
    vram_gb: float
    priority: int

    @staticmethod
    def priority_rank(model_type: str) -> int:
        """The rank of a built-in tier. Raises KeyError."""
        return DEFAULT_TIERS[model_type]


class VRAMManager:
    """Decides what stays in one device's memory.

    Args:
        device: ``"cpu"``, or None for the best device there is
        budget: bytes (int, or text such as ``"12GiB"``) that this kernel may use, or ``"auto"``
        block_bytes: the size up to which weights are grouped to leave and return together
        total_vram_gb: for a ledger of declared sizes only, without a device: its capacity in units of 2**30 bytes
        spill_dir: where weights go that no file holds; default ``VRAM_MAGIC_SPILL_DIR``, else a temporary folder

    Raises:
        VRAMError: the device has an open manager already, or is not supported
        ValueError: a size that is none
    """

    def __init__(
        self,
        device: str | None = None,
        budget: int | str = "auto",
        *,
        block_bytes: int | str = "64MiB",
        total_vram_gb: float | None = None,
        spill_dir: str | Path | None = None,
    ) -> None:
        self._block_bytes = parse_size(block_bytes, what="block_bytes")
        self._guard: CpuGuard | None = None
        self._closed = False
        self._device = self._make_device(device, budget, total_vram_gb)
        self._workers = Workers()
        self._registry = Registry(self._workers, self._bring)
        self.journal = Journal()
        self.last_error: VRAMOutOfMemoryError | None = None
        self._reclaimer = Reclaimer(self._registry, self._device, self.journal)
        self._body_parts: _Bodies | None = None
        if self._device.holds_tensors:
            self._body_parts = _Bodies(self._device, self._registry, self._workers, self._block_bytes, spill_dir)
            _open[self._device.name] = self
        if self._guard is not None:
            self._guard.install(self._pressure)

    def _make_device(self, device: str | None, budget: int | str, total_vram_gb: float | None) -> Device:
        if total_vram_gb is not None:
            return LedgerDevice(gb_to_bytes(total_vram_gb))
        name = device or "cpu"
        if name != "cpu":
            raise VRAMError(
                f"The device {name!r} is not supported by this version.\nSupported is 'cpu'.\n"
                "The accelerator device is still being built.\nUse: VRAMManager(device='cpu')"
            )
        if name in _open:
            raise VRAMError(
                f"The device {name!r} has a manager already.\n{len(_open[name].models)} models are managed there.\n"
                "Two managers would not know of each other's models.\nUse vram_magic.manager(), or close it: mgr.close()"
            )
        return self._cpu_device(budget)

    def _cpu_device(self, budget: int | str) -> Device:
        from vram_magic.devices.cpu import CpuDevice  # needs torch
        from vram_magic.guard.build import GuardUnavailable
        from vram_magic.guard.native import load_guard

        try:
            self._guard = load_guard()
        except GuardUnavailable as reason:
            return CpuDevice(budget, without_guard=str(reason))
        return CpuDevice(budget, meter=self._guard)

    # ------------------------------------------------------------------------------------------------ figures

    @property
    def device(self) -> str:
        return self._device.name

    @property
    def budget_bytes(self) -> int:
        """What this kernel may use of the device."""
        return self._device.budget_bytes

    @budget_bytes.setter
    def budget_bytes(self, setting: int | str) -> None:
        self.set_budget(setting)

    def set_budget(self, setting: int | str) -> int:
        """Sets the budget (bytes, text, or ``"auto"``); below use, idle models leave at once. Returns the bytes freed.

        Raises:
            VRAMOutOfMemoryError: what is in use does not fit the new budget; nothing moved and the old one stays
        """
        wanted = self._device.budget_for(setting)
        if wanted < self._device.meter.committed_bytes:
            freed = settled(self._workers.decide(self._reclaimer.lower_budget, wanted))
        else:
            freed = 0
        self._device.set_budget(setting)
        return freed

    @property
    def used_bytes(self) -> int:
        """What torch has allocated on the device now, and the declared sizes of loaded outside engines."""
        return self._device.meter.live_bytes

    @property
    def free_bytes(self) -> int:
        """The budget less `used_bytes`."""
        return self.budget_bytes - self.used_bytes

    @property
    def peak_bytes(self) -> int:
        """The highest `used_bytes` since `reset_peak`."""
        return self._device.meter.peak_bytes

    def reset_peak(self) -> None:
        self._device.meter.reset_peak()

    @property
    def guard(self) -> str:
        """How allocations are noticed, in words."""
        return self._device.guard

    @property
    def tiers(self) -> MutableMapping[str, int]:
        """Tier names and their ranks; add your own."""
        return self._registry.tiers

    # ------------------------------------------------------------------------------------------------ models

    @property
    def models(self) -> Mapping[str, Handle]:
        """The managed models by name, as they are now."""
        self._clear_up()
        with self._registry.lock:
            return MappingProxyType({name: Handle(self, model) for name, model in self._registry.models.items()})

    def __getitem__(self, name: str) -> Handle:
        self._clear_up()
        return Handle(self, self._registry.get(name))

    def __contains__(self, name: object) -> bool:
        self._clear_up()
        return name in self._registry.models

    def register(  # noqa: PLR0913  the contract's signature
        self,
        name: str,
        obj: object,
        tier: str | int = "llm",
        priority: int | None = None,
        residency: str = "auto",
        pin: bool = False,
        source: str | Path | None = None,
        workspace: Callable[[], Any] | None = None,
    ) -> Handle:
        """Takes a model under management and leaves every weight where it is.

        Args:
            name: any printable text up to 200 characters
            obj: a module, or an object that holds modules; kept weakly
            tier: the rank by name; or ``priority``, a bare integer
            residency: ``"auto"``, ``"device"``, ``"host"`` or ``"disk"``
            pin: never to be taken
            source: the file or folder that the weights came from; default: the object's own ``name_or_path``
            workspace: gives back memory that the idle model does not need

        Raises:
            SourceError: the source cannot be read or shares no name, or the object holds no module
            VRAMError: the object is managed under another name, or by another tool
        """
        self._check_name(name)
        check_residency(residency)
        tier_name, rank = self._registry.rank_of(tier, priority)
        if (known := self._known(name, obj)) is not None:
            return Handle(self, known)
        model = self._bodies.make(name, obj, rank=rank, tier=tier_name, residency=residency, pinned=pin, source=source)
        model.workspace = workspace
        self._add(model)
        settled(self._workers.decide(self._reclaimer.look, model))
        return Handle(self, model)

    def load(  # noqa: PLR0913
        self,
        name: str,
        source: object,
        tier: str | int = "llm",
        priority: int | None = None,
        residency: str = "auto",
        pin: bool = False,
        *,
        lazy: bool = False,
        dtype: str | None = None,
        into: object = None,
        workspace: Callable[[], Any] | None = None,
    ) -> Handle:
        """Builds or takes a model, manages it, and brings it to the device (at its first use when ``lazy``).

        ``source``: an object, a callable that builds one, a folder or hub id, or a ``.safetensors`` file to be read
        ``into`` a module. The handle keeps an object that was built here. The same name and source again is a no-op.

        Raises:
            SourceError: the source cannot be read, is incomplete, or is no model
            VRAMOutOfMemoryError: there is no room; the new model is absent
        """
        from vram_magic.models.sources import resolve

        self._check_name(name)
        self._bodies  # noqa: B018  a ledger refuses before anything is built
        found = resolve(source, dtype=dtype, into=into)
        with self._registry.lock:
            known = self._registry.models.get(name)
        if known is not None and known.key is not None and known.key == found.key and self._alive(known):
            return self._handle_of(known, found, lazy=lazy)
        with self._replacing(name, known, found):
            thing = self._built(name, found)
            handle = self.register(
                name, thing, tier, priority, residency, pin, found.folder or None, workspace
            )
            handle._managed.key = found.key
            self._bodies.processors[handle._managed] = found.processor
            try:
                if not lazy:
                    handle.load()
            except BaseException:
                if found.kind != "object":  # the user's own object stays as it was, managed or not
                    handle.forget()
                raise
            return Handle(self, handle._managed, None if found.kind == "object" else thing)

    def _handle_of(self, model: ManagedModel, found: Source, *, lazy: bool) -> Handle:
        handle = Handle(self, model, None if found.kind == "object" else getattr(model, "thing", None))
        return handle if lazy else handle.load()

    def _built(self, name: str, source: Source) -> object:
        import torch

        try:
            return source.build()
        except VRAMOutOfMemoryError:
            raise
        except torch.OutOfMemoryError as error:
            ours = self.last_error
            if ours is None or str(ours) != str(error):
                raise
            message = f"{name!r} could not be built: {ours}"
            raise VRAMOutOfMemoryError(
                message,
                needed_bytes=ours.needed_bytes,
                free_bytes=ours.free_bytes,
                budget_bytes=ours.budget_bytes,
                holders=ours.holders,
            ) from error

    @contextlib.contextmanager
    def _replacing(self, name: str, known: ManagedModel | None, found: Source) -> Iterator[None]:
        """Another source under a name replaces the old model once the new one is there, and only then."""
        if known is None or not self._alive(known) or getattr(known, "thing", None) is self._thing_of(found):
            yield
            return
        aside = f"{name} (being replaced)"
        self._rename(known, aside)
        try:
            yield
        except BaseException:
            self._rename(known, name)
            raise
        self._forget(known)

    def _thing_of(self, found: Source) -> object:
        return found.build() if found.kind == "object" else None

    def _rename(self, model: ManagedModel, name: str) -> None:
        with self._registry.lock:
            self._registry.models.pop(model.name, None)
            model.name = name
            self._registry.models[name] = model

    def _known(self, name: str, obj: object) -> ManagedModel | None:
        """The model that the object is already, under this name. Raises when it is another's."""
        self._clear_up()
        with self._registry.lock:
            mine = [m for m in self._registry.models.values() if getattr(m, "thing", None) is obj]
            taken = self._registry.models.get(name)
        if mine and mine[0].name != name:
            raise VRAMError(
                f"This object is managed as {mine[0].name!r} already.\nIts {format_size(mine[0].total_bytes)} are "
                f"counted once.\nOne object has one name.\nUse that name, or first: %vram forget {mine[0].name}"
            )
        if mine:
            return mine[0]
        if taken is not None:
            self._forget(taken)
        return None

    def _add(self, model: ManagedModel) -> None:
        with self._registry.lock:
            self._registry.models[model.name] = model
            self._registry.touch(model)

    def _forget(self, model: ManagedModel) -> None:
        """Takes a model out of management; what was spilled is read back where there is room."""
        with self._registry.moving(model, "leaving"):
            with self._registry.lock:
                if model.forgotten:
                    return
            room = self._room_to_read_back(model)
            with self._registry.lock:
                model.forgotten = True
                if self._registry.models.get(model.name) is model:
                    del self._registry.models[model.name]
            try:
                settled(self._workers.decide(model.release, room.reservation))
            finally:
                room.release()

    def _room_to_read_back(self, model: ManagedModel) -> Room:
        need = model.body.figures.host_bytes if isinstance(model, TorchModel) else 0
        if not need or self._closed:
            return Room(self._device.meter.reserve(need)) if need else Room()
        try:
            return self._room(Request(need, model.rank, asked_by=f"handing back {model.name}"), required=model)
        except VRAMOutOfMemoryError:
            return Room()  # it stays mapped, and whole

    def _check_name(self, name: object) -> None:
        self._check_open()
        if not isinstance(name, str) or not name.strip() or len(name) > _NAME_LIMIT or not name.isprintable():
            raise ValueError(f"a model's name is printable text of 1 to {_NAME_LIMIT} characters, not {name!r:.80}")

    # ------------------------------------------------------------------------------------------- outside engines

    async def load_model(
        self,
        model_id: str,
        *,
        model_type: str = "llm",
        vram_gb: float,
        backend: Backend,
        priority: int | None = None,
        pin: bool = False,
    ) -> Handle:
        """Loads an outside engine of a declared size (units of 2**30 bytes), making room for it first.

        Raises:
            VRAMOutOfMemoryError: it cannot fit; nobody left
            Exception: what the backend raised; the model is then absent
        """
        self._check_name(model_id)
        tier, rank = self._registry.rank_of(model_type, priority)
        size = gb_to_bytes(vram_gb)

        def make() -> EngineModel:
            return EngineModel(
                model_id, backend, size, self._device, self._workers, rank=rank, tier=tier, pinned=pin
            )

        return await self._workers.call(lambda: self._load_engine(make()))

    def _load_engine(self, fresh: EngineModel) -> Handle:
        with self._registry.lock:
            known = self._registry.models.get(fresh.name)
            model = known if known is not None and known.key == fresh.key else fresh
            if known is None:
                self._registry.models[fresh.name] = fresh
        if known is not None and model is fresh:
            self._unload(known)
            return self._load_engine(fresh)
        try:
            self._registry.ensure(model)
        except BaseException:
            with self._registry.lock:
                # Whoever waits for the same load tries it again itself; only an engine that nobody loads is absent.
                if not model.complete and not model.moving and self._registry.models.get(model.name) is model:
                    del self._registry.models[model.name]
            raise
        return Handle(self, model)

    async def unload_model(self, model_id: str) -> None:
        """Unloads and forgets an outside engine. Raises `UnknownModelError`, `ModelInUseError`, and the backend's own."""
        await self._workers.call(lambda: self._unload(self._registry.get(model_id)))

    def _unload(self, model: ManagedModel) -> None:
        with self._registry.moving(model, "leaving"):
            self._check_idle(model)
            settled(self._workers.decide(self._reclaimer.evict, model, f"unloading {model.name}"))
            with self._registry.lock:
                model.forgotten = True
                if self._registry.models.get(model.name) is model:
                    del self._registry.models[model.name]

    def is_loaded(self, model_id: str) -> bool:
        with self._registry.lock:
            model = self._registry.models.get(model_id)
            return model is not None and bool(model.device_bytes)

    @property
    def available_vram_gb(self) -> float:
        """`free_bytes` in units of 2**30."""
        return bytes_to_gb(self.free_bytes)

    def get_loaded_models(self) -> dict[str, ModelSlot]:
        """What is on the device, by id."""
        with self._registry.lock:
            return {
                name: ModelSlot(name, str(m.tier or m.rank), bytes_to_gb(m.device_bytes), m.rank)
                for name, m in self._registry.models.items()
                if m.device_bytes
            }

    # ---------------------------------------------------------------------------------------------------- room

    def plan(self, need: int | str, tier: str | int | None = None, prefer: Sequence[str] = ()) -> Plan:
        """What would leave for a request, in order, and why; moves nothing."""
        return settled(self._workers.decide(self._reclaimer.preview, self._request(need, tier, prefer, "plan")))

    def make_room(self, need: int | str, tier: str | int | None = None, prefer: Sequence[str] = ()) -> int:
        """Makes models leave until ``need`` bytes are free; returns the bytes freed, measured (0 when it fits).

        Raises:
            VRAMOutOfMemoryError: it cannot be done; nothing moved
        """
        room = self._room(self._request(need, tier, prefer, "make_room"))
        room.release()
        return room.freed_bytes

    async def amake_room(self, need: int | str, tier: str | int | None = None, prefer: Sequence[str] = ()) -> int:
        """`make_room` without blocking the event loop."""
        return await self._workers.call(lambda: self.make_room(need, tier, prefer))

    def reserve(self, need: int | str, tier: str | int | None = None) -> _Reserve:
        """``with mgr.reserve("3GiB"):`` room kept for the body's own allocations. ``async with`` too."""
        return _Reserve(self, self._request(need, tier, (), "reserve"))

    def _request(self, need: int | str, tier: str | int | None, prefer: Sequence[str], asked_by: str) -> Request:
        self._check_open()
        rank = None if tier is None else self._registry.rank_of(tier)[1]
        for name in prefer:
            self._registry.get(name)
        size = parse_size(need, what="need")
        return Request(size, rank, tuple(prefer), f"{asked_by}({format_size(size)})")

    def _room(self, request: Request, required: ManagedModel | None = None) -> Room:
        """The room, reserved; waits for moves in progress where they may help. Raises the reason why not."""
        decide = functools.partial(
            self._reclaimer.make_room, request, required=required, credit_bytes=self._device.meter.credit_bytes
        )
        while True:
            room = settled(self._workers.decide(decide), Room.release)
            if room.busy and self._registry.wait_for_moves(required):
                continue
            if room.error is not None:
                if isinstance(room.error, VRAMOutOfMemoryError):
                    self.last_error = room.error
                raise room.error
            return room

    def _bring(self, model: ManagedModel) -> None:
        """Loads what is missing of a model that this thread has marked."""
        missing = settled(self._workers.decide(model.missing_bytes))
        if not missing:
            return
        room = self._room(Request(missing, model.rank, asked_by=f"loading {model.name}"), required=model)
        try:
            assert room.reservation is not None  # noqa: S101  a room without an error has one
            model.load(room.reservation)
        finally:
            room.release()

    def _evict(self, model: ManagedModel) -> int:
        with self._registry.moving(model, "leaving"):
            self._check_idle(model)
            return settled(self._workers.decide(self._reclaimer.evict, model, f"evict {model.name}"))

    def _check_idle(self, model: ManagedModel) -> None:
        with self._registry.lock:
            if model.leases:
                raise in_use(model.name, "in use by a call in progress", "Wait for it, or interrupt it")
            if model.pinned:
                raise in_use(model.name, "pinned", f"Let it leave with: %vram unpin {model.name}")

    def _pressure(self, need: int) -> int:
        """The guard's question, in the middle of an allocation of any thread: may ``need`` more bytes be had?

        Must not raise. An interrupt is remembered and raised by the guard when the operation has ended.
        """
        from vram_magic.guard.native import GRANTED, INTERRUPTED

        interrupted, future = 0, None
        while True:
            try:
                if self._workers.is_ours or self._registry.lock._is_owned():  # type: ignore[attr-defined]
                    return interrupted  # waiting for a decision here would wait for ourselves
                if future is None:
                    request = Request(need, self._registry.rank, asked_by="an allocation")
                    future = self._workers.decide(
                        self._reclaimer.make_room,
                        request,
                        credit_bytes=0,
                        user_code=False,
                    )
                room = future.result()
                if room.busy and self._registry.wait_for_moves():
                    future = None
                    continue
                if room.reservation is not None:
                    room.reservation.transfer()  # type: ignore[attr-defined]  the native guard's own kind
                    return GRANTED | interrupted
                self._refuse(room)
                return interrupted
            except KeyboardInterrupt:
                interrupted = INTERRUPTED
            except BaseException:  # noqa: BLE001  nothing may cross the C++ frames below
                return interrupted

    def _refuse(self, room: Room) -> None:
        if isinstance(room.error, VRAMOutOfMemoryError):
            self.last_error = room.error
        if self._guard is not None:
            self._guard.explain(str(room.error))

    # ---------------------------------------------------------------------------------------------------- rest

    @property
    def _bodies(self) -> _Bodies:
        if self._body_parts is None:
            raise VRAMError(
                "A ledger of declared sizes holds no torch models.\n"
                f"Its capacity is {format_size(self.budget_bytes)}.\nIt was made with total_vram_gb=.\n"
                "Use VRAMManager(device='cpu'), or load_model with a backend"
            )
        return self._body_parts

    def _processor_of(self, model: ManagedModel) -> Any:
        return self._bodies.processor_of(model)

    def _alive(self, model: ManagedModel) -> bool:
        return not isinstance(model, TorchModel) or model.thing is not None

    def _look(self, model: ManagedModel) -> None:
        """Brings figures up to date, unless somebody is moving the model or we would wait for ourselves."""
        if not (model.moving or model.forgotten or self._closed or self._workers.is_ours):
            settled(self._workers.decide(self._reclaimer.look, model))

    def _explain(self, model: ManagedModel) -> str:
        from vram_magic.explain import why

        return why(model, self.journal)

    def _clear_up(self) -> None:
        if self._registry.gone and not self._workers.is_ours:
            settled(self._workers.decide(self._reclaimer.clear_up))

    def _check_open(self) -> None:
        if self._closed:
            raise VRAMError(
                "This manager is closed.\nIt manages 0 models.\nmgr.close() was called, or the extension was unloaded."
                "\nTake the current one: vram_magic.manager()"
            )

    def close(self) -> None:
        """Hands every model back whole, takes the guard out, removes spill files. Twice is once."""
        if self._closed:
            return
        self._closed = True
        for model in list(self._registry.models.values()):
            with contextlib.suppress(UnknownModelError):
                self._forget(model)
        if self._guard is not None:
            self._guard.uninstall()
        if self._body_parts is not None:
            self._body_parts.store.close()
            _open.pop(self._device.name, None)
        self._workers.close()

    def __repr__(self) -> str:
        used, budget = format_size(self.used_bytes), format_size(self.budget_bytes)
        return f"<VRAMManager on {self.device}: {used} of {budget} used, {len(self._registry.models)} models>"


class _Bodies:
    """What torch models of one manager share: spill files, records, processors."""

    def __init__(
        self, device: Device, registry: Registry, workers: Workers, block_bytes: int, spill_dir: str | Path | None
    ) -> None:
        import weakref

        from vram_magic.residency.spill import SpillStore

        self._device, self._registry, self._workers = device, registry, workers
        self._block_bytes = block_bytes
        self._records: Any = weakref.WeakValueDictionary()
        self.store = SpillStore(Path(spill_dir) if spill_dir else None)
        self.store.open()
        self.processors: Any = weakref.WeakKeyDictionary()
        self._reading = threading.Lock()  # a leaf: two readers of one processor read it once

    def make(  # noqa: PLR0913
        self,
        name: str,
        thing: object,
        *,
        rank: int,
        tier: str | None,
        residency: str,
        pinned: bool,
        source: str | Path | None,
    ) -> TorchModel:
        from vram_magic.models.entry import EntryPoints
        from vram_magic.models.roots import origins_of, roots_of
        from vram_magic.residency.body import Body

        roots = roots_of(thing)
        origins = origins_of(roots, source)
        body = Body(roots, self._device, self.store, self._block_bytes, origins, self._records)
        entries = EntryPoints(self._registry, [module for _, module in roots])
        return TorchModel(
            name,
            thing,
            body,
            entries,
            self._workers,
            rank=rank,
            tier=tier,
            residency=residency,
            pinned=pinned,
            when_gone=self._registry.gone.append,
        )

    def processor_of(self, model: ManagedModel) -> Any:
        with self._reading:
            found = self.processors.get(model)
            if callable(found):
                found = self.processors[model] = found()
            return found


class _Reserve:
    """Room from ``with`` to its end: the body's allocations in this thread draw on it."""

    def __init__(self, manager: VRAMManager, request: Request) -> None:
        self._manager = manager
        self._request = request
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> VRAMManager:
        return self._enter(self._manager._room(self._request))

    def _enter(self, room: Room) -> VRAMManager:
        assert room.reservation is not None  # noqa: S101
        self._stack.callback(room.release)
        self._stack.enter_context(room.reservation.draw())
        return self._manager

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    async def __aenter__(self) -> VRAMManager:
        return self._enter(await self._manager._workers.call(lambda: self._manager._room(self._request)))

    async def __aexit__(self, *exc: object) -> None:
        self._stack.close()


def manager() -> VRAMManager:
    """This kernel's manager, made on first use; the magics use the same one."""
    if not _open:
        VRAMManager()
    return next(iter(_open.values()))


