"""Calls of compiled modules, so that a lease can be taken around the compiled code.

torch's compiler traces through an entry point, and its guards look at the weights before any compiled code runs. So
the lease has to be there before: the first sight of an evicted weight would compile for the CPU, or fail because the
inputs are on the accelerator. ``torch.compile(model)`` gives an `OptimizedModule`, which anybody may make at any time,
before the model is managed or after. An instance cannot shadow its own ``__call__``. So the class's is replaced by one
that looks for a `CompiledCaller` in the plain module, and put back when nobody needs it any more.

The compiler takes seconds to import, and most notebooks never use it. So it is not imported here: a finder waits for
its import.

One lock guards who needs the replacement. Nothing is waited for under it, and no other lock is taken by our own code
under it. Counts no bytes. Refuses to know leases, room and weights.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from torch import nn

__all__ = ["CompiledCaller", "CompiledCalls", "compiled_module"]

_COMPILER = "torch._dynamo"


class CompiledCaller(ABC):
    """What a managed module has in place of ``compile``. It calls compiled forms of the module."""

    @abstractmethod
    def call_compiled(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``call`` gives; the first of its arguments is the compiled form."""


def compiled_module(module: nn.Module) -> nn.Module | None:
    """The module that a compiled one was made of; None for all others."""
    kind = _kind(sys.modules.get(_COMPILER))
    return cast("nn.Module", module._orig_mod) if kind is not None and isinstance(module, kind) else None  # noqa: SLF001


class CompiledCalls:
    """The need of one managed model for seeing the calls of compiled modules."""

    def __init__(self) -> None:
        self._counted = False

    def watch(self) -> None:
        """From now on. Once more: if somebody has put back what was there before us."""
        with _lock:
            _state.needed_by += not self._counted
            self._counted = True
            _put_on_or_wait()

    def withdraw(self) -> None:
        """No longer, as far as no other model needs it."""
        with _lock:
            _state.needed_by -= self._counted
            self._counted = False
            if not _state.needed_by:
                _stop_waiting()
                _put_back()


@dataclass(slots=True)
class _State:
    """What stands on the class, and how many models need it."""

    needed_by: int = 0
    ours: Callable[..., Any] | None = None
    original: Callable[..., Any] | None = None
    """What the class itself had there; None where it inherited its call."""


_lock = threading.RLock()  # re-entrant: the garbage collector may run anything anywhere
_state = _State()


def _in_child() -> None:
    global _lock  # noqa: PLW0603  it may have been held by a thread that the forked child has not
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_in_child)


def _kind(compiler: ModuleType | None) -> type[nn.Module] | None:
    """The class of compiled modules, once the compiler is there."""
    return getattr(compiler, "OptimizedModule", None)


def _put_on_or_wait() -> None:
    compiler = sys.modules.get(_COMPILER)
    if compiler is not None and not getattr(compiler.__spec__, "_initializing", False):
        _stop_waiting()
        _put_on(compiler)
    elif _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def _stop_waiting() -> None:
    if _finder in sys.meta_path:
        # A new list: an import in another thread may be going through the old one, and would miss a finder.
        sys.meta_path = [finder for finder in sys.meta_path if finder is not _finder]


def _put_on(compiler: ModuleType) -> None:
    kind: Any = _kind(compiler)
    now = None if kind is None else vars(kind).get("__call__")
    if kind is None or (_state.ours is not None and now is not _state.original):
        return  # it is there, or inside what somebody else has put over it
    _state.original = now
    # In a frame that the compiler has given up it would look into ours next, where it takes a compiled module for the
    # plain one. The original turns the compiler on again by itself.
    _state.ours = kind.__call__ = compiler.disable(_seeing(kind.__call__))


def _put_back() -> None:
    kind: Any = _kind(sys.modules.get(_COMPILER))
    ours, original = _state.ours, _state.original
    _state.ours = _state.original = None
    if kind is None or ours is None or vars(kind).get("__call__") is not ours:
        return  # somebody else's is there now; ours inside it only passes on
    if original is None:
        del kind.__call__
    else:
        kind.__call__ = original


def _seeing(call: Callable[..., Any]) -> Callable[..., Any]:
    """The call of a compiled module, by way of the plain module's `CompiledCaller` where it has one."""

    @functools.wraps(call, updated=())  # without the compiler's own marks
    def seeing(compiled: Any, *args: Any, **kwargs: Any) -> Any:
        caller = vars(compiled._orig_mod).get("compile")  # noqa: SLF001
        if isinstance(caller, CompiledCaller):
            return caller.call_compiled(call, (compiled, *args), kwargs)
        return call(compiled, *args, **kwargs)

    return seeing


class _Finder(MetaPathFinder):
    """Finds nothing of its own; it sees the import of the compiler."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == _COMPILER else None
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        loader.exec_module = functools.partial(_executed, loader.exec_module)
        return spec


def _executed(execute: Callable[[ModuleType], None], compiler: ModuleType) -> None:
    execute(compiler)
    with _lock:
        if _state.needed_by:
            _stop_waiting()
            _put_on(compiler)


_finder = _Finder()
