"""The root modules of a user's object, and where their weights are believed to come from. Moves nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vram_magic.errors import SourceError, VRAMError
from vram_magic.models.holding import modules_of
from vram_magic.models.origin import find_origin
from vram_magic.residency.checkpoint import TensorRange

if TYPE_CHECKING:
    from torch import nn

__all__ = ["origins_of", "roots_of"]


def roots_of(thing: object) -> list[tuple[str, nn.Module]]:
    """(name prefix, module) of each distinct root. Raises `SourceError` for none, `VRAMError` for a foreign owner."""
    found = modules_of(thing)
    if not found:
        raise SourceError(
            f"An object of type {type(thing).__name__} is no model.\nIt holds 0 torch modules.\n"
            "A model is a torch.nn.Module, or an object with modules in its attributes.\n"
            "Give such an object, or a callable that builds one: %load_model NAME BUILDER"
        )
    for _, module in found:
        _refuse_other_owner(module)
    return [(f"{name}." if name else "", module) for name, module in found]


def _refuse_other_owner(module: nn.Module) -> None:
    """Hooks of accelerate move weights themselves: two owners would undo each other's work."""
    hooked = [name for name, child in module.named_modules() if "_hf_hook" in vars(child)]
    if hooked:
        raise VRAMError(
            f"{type(module).__name__} is moved by accelerate already.\n{len(hooked)} of its modules carry its hooks.\n"
            "It was loaded with device_map= or dispatched; two owners would undo each other's moves.\n"
            "Load it without device_map, or first: accelerate.hooks.remove_hook_from_module(model, recurse=True)"
        )


def origins_of(roots: list[tuple[str, nn.Module]], source: str | Path | None) -> dict[str, TensorRange]:
    """Where each tensor is believed to lie on disk, by its prefixed name. Raises `SourceError` for a bad source."""
    origins: dict[str, TensorRange] = {}
    for prefix, module in roots:
        origins |= {f"{prefix}{name}": place for name, place in find_origin(module, source).items()}
    return origins
