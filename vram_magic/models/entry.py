"""Entry points: how a call of a managed object comes to hold a lease.

A model is called through many doors: ``model(x)``, ``generate``, ``encode``, a child module. Each public method of the
managed modules is shadowed by an `EntryPoint` in the instance's ``__dict__``, as accelerate does with ``forward``. What
was tried and fails: replacing ``__class__`` (libraries compare it), forward hooks (they cost torch's fast paths, and
see ``forward`` only), hooks on every child (12 % on a small model). So children are shadowed only while some block is
out; while everything is there, a call costs one entry at the root. On an accelerator, children that are models of their
own (they name their device: a text encoder, say) are shadowed always, since people call them with inputs made for
where they last saw the weights.

An entry point refers to its object weakly, so ``del model`` frees at once. It copies and pickles as the plain bound
method, so copies of a managed model are plain models.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from vram_magic.errors import UnknownModelError
from vram_magic.models.execution import Carrier, ExecutionDevice, execution_device_of

if TYPE_CHECKING:
    from vram_magic.models.managed import ManagedModel
    from vram_magic.registry import Registry

__all__ = ["EntryPoint", "EntryPoints"]

# Saving reads the weights wherever they are: it needs no room.
_READS_IN_PLACE = {"save_pretrained", "push_to_hub"}


class EntryPoint:
    """One public method of one object, under a lease."""

    def __init__(
        self,
        thing: object,
        name: str,
        function: Callable[..., Any],
        bound: bool,
        registry: Registry,
        model: ManagedModel,
        execution_device: torch.device | None = None,
    ) -> None:
        self._thing = weakref.ref(thing)
        self._name = name
        self._function = function
        self._bound = bound
        self._registry = registry
        self._model = model
        self._outermost = function
        if execution_device is not None and name not in _READS_IN_PLACE:
            self._outermost = Carrier(function, execution_device, model)
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._bound:
            thing = self._thing()
            if thing is None:
                raise UnknownModelError(
                    f"{self._name} was called of a model that is gone.\n0 B of it are left.\n"
                    f"The last reference to {self._model.name!r} was deleted; a method alone does not keep it.\n"
                    "Keep the model in a variable while you use its methods"
                )
            args = (thing, *args)
        registry, model = self._registry, self._model
        # A traced call computes through the same code; what runs the compiled code holds the lease.
        if torch.compiler.is_compiling() or registry.inside(model):
            return self._function(*args, **kwargs)
        lease = registry.begin(model, bring=self._name not in _READS_IN_PLACE)
        try:
            result = self._outermost(*args, **kwargs)
        finally:
            registry.end(lease)
        if isinstance(result, _SUSPENDED):
            return _hold(registry, model, result)
        return result

    @property
    def shadowed(self) -> Callable[..., Any] | None:
        """The instance's own attribute that it stands for; None when it is the class's method."""
        return self._function if self._bound else None

    def _plain(self, thing: Any) -> Any:
        """The method as it is without us."""
        return self._function if self._bound else types.MethodType(self._function, thing)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._plain(self._thing()))

    def __getattr__(self, name: str) -> Any:
        if (name.startswith("__") and name not in _OF_METHODS) or name in ("_thing", "_function", "_bound"):
            raise AttributeError(name)
        return getattr(self._plain(self._thing()), name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._plain(memo.get(id(self._thing()), self._thing()))

    def __copy__(self) -> Any:
        return self._plain(self._thing())

    def __reduce__(self) -> Any:
        return getattr, (self._thing(), self._name)

    def __repr__(self) -> str:
        return f"<{self._name} of {self._model.name!r}, managed by vram_magic>"


_OF_METHODS = {"__code__", "__defaults__", "__func__", "__globals__", "__kwdefaults__", "__self__"}
_SUSPENDED = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)


def _hold(registry: Registry, model: ManagedModel, result: Any) -> Any:
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


class _PlainCopies:
    """Stands for the ``__reduce_ex__`` of a module with entry points: its copies and pickles are plain modules."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = weakref.ref(module)

    def __call__(self, protocol: Any) -> Any:
        module: Any = self._module()
        kind: Any = type(module)
        parts = kind.__reduce_ex__(module, protocol)
        if not isinstance(parts, tuple) or len(parts) < 3 or not isinstance(parts[2], dict):
            return parts  # a class that reduces in its own way
        return (*parts[:2], dict(_without_entries(parts[2])), *parts[3:])


