"""Results that go on after the call that gave them: a generator or coroutine of a model holds a lease of its own.

It holds it from its first step until it is exhausted, closed or dropped. Takes no lock of its own and counts no bytes;
refuses to know how the model was called.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import AsyncGenerator, Coroutine, Generator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vram_magic.models.managed import ManagedModel
    from vram_magic.registry import Registry

__all__ = ["SUSPENDED", "hold"]

SUSPENDED = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)


def hold(registry: Registry, model: ManagedModel, result: Any) -> Any:
    """The generator or coroutine, holding a lease of its own from its first step to its end."""
    if isinstance(result, types.GeneratorType):
        return _held_generator(registry, model, result)
    if isinstance(result, types.CoroutineType):
        return _held_coroutine(registry, model, result)
    return _held_async_generator(registry, model, result)


def _held_generator(
    registry: Registry, model: ManagedModel, result: Generator[Any, Any, Any]
) -> Generator[Any, Any, Any]:
    lease = registry.begin(model, suspended=True)
    try:
        return (yield from result)
    finally:
        registry.end(lease)


async def _held_coroutine(registry: Registry, model: ManagedModel, result: Coroutine[Any, Any, Any]) -> Any:
    lease = await registry.begin_async(model)
    try:
        return await result
    finally:
        registry.end(lease)


async def _held_async_generator(
    registry: Registry, model: ManagedModel, result: AsyncGenerator[Any, Any]
) -> AsyncGenerator[Any, Any]:
    lease = await registry.begin_async(model)
    try:
        async with contextlib.aclosing(result):
            async for item in result:
                yield item
    finally:
        registry.end(lease)
