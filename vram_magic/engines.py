"""Outside engines: models that torch does not see, of a declared size, behind a backend's two coroutines."""

from __future__ import annotations

from dataclasses import dataclass

from vram_magic.core import Core
from vram_magic.models.managed import EngineModel, ManagedModel
from vram_magic.policy import DEFAULT_TIERS
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

    def load(self, fresh: EngineModel) -> EngineModel:
        """The engine, loaded: the one of the same id, backend and size that is there, else the fresh one."""
        registry = self._core.registry
        with registry.lock:
            known = registry.models.setdefault(fresh.name, fresh)
        model = known if isinstance(known, EngineModel) and known.key == fresh.key else None
        if model is None:
            self.unload(known)
            return self.load(fresh)
        try:
            registry.ensure(model)
        except BaseException:
            registry.remove_unloaded(model)
            raise
        return model

    def unload(self, model: ManagedModel) -> None:
        """Unloads and forgets. Raises `ModelInUseError`, and what the backend raises: it then stays."""
        registry = self._core.registry
        with registry.moving(model, "leaving"):
            self._core.check_idle(model)
            settled(self._core.workers.decide(self._core.reclaimer.evict, model, f"unloading {model.name}"))
            registry.remove(model)