def _without_entries(state: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in state.items():
        if isinstance(value, EntryPoint):
            if value.shadowed is not None:
                yield name, value.shadowed
        elif not isinstance(value, _PlainCopies):
            yield name, value


@dataclass(frozen=True, slots=True)
class _Shadow:
    """An entry point in its place. Both are referred to weakly: what it shadows may refer to its module."""

    module: weakref.ref[torch.nn.Module]
    name: str
    entry: weakref.ref[EntryPoint]

    def take_away(self) -> None:
        module = self.module()
        now = None if module is None else module.__dict__.get(self.name)
        if module is None or not isinstance(now, EntryPoint) or now is not self.entry():
            return  # gone, or replaced by the user
        module.__dict__.pop("__reduce_ex__", None)
        if now.shadowed is None:
            del module.__dict__[self.name]
        else:
            module.__dict__[self.name] = now.shadowed


class EntryPoints:
    """All entry points of one model: on its roots always, on the modules below only while asked to watch them."""

    def __init__(
        self,
        registry: Registry,
        roots: Iterable[torch.nn.Module],
        execution_device: torch.device | None = None,
        thing: object = None,
    ) -> None:
        """``execution_device``: an accelerator to bring inputs to, None for the CPU; ``thing``: the roots' holder."""
        self._registry = registry
        self._execution = None if execution_device is None else ExecutionDevice(execution_device)
        self._thing = _weakly(thing)
        self._roots = [weakref.ref(root) for root in roots]
        self._on_roots: list[_Shadow] = []
        self._on_children: list[_Shadow] = []
        # The same entry point comes back each time: a compiled call would be compiled anew for another one.
        self._known: weakref.WeakKeyDictionary[torch.nn.Module, dict[str, EntryPoint]] = weakref.WeakKeyDictionary()

    def install(self, model: ManagedModel) -> None:
        roots = self._living()
        always = [*roots, *self._announced(roots)]
        self._on_roots = [shadow for module in always for shadow in self._shadow(module, model)]

    def watch_children(self, model: ManagedModel) -> None:
        if self._on_children:
            return
        roots = self._living()
        self._announced(roots)  # a child may be new
        children = [child for root in roots for child in root.modules() if child not in roots]
        self._on_children = [shadow for child in children for shadow in self._shadow(child, model)]

    def unwatch_children(self) -> None:
        watched, self._on_children = self._on_children, []
        for shadow in watched:
            shadow.take_away()

    def remove(self) -> None:
        self.unwatch_children()
        for shadow in self._on_roots:
            shadow.take_away()
        self._on_roots = []
        if self._execution is not None:
            self._execution.withdraw()

    def _announced(self, roots: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """The modules whose ``device`` now names the execution device, the object's own too; none on the CPU."""
        if self._execution is None:
            return []
        modules = dict.fromkeys(module for root in roots for module in root.modules())
        self._execution.announce([self._thing(), *modules])
        return [module for module in modules if execution_device_of(module) is not None]

    def _living(self) -> list[torch.nn.Module]:
        return [root for ref in self._roots if (root := ref()) is not None]

    def _shadow(self, module: torch.nn.Module, model: ManagedModel) -> list[_Shadow]:
        done: list[_Shadow] = []
        if isinstance(module, torch.jit.ScriptModule):
            return done  # its methods live in C++
        for name in _public_methods(type(module)):  # type: ignore[arg-type]
            own = module.__dict__.get(name)
            if isinstance(own, EntryPoint):
                continue  # watched by a model that shares the module
            entry = self._entry(module, name, own, model)
            if entry is not None:
                module.__dict__[name] = entry
                module.__dict__.setdefault("__reduce_ex__", _PlainCopies(module))
                done.append(_Shadow(weakref.ref(module), name, weakref.ref(entry)))
        return done

    def _entry(self, module: torch.nn.Module, name: str, own: Any, model: ManagedModel) -> EntryPoint | None:
        function, bound = _unwrapped(module, name, own)
        device = None if self._execution is None else self._execution.device
        if function is None or bound:
            return None if function is None else EntryPoint(module, name, function, True, self._registry, model, device)
        known = self._known.setdefault(module, {})
        if name not in known:
            known[name] = EntryPoint(module, name, function, False, self._registry, model, device)
        return known[name]


def _weakly(thing: object) -> Callable[[], object]:
    try:
        return weakref.ref(thing)
    except TypeError:  # None, or a class with __slots__
        return lambda: None


def _unwrapped(module: torch.nn.Module, name: str, own: Any) -> tuple[Callable[..., Any] | None, bool]:
    """What the name calls now, and whether it brings its own object along."""
    if own is None:
        return getattr(type(module), name), False
    if isinstance(own, types.MethodType) and own.__self__ is module:
        return own.__func__, False  # a bound method of the object in its own dict would be a cycle through us
    return (own, True) if callable(own) else (None, True)


@functools.lru_cache(maxsize=4096)
def _public_methods(kind: type) -> tuple[str, ...]:
    """Names of the methods that compute: the class's own and inherited ones, without those of torch's base class."""
    names = {"forward"}
    for base in kind.__mro__:
        if base.__module__.startswith("torch.nn.") or base is object:
            continue
        names |= {name for name, value in vars(base).items() if isinstance(value, types.FunctionType)}
    inherited = set(dir(torch.nn.Module)) - {"forward"}
    return tuple(sorted(n for n in names - inherited if not n.startswith("_")))
