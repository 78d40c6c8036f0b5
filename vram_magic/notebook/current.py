"""The open manager, seen from the notebook without importing or making anything, and its models' cached figures.

The one place of this package that reads private parts of a manager: what stands here has no public name. Figures are
bytes. Takes the registry's lock for as long as a list takes to copy; refuses to survey weights, which costs, and
which belongs to the deciding thread.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vram_magic.devices.base import Device
    from vram_magic.models.managed import ManagedModel
    from vram_magic.vram_manager import VRAMManager

__all__ = ["close_managers", "device_of", "is_open", "managed_models", "open_manager", "open_managers"]


def open_managers() -> dict[str, VRAMManager]:
    """The open managers by device; empty, at no cost, while none was ever made."""
    module = sys.modules.get("vram_magic.vram_manager")
    return {} if module is None else dict(module._open)  # noqa: SLF001  has no public name


def open_manager() -> VRAMManager | None:
    """The manager that the magics use, if there is one."""
    return next(iter(open_managers().values()), None)


def is_open(manager: VRAMManager) -> bool:
    """Whether the manager still manages."""
    return not manager._core.closed  # noqa: SLF001  has no public name


def device_of(manager: VRAMManager) -> Device:
    """The device that it manages; `VRAMManager.device` is its name only."""
    return manager._core.device  # noqa: SLF001  has no public name


def close_managers() -> None:
    """Closes every open manager."""
    for manager in open_managers().values():
        manager.close()


def managed_models(manager: VRAMManager) -> list[ManagedModel]:
    """The models by rank, then name. Unlike ``manager.models`` it never waits for a decision in progress."""
    registry = manager._core.registry  # noqa: SLF001  `manager.models` waits, and its handles look anew
    with registry.lock:
        models = list(registry.models.values())
    alive = (model for model in models if getattr(model, "thing", model) is not None)
    return sorted(alive, key=lambda model: (model.rank, model.name))
