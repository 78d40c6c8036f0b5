"""Entry points: how a call of a managed object comes to hold a lease.

A model is called through many doors: ``model(x)``, ``generate``, ``encode``, a child module. Each public method of the
managed modules is shadowed by an `EntryPoint` in the instance's ``__dict__``, as accelerate does with ``forward``. What
was tried and fails: replacing ``__class__`` (libraries compare it), forward hooks (they cost torch's fast paths, and
see ``forward`` only), hooks on every child (12 % on a small model). So all children are shadowed only while some block
is out; while everything is there, only the root and its branches (an encoder, a decoder) are. On an accelerator,
children that are models of their own (they name their device: a text encoder, say) are shadowed always, since people
call them with inputs made for where they last saw the weights.

``forward`` is too late where something runs before it: hooks, which may read weights, and compiled code, which is made
for the weights as it finds them. So modules with hooks have an entry point in place of ``_call_impl``, which runs the
hooks and ``forward``, and what ``module.compile()`` sets is shadowed as well. All modules have the first while some
block is out, since hooks may still come. What ``torch.compile(module)`` gives is `compiled`'s.

An entry point refers to its object weakly, so ``del model`` frees at once. It copies and pickles as the plain bound
method, so copies of a managed model are plain models.

One lock guards the lists of what is shadowed: a manager's thread changes them, and whoever compiles a module. Nothing
is waited for under it; `compiled`'s and `execution`'s locks may be taken under it. Counts no bytes.
"""

from __future__ import annotations

import functools
import inspect
import operator
import os
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from vram_magic.errors import UnknownModelError
from vram_magic.models.compiled import CompiledCaller, CompiledCalls, compiled_module
from vram_magic.models.doors import COMPILE, HAND_ON, READS, STATE_DICT, branches_of, doors_of
from vram_magic.models.execution import Carrier, ExecutionDevice, execution_device_of
from vram_magic.models.suspended import SUSPENDED, hold
from vram_magic.residency.leaves import has_wrappers

if TYPE_CHECKING:
    from vram_magic.models.managed import ManagedModel
    from vram_magic.registry import Registry

__all__ = ["EntryPoint", "EntryPoints"]

_forward_of = operator.attrgetter("forward")


