"""Which modules an object holds: a module holds itself, anything else what its attributes lead to.

An attribute is looked at, and what lies one level inside a list, tuple or dict; so a pipeline's parts are
found and a notebook's whole memory is not. Calls nobody's code, but for the ``components`` of a pipeline.

No locks. Refuses to know where the object came from, what its weights are and what becomes of it.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["holds_modules", "modules_of"]


def holds_modules(obj: object) -> bool:
    """Tell whether it is an `nn.Module`, or holds one where `modules_of` looks."""
    return bool(modules_of(obj))


def modules_of(obj: object) -> list[tuple[str, nn.Module]]:
    """The distinct root modules of an object with the names it holds them under; "" for a module itself."""
    if isinstance(obj, nn.Module):
        return [("", obj)]
    found: dict[int, tuple[str, nn.Module]] = {}
    for name, value in _leaves(obj):
        if isinstance(value, nn.Module):
            found.setdefault(id(value), (name, value))
    inner = {id(part) for _, root in found.values() for part in root.modules() if part is not root}
    return [pair for key, pair in found.items() if key not in inner]


def _leaves(obj: object) -> Iterator[tuple[str, object]]:
    """An object's attributes, and what lies one level inside those that are lists, tuples or dicts."""
    for name, value in _attributes(obj):
        if isinstance(value, dict):
            yield from ((f"{name}.{key}", item) for key, item in list(value.items()))
        elif isinstance(value, list | tuple):
            yield from ((f"{name}.{index}", item) for index, item in enumerate(value))
        else:
            yield name, value


def _attributes(obj: object) -> Iterator[tuple[str, object]]:
    if isinstance(obj, type | types.ModuleType) or inspect.isroutine(obj):
        return  # their attributes belong to everyone
    yield from list(getattr(obj, "__dict__", {}).items())
    for kind in type(obj).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            yield slot, getattr(obj, slot, None)
    yield from _components(obj)


def _components(obj: object) -> list[tuple[str, object]]:
    """What a diffusers pipeline lists, where it is a property (a plain attribute was seen already)."""
    if not isinstance(inspect.getattr_static(obj, "components", None), property):
        return []
    try:
        components = obj.components  # type: ignore[attr-defined]
    except Exception:  # noqa: BLE001 - a half-built pipeline's property may raise anything
        return []
    return list(components.items()) if isinstance(components, Mapping) else []
