"""Outside engines: models that torch does not see, of a declared size, behind a backend's two coroutines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vram_magic.core import Core
from vram_magic.models.managed import EngineModel, ManagedModel, TorchModel
from vram_magic.policy import DEFAULT_TIERS, Request
from vram_magic.sizes import bytes_to_gb
from vram_magic.workers import settled

__all__ = ["Engines", "ModelSlot"]


@dataclass(frozen=True, slots=True)
class ModelSlot:
    """A loaded model, as `VRAMManager.get_loaded_models` lists it; sizes in units of 2**30 bytes."""

    model_id: str
    model_type: str
    vram_gb: float
    priority: int

    @staticmethod
    def priority_rank(model_type: str) -> int:
        """The rank of a built-in tier. Raises KeyError."""
        return DEFAULT_TIERS[model_type]


class Engines:
    """Loads and unloads engines; called in threads that may wait."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def loaded(self) -> dict[str, ModelSlot]:
        """What is on the device, by id; torch models too."""
        with self._core.registry.lock:
            return {
                name: ModelSlot(name, str(m.rank if m.tier is None else m.tier), bytes_to_gb(m.device_bytes), m.rank)
                for name, m in self._core.registry.models.items()
                if m.device_bytes or m.complete
            }

    def load(self, make: Callable[[], EngineModel]) -> EngineModel:
        """The engine, loaded: the one of the same id, backend and size that is there, else a fresh one."""
        registry = self._core.registry
        while True:
            fresh = make()
            with registry.lock:
                known = registry.models.setdefault(fresh.name, fresh)
            if not isinstance(known, EngineModel) or known.key != fresh.key:
                self._make_way(known, fresh)
                continue
            try:
                if registry.ensure(known):
                    return known
            except BaseException:
                registry.remove_unloaded(known)
                raise

    def _make_way(self, known: ManagedModel, fresh: EngineModel) -> None:
        """Unloads what has the id, once it is sure that the fresh one will fit."""
        self._core.check_idle(known)
        request = Request(fresh.total_bytes, fresh.rank, asked_by=f"loading {fresh.name}")
        room = self._core.room(request, known, credit_bytes=known.device_bytes)
        try:
            self.unload(known)
        finally:
            room.release()

    def unload(self, model: ManagedModel) -> None:
        """Unloads and forgets. Raises `ModelInUseError`, and what the backend raises: it then stays."""
        registry = self._core.registry
        if isinstance(model, TorchModel):
            self._core.check_idle(model)
            self._core.forget(model)
            return
        with registry.moving(model, "leaving"):
            self._core.check_idle(model)
            settled(self._core.workers.decide(self._core.reclaimer.evict, model, f"unloading {model.name}"))
            registry.remove(model)
