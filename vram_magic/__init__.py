"""vram_magic: several models that do not fit together on one device, in one notebook.

``%load_ext vram_magic`` in a notebook; `manager` or `VRAMManager` in Python. Importing this package imports neither
torch nor NVML nor widgets: names come from their modules when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from vram_magic.devices import FakeDevice
    from vram_magic.errors import BackingLostError, ModelInUseError, SourceError, UnknownModelError, VRAMError
    from vram_magic.handle import Handle
    from vram_magic.journal import Journal
    from vram_magic.oom import VRAMOutOfMemoryError
    from vram_magic.policy import Plan
    from vram_magic.vram_manager import ModelSlot, VRAMManager

__version__ = "0.1.0"

__all__ = [
    "BackingLostError",
    "FakeDevice",
    "Handle",
    "Journal",
    "ModelInUseError",
    "ModelSlot",
    "Plan",
    "SourceError",
    "UnknownModelError",
    "VRAMError",
    "VRAMManager",
    "VRAMOutOfMemoryError",
    "manager",
]

_HOME = {
    "BackingLostError": "errors",
    "FakeDevice": "devices",
    "Handle": "handle",
    "Journal": "journal",
    "ModelInUseError": "errors",
    "ModelSlot": "vram_manager",
    "Plan": "policy",
    "SourceError": "errors",
    "UnknownModelError": "errors",
    "VRAMError": "errors",
    "VRAMManager": "vram_manager",
    "VRAMOutOfMemoryError": "oom",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"vram_magic.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def manager() -> VRAMManager:
    """This kernel's manager, made on first use; the magics use the same one."""
    from vram_magic.vram_manager import manager as current

    return current()


def load_ipython_extension(shell: InteractiveShell) -> None:
    """``%load_ext vram_magic``."""
    from vram_magic.notebook import load

    load(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """``%unload_ext vram_magic``: undoes everything that loading and the magics did."""
    from vram_magic.notebook import unload

    unload(shell)
