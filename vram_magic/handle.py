"""The handle of a managed model: what a user holds, asks and tells.

It keeps the object weakly, except the one that `VRAMManager.load` returns for an object it built itself. Sizes are
bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vram_magic.errors import UnknownModelError
from vram_magic.explain import why
from vram_magic.models.managed import EngineModel, ManagedModel, TorchModel
from vram_magic.policy import RESIDENCIES
from vram_magic.sizes import format_size

if TYPE_CHECKING:
    from vram_magic.core import Core
    from vram_magic.registry import Lease

__all__ = ["Handle", "LeaseContext", "check_residency"]


class Handle:
    """One managed model, by name."""

    def __init__(
        self, core: Core, model: ManagedModel, read_processor: Callable[[ManagedModel], Any], keep: object = None
    ) -> None:
        self._core = core
        self._managed = model
        self._read_processor = read_processor
        self._keep = keep

    def __repr__(self) -> str:
        if self._managed.forgotten or getattr(self._managed, "thing", self) is None:
            return f"<{self.name}: not managed any more>"
        return f"<{self.name}: {self.state}, {format_size(self._managed.total_bytes)}, tier {self.tier}>"

    # ------------------------------------------------------------------------------------------------ asking

    @property
    def name(self) -> str:
        return self._managed.name

    @property
    def model(self) -> Any:
        """The object itself. Raises `UnknownModelError` when it is gone; None for an outside engine."""
        if isinstance(self._managed, EngineModel):
            return None
        thing = self._managed.thing if isinstance(self._managed, TorchModel) else None
        if thing is None:
            raise UnknownModelError(
                f"The object of {self.name!r} is gone.\n0 B of it are left.\n"
                "Its last reference was deleted, and the manager keeps none.\n"
                f"Load it again with: %load_model {self.name} SOURCE"
            )
        return thing

    @property
    def processor(self) -> Any:
        """The tokenizer or processor from the model's folder, read on first use; None where there is none."""
        return self._read_processor(self._managed)

    @property
    def tier(self) -> str | int:
        """The tier's name, or the bare priority."""
        return self._managed.rank if self._managed.tier is None else self._managed.tier

    @tier.setter
    def tier(self, tier: str | int) -> None:
        registry = self._core.registry
        with registry.lock:
            self._managed.tier, self._managed.rank = registry.rank_of(tier)

    @property
    def priority(self) -> int:
        """The rank: lower leaves earlier."""
        return self._managed.rank

    @property
    def pinned(self) -> bool:
        return self._managed.pinned

    @property
    def residency(self) -> str:
        """Where it goes when it must leave; ``"disk"`` too once a model that asked to stay had to leave."""
        return "disk" if self._managed.demoted and self._managed.residency == "device" else self._managed.residency

    @residency.setter
    def residency(self, residency: str) -> None:
        self._managed.residency = check_residency(residency)
        self._core.promote(self._managed)

    @property
    def state(self) -> str:
        """Where the weights are: ``"device"``, ``"partial"``, ``"host"`` or ``"disk"``."""
        self._refresh()
        return self._managed.state

    @property
    def total_bytes(self) -> int:
        """Unique storages of parameters and buffers, ties once, gradients not."""
        self._refresh()
        return self._managed.total_bytes

    @property
    def device_bytes(self) -> int:
        """What of them is on the device."""
        self._refresh()
        return self._managed.device_bytes

    @property
    def blocks(self) -> tuple[int, int]:
        """(blocks whole on the device, blocks in all); an outside engine is one."""
        self._refresh()
        return self._managed.blocks

    @property
    def in_use(self) -> bool:
        return bool(self._managed.leases)

    def why(self) -> str:
        """Why the model is where it is, in plain words."""
        self._refresh()
        return why(self._managed, self._core.journal)

    def _refresh(self) -> None:
        self._core.look(self._managed)

    # ------------------------------------------------------------------------------------------------ telling

    def load(self) -> Handle:
        """Brings every block to the device. Raises `VRAMOutOfMemoryError`."""
        self._known()
        if not self._core.registry.ensure(self._managed):
            self._known()
        return self

    async def aload(self) -> Handle:
        """`load` without blocking the event loop."""
        return await self._core.workers.call(self.load)

    def evict(self) -> int:
        """Moves out every block that can leave; returns the bytes freed. Raises `ModelInUseError`."""
        self._known()
        freed = self._core.evict(self._managed)
        if not freed:
            self._known()  # it may have been forgotten while we waited
        return freed

    async def aevict(self) -> int:
        """`evict` without blocking the event loop."""
        return await self._core.workers.call(self.evict)

    def pin(self) -> None:
        """Forbids to take anything of it."""
        self._managed.pinned = True

    def unpin(self) -> None:
        self._managed.pinned = False

    def forget(self) -> None:
        """Ends the management; the object stays, whole and usable."""
        self._core.forget(self._managed)

    def lease(self) -> LeaseContext:
        """``with h.lease() as model:`` resident and safe inside; ``async with`` too."""
        self._known()
        return LeaseContext(self._core, self._managed, self)

    def _known(self) -> None:
        if not self._managed.forgotten and getattr(self._managed, "thing", self) is None:
            self.model  # noqa: B018  raises
        if self._managed.forgotten:
            self._core.registry.get(self.name)  # raises, unless the name is used anew
            raise UnknownModelError(
                f"This handle's model {self.name!r} was forgotten.\n0 B of it are managed.\n"
                f"The name now stands for another model.\nTake its handle: mgr[{self.name!r}]"
            )


class LeaseContext:
    """A use of a model from ``with`` to its end."""

    def __init__(self, core: Core, model: ManagedModel, handle: Handle) -> None:
        self._core = core
        self._model = model
        self._handle = handle
        self._leases: list[Lease] = []

    def __enter__(self) -> Any:
        return self._held(self._core.registry.begin(self._model))

    def _held(self, lease: Lease) -> Any:
        try:
            self._leases.append(lease)
            return self._handle.model
        except BaseException:
            self._core.registry.end(lease)
            raise

    def __exit__(self, *exc: object) -> None:
        self._core.registry.end(self._leases.pop())

    async def __aenter__(self) -> Any:
        return self._held(await self._core.registry.begin_async(self._model))

    async def __aexit__(self, *exc: object) -> None:
        self.__exit__(*exc)


def check_residency(residency: str) -> str:
    """The residency, if it is one. Raises ValueError."""
    if residency not in RESIDENCIES:
        raise ValueError(f"a residency is one of {', '.join(RESIDENCIES)}, not {residency!r}")
    return residency
