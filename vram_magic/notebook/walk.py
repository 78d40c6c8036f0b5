"""What an object leads to: the tensors behind it, and the memory behind those. Runs nobody's code.

The walk asks Python's collector what an object refers to, never the object: no attribute is read, nothing is compared,
hashed or counted, so objects that lie, raise or build things when looked at are as good as any. It is bounded, and does
not enter classes, modules, a function's module, or the notebook's own machinery, through which everything leads to
everything. Sizes are bytes, as the device's allocator counts them. Takes no lock.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import torch

from vram_magic.residency.leaves import has_own_memory

if TYPE_CHECKING:
    from vram_magic.devices.base import Device

__all__ = ["Gauge", "Piece", "Walk", "gradient_of", "is_a"]

_OBJECTS_OF_ROOT, _OBJECTS = 100_000, 1_000_000
_MACHINERY = {"vram_magic", "IPython", "ipykernel", "traitlets", "jupyter_client", "comm", "zmq", "tornado", "logging"}
_LEAVES = {id(kind) for kind in (type(None), bool, int, float, complex, str, bytes, bytearray, range, CodeType)}
_CONTAINERS: tuple[Any, ...] = (list, tuple, dict, set, frozenset)

# Read past whatever a metaclass or a subclass puts in front.
_mro_of: Any = vars(type)["__mro__"].__get__
_module_of: Any = vars(type)["__module__"].__get__
_tensor_parts: Any = torch._C.TensorBase
_gradient_of, _is_leaf, _retains_grad = (
    getattr(_tensor_parts, name).__get__ for name in ("grad", "is_leaf", "retains_grad")
)


def is_a(thing: object, kind: type) -> bool:
    """`isinstance`, but by what the object is and not by what it says."""
    return any(base is kind for base in _mro_of(type(thing)))


def gradient_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The gradient that lies with the tensor, if there is one."""
    with torch._C.DisableTorchFunctionSubclass():
        if has_own_memory(tensor) and (_is_leaf(tensor) or _retains_grad(tensor)):
            gradient: torch.Tensor | None = _gradient_of(tensor)
            return gradient
    return None


@dataclass(frozen=True, slots=True)
class Piece:
    """One storage, and what the tensor looked like through which it was seen."""

    key: int
    """Tells storages apart while they live."""
    size_bytes: int
    tensor: str
    in_cpp: bool
    """Whether C++ holds the tensor too, as the graph of a result does; its Python object is then kept for later."""


class Gauge:
    """Tells which memory of one device lies behind a tensor."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def piece_of(self, tensor: torch.Tensor) -> Piece | None:
        """The storage, if the device's allocator owns and counts it; not every tensor has one."""
        if not has_own_memory(tensor):
            return None
        try:
            with torch._C.DisableTorchFunctionSubclass():
                storage = torch.Tensor.untyped_storage(tensor)
                if not storage.nbytes() or not self._device.owns(storage) or not self._device.meter.counts(storage):
                    return None
                # By the base class: a subclass may have methods of these names.
                shape = "x".join(map(str, torch.Tensor.size(tensor))) or "a number"
                dtype = str(torch.Tensor.dtype.__get__(tensor)).removeprefix("torch.")  # type: ignore[attr-defined]
                in_cpp = torch.Tensor._use_count(tensor) > 1  # type: ignore[attr-defined]
        except (RuntimeError, NotImplementedError):  # sparse, nested, and whatever else has no storage
            return None
        return Piece(storage._cdata, self._device.footprint(storage.nbytes()), f"{dtype} {shape}", in_cpp)


class Walk:
    """Walks from objects; ``stops`` are those that it does not enter."""

    def __init__(self, stops: Iterable[object]) -> None:
        self._stops = {id(thing) for thing in stops}
        self._left = _OBJECTS
        self.cut_short = False
        """Whether some object led to more than was looked at."""

    def tensors_from(self, root: object) -> Iterator[torch.Tensor]:
        """The tensors that the object leads to, itself too."""
        seen, found, left = set(self._stops), deque([root]), min(_OBJECTS_OF_ROOT, self._left)
        while found:
            thing = found.popleft()
            if id(thing) in seen:
                continue
            seen.add(id(thing))
            if not left:
                self.cut_short = True
                break
            left -= 1
            self._left -= 1
            if is_a(thing, torch.Tensor):
                yield thing  # type: ignore[misc]  # is_a has told
            found.extend(self._referents(thing))

    def _referents(self, thing: object) -> Iterable[object]:
        if id(type(thing)) in _LEAVES or is_a(thing, type) or is_a(thing, ModuleType):
            return ()
        if type(thing) is FunctionType:
            return (thing.__defaults__, thing.__kwdefaults__, thing.__closure__, thing.__dict__)
        for kind in _CONTAINERS:
            if is_a(thing, kind) and kind.__len__(thing) > _OBJECTS_OF_ROOT:
                self.cut_short = True
                return ()
        module = _module_of(type(thing))
        if type(module) is str and module.partition(".")[0] in _MACHINERY:
            return ()
        return gc.get_referents(thing)