class EntryPoint:
    """One public method of one object, under a lease."""

    def __init__(
        self,
        thing: object,
        name: str,
        own: Callable[..., Any] | None,
        registry: Registry,
        model: ManagedModel,
        execution_device: torch.device | None = None,
    ) -> None:
        """``own``: what the instance has under the name; None where it is its class's."""
        self._bring = name not in READS or has_wrappers(thing, execution_device)
        function: Callable[..., Any] = getattr(type(thing), name) if own is None else own
        self._bound = self._own = own is not None
        if isinstance(own, types.MethodType) and own.__self__ is thing:
            function, self._bound = own.__func__, False  # the object itself would be a cycle through us
        functools.update_wrapper(self, function, updated=())
        self._thing = weakref.ref(thing)
        self._name = name
        self._find = functools.partial(_own if self._own else _of_class, self._thing, name, function)
        self._registry = registry
        self._model = model
        self._carrier: Carrier | None = None
        if execution_device is not None and name not in READS:
            self._carrier = self._carrier_to(execution_device)

    def _carrier_to(self, device: torch.device) -> Carrier:
        find, thing = self._find, self._thing
        if self._name in HAND_ON:
            return Carrier(device, self._model, lambda: _forward_of(thing()), not self._bound)
        return Carrier(device, self._model, find)

    @property
    def _function(self) -> Callable[..., Any]:
        """What we stand for."""
        return self._find()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._bound:
            thing = self._thing()
            if thing is None:
                raise self._gone()
            args = (thing, *args)
        return self.leased(self._function, args, kwargs)

    def _gone(self) -> UnknownModelError:
        return UnknownModelError(
            f"{self._name} was called of a model that is gone.\n0 B of it are left.\n"
            f"The last reference to {self._model.name!r} was deleted; a method alone does not keep it.\n"
            "Keep the model in a variable while you use its methods"
        )

    def leased(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the function as if it were this method."""
        registry, model = self._registry, self._model
        # A traced call computes through the same code. Who calls the compiled code holds the lease: the entry in place
        # of what `compile` set, or `CompiledCaller`. Where the user compiled a function that calls us, nobody does.
        if torch.compiler.is_compiling() or registry.inside(model):
            return function(*args, **kwargs)
        lease, begun = registry.begin(model, bring=self._bring), None
        try:
            begun = model.working.begin()
            result = function(*args, **kwargs) if self._carrier is None else self._carrier(function, args, kwargs)
        finally:
            registry.end(lease)
            model.working.end(begun)
        if isinstance(result, SUSPENDED):
            return hold(registry, model, result)
        return result

    @property
    def shadowed(self) -> Callable[..., Any] | None:
        """The instance's own attribute that it stands for; None when it is the class's method."""
        return self._plain(self._thing()) if self._own else None

    def _plain(self, thing: Any) -> Any:
        """The method as it is without us."""
        return self._function if self._bound else types.MethodType(self._function, thing)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._plain(self._thing()))

    def __getattr__(self, name: str) -> Any:
        if (name.startswith("__") and name not in _OF_METHODS) or name in ("_thing", "_find", "_function", "_bound"):
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


def _own(_thing: Callable[[], Any], _name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _of_class(thing: Callable[[], Any], name: str, known: Callable[..., Any]) -> Callable[..., Any]:
    """The class's method as it is now: a later cell may define it anew, and libraries replace some."""
    living = thing()
    found: Callable[..., Any] = known if living is None else getattr(type(living), name)
    return found


class _Compile(EntryPoint, CompiledCaller):
    """``compile`` of a module, which needs no lease. It stands for the module where compiled forms of it are called."""

    def __init__(self, entries: EntryPoints, *args: Any) -> None:
        super().__init__(*args)
        self._entries = entries

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._thing()
        if module is None:
            raise self._gone()
        result = self._plain(module)(*args, **kwargs)
        self._entries.look_anew(self._model)
        return result

    def call_compiled(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.leased(call, args, kwargs)


_OF_METHODS = {"__code__", "__defaults__", "__func__", "__globals__", "__kwdefaults__", "__self__"}


class _PlainCopies:
    """Stands for the ``__reduce_ex__`` of a module with entry points: its copies and pickles are plain modules."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = weakref.ref(module)
        self.entries = 0
        self.read: Callable[..., Any] = _called
        """Calls a function under what reading the weights needs."""

    @classmethod
    def count(cls, module: torch.nn.Module, change: int) -> _PlainCopies | None:
        """It is there as long as any entry point of the module is."""
        copies = module.__dict__.get("__reduce_ex__")
        if copies is None:
            copies = module.__dict__["__reduce_ex__"] = cls(module)
        if not isinstance(copies, cls):  # the user has one there
            return None
        copies.entries += change
        if copies.entries <= 0:
            del module.__dict__["__reduce_ex__"]
        return copies

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """For classes that copy their ``__dict__`` themselves: what the copy has there must be about the copy."""
        module = self._module()
        return types.MethodType(object.__reduce_ex__, memo.get(id(module), module))

    def __reduce__(self) -> Any:
        return getattr, (self._module(), "__reduce_ex__")

    def __call__(self, protocol: Any) -> Any:
        module: Any = self._module()
        parts = self.read(type(module).__reduce_ex__, (module, protocol), {})
        if not isinstance(parts, tuple) or len(parts) < 3 or not isinstance(parts[2], dict):
            return parts  # a class that reduces in its own way
        return (*parts[:2], dict(_without_entries(parts[2])), *parts[3:])


def _called(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


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
        if module is None:
            return
        _PlainCopies.count(module, -1)
        now = module.__dict__.get(self.name)
        if not isinstance(now, EntryPoint) or now is not self.entry():
            return  # replaced by the user
        if now.shadowed is None:
            del module.__dict__[self.name]
        else:
            module.__dict__[self.name] = now.shadowed


_lock = threading.RLock()  # re-entrant: the garbage collector may run anything anywhere


def _in_child() -> None:
    global _lock  # noqa: PLW0603  it may have been held by a thread that the forked child has not
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_in_child)


class EntryPoints:
    """All entry points of one model: on its roots always, on all its modules only while asked to watch them."""

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
        self._compiled_calls = CompiledCalls()
        self._thing = _weakly(thing)
        self._roots = [weakref.ref(root) for root in roots]
        self._always: list[_Shadow] = []
        self._while_out: list[_Shadow] = []
        # The same entry point comes back each time: a compiled call would be compiled anew for another one.
        self._known: weakref.WeakKeyDictionary[torch.nn.Module, dict[str, EntryPoint]] = weakref.WeakKeyDictionary()

    def install(self, model: ManagedModel) -> None:
        """Shadows what is called while everything is there. Again: what came since, or stands in our place now."""
        with _lock:
            if model.forgotten:
                return  # `remove` has been, or comes: what stood here after it would stand for ever
            self._compiled_calls.watch()
            roots = self._living()
            for module in [*roots, *branches_of(roots), *self._announced(roots)]:
                self._always += self._shadow(module, model)

    def watch_children(self, model: ManagedModel) -> None:
        """Shadows everything that could be called. Before weights leave, so it looks anew."""
        with _lock:
            if self._while_out or model.forgotten:
                return
            self.install(model)
            try:
                self._watch_all(model)
            except BaseException:
                self.unwatch_children()  # else the next one would believe that all are watched
                raise

    def _watch_all(self, model: ManagedModel) -> None:
        for module in self._modules(self._living()):
            self._while_out += self._shadow(module, model, out=True)

    def unwatch_children(self) -> None:
        with _lock:
            watched, self._while_out = self._while_out, []
            for shadow in watched:
                shadow.take_away()

    def remove(self) -> None:
        with _lock:
            self.unwatch_children()
            for shadow in self._always:
                shadow.take_away()
            self._always = []
            self._compiled_calls.withdraw()
            if self._execution is not None:
                self._execution.withdraw()

    def look_anew(self, model: ManagedModel) -> None:
        """After somebody compiled a module."""
        with _lock:
            if model.forgotten:
                return
            self.install(model)
            if self._while_out:
                self._watch_all(model)

    def _announced(self, roots: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """The modules whose ``device`` now names the execution device, the object's own too; none on the CPU."""
        if self._execution is None:
            return []
        modules = self._modules(roots)
        self._execution.announce([self._thing(), *modules])
        return [module for module in modules if execution_device_of(module) is not None]

    def _living(self) -> list[torch.nn.Module]:
        """The roots, each compiled one with the module that it was made of: people call the methods of that one."""
        roots = [root for ref in self._roots if (root := ref()) is not None]
        return [*roots, *(module for root in roots if (module := compiled_module(root)) is not None)]

    @staticmethod
    def _modules(roots: list[torch.nn.Module]) -> list[torch.nn.Module]:
        return list(dict.fromkeys(module for root in roots for module in root.modules()))

    def _shadow(self, module: torch.nn.Module, model: ManagedModel, *, out: bool = False) -> list[_Shadow]:
        done: list[_Shadow] = []
        names = [*doors_of(module, out=out)]
        if self._execution is not None and has_wrappers(module, self._execution.device):
            names.append(STATE_DICT)
        for name in names:
            own = module.__dict__.get(name)
            if isinstance(own, EntryPoint):
                continue  # watched by a model that shares the module
            entry = self._entry(module, name, own, model)
            if entry is not None:
                module.__dict__[name] = entry
                copies = _PlainCopies.count(module, 1)
                if name == STATE_DICT and copies is not None:
                    copies.read = entry.leased
                done.append(_Shadow(weakref.ref(module), name, weakref.ref(entry)))
        return done

    def _entry(self, module: torch.nn.Module, name: str, own: Any, model: ManagedModel) -> EntryPoint | None:
        if own is not None and not callable(own):
            return None
        known = self._known.setdefault(module, {}) if own is None else {}  # its own may refer to it: a cycle
        if name not in known:
            device = None if self._execution is None else self._execution.device
            make = functools.partial(_Compile, self) if name == COMPILE else EntryPoint
            known[name] = make(module, name, own, self._registry, model, device)
        return known[name]


def _weakly(thing: object) -> Callable[[], object]:
    try:
        return weakref.ref(thing)
    except TypeError:  # None, or a class with __slots__
        return lambda: None
