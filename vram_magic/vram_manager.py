"""The manager: the face of it all, for notebooks and Python.

How a decision flows: something allocates, the guard (or a call of a managed model) asks for room, the `Reclaimer` plans
it whole and lets victims leave one by one, the device measures, the journal tells, and the room goes to who asked.

This module checks arguments and hands on: to `Core` for room, to `Loading` for torch models, to `Engines` for outside
ones. It takes no lock of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

from vram_magic.core import Core
from vram_magic.defaults import options
from vram_magic.devices.ledger import LedgerDevice
from vram_magic.engines import Engines, ModelSlot
from vram_magic.errors import VRAMError
from vram_magic.handle import Handle, check_residency
from vram_magic.journal import Journal
from vram_magic.models.managed import Backend, EngineModel, ManagedModel
from vram_magic.oom import VRAMOutOfMemoryError
from vram_magic.policy import Plan, Request
from vram_magic.reserve import Reserve
from vram_magic.sizes import bytes_to_gb, format_size, gb_to_bytes, parse_size
from vram_magic.workers import settled

if TYPE_CHECKING:
    from vram_magic.devices.base import Outside
    from vram_magic.guard.native import NativeGuard
    from vram_magic.loading import Loading
    from vram_magic.peaks import Peaks

__all__ = ["ModelSlot", "VRAMManager", "manager"]

_open: dict[str, VRAMManager] = globals().get("_open", {})
"""The open manager of each device; survives a reload of this module."""

_opening = threading.RLock()
"""A leaf: two threads that ask for the manager get one."""

_NAME_LIMIT = 200


class VRAMManager:
    """Decides what stays in one device's memory.

    Args:
        device: ``"cuda"``, ``"cuda:1"``, ``"cpu"`` ..., or None for the accelerator, and the CPU where there is none
        budget: bytes (int, or text such as ``"12GiB"``) that this kernel may use, or ``"auto"``
        block_bytes: the size up to which weights are grouped to leave and return together
        total_vram_gb: for a ledger of declared sizes only, without a device: its capacity in units of 2**30 bytes
        spill_dir: where weights go that no file holds; default ``VRAM_MAGIC_SPILL_DIR``, else a temporary folder
        host_budget: RAM that copies of an accelerator's weights may take, in bytes or ``"auto"`` (what is available,
            less a reserve); beyond it they go to ``spill_dir``

    Raises:
        VRAMError: the device has an open manager already, or is not there
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
        host_budget: int | str = "auto",
    ) -> None:
        block_size = parse_size(block_bytes, what="block_bytes")
        self._guard: NativeGuard | None = None
        self._torch_models: Loading | None = None
        if total_vram_gb is not None:
            self._core = Core(LedgerDevice(gb_to_bytes(total_vram_gb)))
        else:
            with _opening:
                self._open(device, budget, block_size, spill_dir, host_budget)
        self._engines = Engines(self._core)

    def _open(
        self,
        name: str | None,
        budget: int | str,
        block_bytes: int,
        spill_dir: str | Path | None,
        host_budget: int | str,
    ) -> None:
        from vram_magic.devices.host import HostMemory  # here and not above: these need torch
        from vram_magic.loading import Loading
        from vram_magic.opening import check_free, open_device, which_device
        from vram_magic.pressure import Pressure

        wanted = which_device(name)
        check_free(str(wanted), _open)
        host = HostMemory(host_budget)
        device, self._guard = open_device(wanted, budget)
        self._core = Core(device)
        self._torch_models = Loading(self._core, block_bytes, spill_dir, host)
        device.start()
        if self._guard is not None:
            self._guard.install(Pressure(self._core, self._guard))
        _open[device.name] = self

    def close(self) -> None:
        """Hands every model back whole, takes the guard out, removes spill files. Twice is once. Not in an unload."""
        self._core.workers.check_not_in_unload()
        if not self._core.registry.close():
            return
        try:
            self._core.forget_all()
        finally:  # an interrupt must not leave the guard in
            if self._guard is not None:
                self._guard.uninstall()
            self._core.device.stop()
            if self._torch_models is not None:
                self._torch_models.store.close()
                _open.pop(self.device, None)
            self._core.workers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        used, budget = format_size(self.used_bytes), format_size(self.budget_bytes)
        return f"<VRAMManager on {self.device}: {used} of {budget} used, {len(self._core.registry.models)} models>"

    # ------------------------------------------------------------------------------------------------ figures

    @property
    def device(self) -> str:
        return self._core.device.name

    @property
    def guard(self) -> str:
        """How allocations are noticed, in words."""
        return self._core.device.guard

    @property
    def budget_bytes(self) -> int:
        """What this kernel may use of the device. Setting it is `set_budget`."""
        return self._core.device.budget_bytes

    @budget_bytes.setter
    def budget_bytes(self, setting: int | str) -> None:
        self.set_budget(setting)

    def set_budget(self, setting: int | str) -> int:
        """Sets the budget (bytes, text, or ``"auto"``); below use, idle models leave at once. Returns the bytes freed.

        Raises:
            VRAMOutOfMemoryError: what is in use does not fit the new budget; nothing moved and the old one stays
        """
        self._core.check_open()
        device = self._core.device
        wanted, freed = device.budget_for(setting), 0
        if wanted < device.meter.committed_bytes:
            freed = settled(self._core.workers.decide(self._core.reclaimer.lower_budget, wanted))
        device.set_budget(setting)
        return freed

    @property
    def budget_setting(self) -> int | str:
        """What the budget was set to: bytes, or ``"auto"``."""
        return self._core.device.budget_setting

    @property
    def used_bytes(self) -> int:
        """What torch has allocated on the device now, and the declared sizes of loaded outside engines."""
        return self._core.device.meter.live_bytes

    @property
    def free_bytes(self) -> int:
        """The budget less `used_bytes`."""
        return self.budget_bytes - self.used_bytes

    @property
    def peak_bytes(self) -> int:
        """The highest `used_bytes` since `reset_peak`."""
        return self._core.peaks.peak_bytes

    @property
    def peaks(self) -> Peaks:
        """Peaks of other spans of time: ``lap = mgr.peaks.begin()``, then ``mgr.peaks.end(lap)`` in bytes."""
        return self._core.peaks

    def reset_peak(self) -> None:
        self._core.peaks.reset()

    def outside(self, *, processes: bool = False) -> Outside | None:
        """What the driver says of the whole device, or None on the CPU; with ``processes`` those of others by name."""
        return self._core.device.outside(processes=processes)

    @property
    def spilled_bytes(self) -> int:
        """Bytes of disk that spill files take."""
        return self._torch_models.store.used_bytes() if self._torch_models else 0

    @property
    def tiers(self) -> MutableMapping[str, int]:
        """Tier names and their ranks; add your own."""
        return self._core.registry.tiers

    @property
    def journal(self) -> Journal:
        """The latest decisions, each with its reason."""
        return self._core.journal

    @property
    def last_error(self) -> VRAMOutOfMemoryError | None:
        """The last out-of-memory, a bare allocation's too."""
        return self._core.last_error

    # ------------------------------------------------------------------------------------------------- models

    @property
    def models(self) -> Mapping[str, Handle]:
        """The managed models by name, as they are now."""
        self._core.clear_up()
        with self._core.registry.lock:
            models = dict(self._core.registry.models)
        return MappingProxyType({name: self._handle(model) for name, model in models.items()})

    def __getitem__(self, name: str) -> Handle:
        self._core.clear_up()
        return self._handle(self._core.registry.get(name))

    def __contains__(self, name: object) -> bool:
        self._core.clear_up()
        return name in self._core.registry.models

    def _handle(self, model: ManagedModel, keep: object = None) -> Handle:
        return Handle(self._core, model, self._read_processor, keep)

    def _read_processor(self, model: ManagedModel) -> Any:
        return self._torch_models.processor_of(model) if self._torch_models else None

    def register(
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
        wishes = self._wishes(name, tier, priority, residency, pin, workspace)
        return self._handle(self._loading.register(name, obj, wishes, source))

    def load(
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
        wishes = self._wishes(name, tier, priority, residency, pin, workspace)
        model, built = self._loading.load(name, source, wishes, dtype=dtype, into=into, lazy=lazy)
        return self._handle(model, built)

    def _wishes(
        self, name: object, tier: str | int, priority: int | None, residency: str, pin: bool, workspace: Any
    ) -> Any:
        self._check_name(name)
        self._loading  # noqa: B018  a ledger refuses before anything is looked at
        from vram_magic.loading import Wishes

        tier_name, rank = self._core.registry.rank_of(tier, priority)
        return Wishes(rank, tier_name, check_residency(residency), bool(pin), workspace)

    def _check_name(self, name: object) -> None:
        self._core.check_open()
        if not isinstance(name, str) or not name.strip() or len(name) > _NAME_LIMIT or not name.isprintable():
            raise ValueError(f"a model's name is printable text of 1 to {_NAME_LIMIT} characters, not {name!r:.80}")

    @property
    def _loading(self) -> Loading:
        if self._torch_models is None:
            raise VRAMError(
                "A ledger of declared sizes holds no torch models.\n"
                f"Its capacity is {format_size(self.budget_bytes)}.\nIt was made with total_vram_gb=.\n"
                "Use VRAMManager(device='cpu'), or load_model with a backend"
            )
        return self._torch_models

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
        if not all(callable(getattr(backend, verb, None)) for verb in ("load", "unload")):
            raise TypeError(f"a backend has `async load(id)` and `async unload(id)`; {backend!r:.80} has not")
        size, (tier, rank) = gb_to_bytes(vram_gb), self._core.registry.rank_of(model_type, priority)

        def make() -> EngineModel:
            model = EngineModel(model_id, backend, size, self._core.device, self._core.workers)
            model.tier, model.rank, model.pinned = tier, rank, pin
            return model

        return self._handle(await self._core.workers.call(lambda: self._engines.load(make)))

    async def unload_model(self, model_id: str) -> None:
        """Unloads and forgets an engine. Raises `UnknownModelError`, `ModelInUseError`, and what the backend raises."""
        await self._core.workers.call(lambda: self._engines.unload(self._core.registry.get(model_id)))

    def is_loaded(self, model_id: str) -> bool:
        return model_id in self.get_loaded_models()

    @property
    def available_vram_gb(self) -> float:
        """`free_bytes` in units of 2**30."""
        return bytes_to_gb(self.free_bytes)

    def get_loaded_models(self) -> dict[str, ModelSlot]:
        """What is on the device, by id."""
        return self._engines.loaded()

    # ---------------------------------------------------------------------------------------------------- room

    def plan(self, need: int | str, tier: str | int | None = None, prefer: Sequence[str] = ()) -> Plan:
        """What would leave for a request, in order, and why; moves nothing."""
        request = self._request(need, tier, prefer, "plan")
        return settled(self._core.workers.decide(self._core.reclaimer.preview, request))

    def make_room(self, need: int | str, tier: str | int | None = None, prefer: Sequence[str] = ()) -> int:
        """Makes models leave until ``need`` bytes are free; returns the bytes freed, measured (0 when it fits).

        Raises:
            VRAMOutOfMemoryError: it cannot be done; nothing moved
        """
        request = self._request(need, tier, prefer, "make_room")
        room = self._core.room(request, credit_bytes=self._core.device.meter.credit_bytes)
        room.release()
        return room.freed_bytes

    async def amake_room(self, need: int | str, tier: str | int | None = None, prefer: Sequence[str] = ()) -> int:
        """`make_room` without blocking the event loop."""
        return await self._core.workers.call(lambda: self.make_room(need, tier, prefer))

    def reserve(self, need: int | str, tier: str | int | None = None) -> Reserve:
        """``with mgr.reserve("3GiB"):`` room kept for the body's own allocations. ``async with`` too."""
        return Reserve(self._core, self._request(need, tier, (), "reserve"))

    def _request(self, need: int | str, tier: str | int | None, prefer: Sequence[str], asked_by: str) -> Request:
        self._core.check_open()
        rank = None if tier is None else self._core.registry.rank_of(tier)[1]
        for name in prefer:
            self._core.registry.get(name)
        size = parse_size(need, what="need")
        return Request(size, rank, tuple(prefer), f"{asked_by}({format_size(size)})")

    def panel(self) -> Any:
        """The live panel, a widget; shown any number of times."""
        from vram_magic.notebook.panel import open_panel

        return open_panel(self)


def manager() -> VRAMManager:
    """This kernel's manager, made on first use; the magics use the same one."""
    with _opening:
        if not _open:
            VRAMManager(**options)
        return next(iter(_open.values()))
