"""The execution device of a managed model: inputs are brought to it, and ``device`` names it.

On an accelerator an evicted weight is a tensor in host memory. Code that asks a weight where it is then makes its
inputs on the CPU, although the model computes on the accelerator. So two things are done for it here.

`Carrier` calls a method with its inputs on the execution device. Tensors are looked for among the arguments and in
lists, tuples and mappings, at any depth. What is there already passes untouched, the same objects. Else the container
is copied, since it is the caller's, and what the method then puts into the copy is put into the caller's as well. Two
things stay in the copy: what is written into a tensor, as with ``.to``, and what a generator or coroutine does later.
accelerate's ``send_to_device`` is not used: it also moves modules, and rebuilds every container without its attributes.

`ExecutionDevice` makes ``model.device`` name the execution device. An instance cannot shadow a property, and swapping
``__class__`` breaks libraries; so the property is replaced on the class that defines it by one that answers for managed
objects and asks the original for all others, and put back when nobody needs it any more.

One lock guards which properties are replaced and who needs them. Nothing is waited for under it, and no other lock is
taken by our own code under it. Refuses to know leases, room and weights.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import operator
import os
import threading
import weakref
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils.rnn import PackedSequence

if TYPE_CHECKING:
    from vram_magic.models.managed import ManagedModel

__all__ = ["Carrier", "ExecutionDevice", "execution_device_of"]


class Carrier:
    """Calls methods of a model with their inputs where its weights are."""

    __slots__ = ("_described", "_device", "_leading", "_model", "_parameters")

    def __init__(
        self, device: torch.device, model: ManagedModel, described: Callable[[], Callable[..., Any]], leading: int = 0
    ) -> None:
        """``described`` gives the method whose parameters name the arguments, but for so many ``leading`` ones."""
        self._device, self._model = device, model
        self._described, self._leading = described, leading
        self._parameters: tuple[list[str], str] | None = None  # looked up at need: it takes long

    def __call__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        device = self._device
        if not (_any_elsewhere(args, device, {}) or (kwargs and _any_elsewhere(kwargs.values(), device, {}))):
            return function(*args, **kwargs)
        if self._model.forgotten or not self._model.complete:
            return function(*args, **kwargs)  # it computes where it is, as in a forked child
        return self._call_with_inputs(function, args, kwargs)

    def _call_with_inputs(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names, rest = self._parameters = self._parameters or _positional_parameters(self._described())
        trip, all_names = _Trip(self._device), chain(repeat("", self._leading), names, repeat(rest))
        moved_args = [trip.bring(value, name) for value, name in zip(args, all_names, strict=False)]
        moved_kwargs = {name: trip.bring(value, name) for name, value in kwargs.items()}
        try:
            return function(*moved_args, **moved_kwargs)
        finally:
            trip.hand_back()


def _any_elsewhere(values: Iterable[Any], device: torch.device, seen: dict[int, Any]) -> bool:
    """Whether a tensor among the values would have to move. At every call: most often it looks at one or two."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.device != device and _can_come(value, device):
                return True
        elif (contents := _contents(type(value))) and id(value) not in seen:
            seen[id(value)] = value  # it may contain itself
            if _any_elsewhere(contents(value), device, seen):
                return True
    return False


def _can_come(tensor: torch.Tensor, device: torch.device) -> bool:
    """A number (0-dim) is taken from anywhere; what is on another kind of accelerator, or nowhere, is so on purpose."""
    kind = tensor.device.type
    return tensor.dim() > 0 if kind == "cpu" else kind == device.type


_looks: weakref.WeakKeyDictionary[type, Callable[[Any], Iterable[Any]] | None] = weakref.WeakKeyDictionary()
"""By class, weakly: a class that was replaced would keep all the globals of its module."""


def _contents(kind: type) -> Callable[[Any], Iterable[Any]] | None:
    """How to look into a container of this class; None for everything that is none."""
    try:
        return _looks[kind]
    except KeyError:
        look = _looks[kind] = _look_into(kind)
        return look


def _look_into(kind: type) -> Callable[[Any], Iterable[Any]] | None:
    if issubclass(kind, torch.nn.Module):
        return None
    if issubclass(kind, PackedSequence):
        return lambda packed: (packed.data,)  # its batch sizes belong on the CPU
    if issubclass(kind, list | tuple):
        return _items
    if issubclass(kind, Mapping):
        return lambda mapping: tuple(mapping.values())  # at once: another thread may be writing into it
    return None


def _items(sequence: list[Any] | tuple[Any, ...]) -> tuple[Any, ...]:
    """Its items; none if they are plain values throughout, which a long list of tokens tells fast."""
    return () if _PLAIN.issuperset(map(type, sequence)) else tuple(sequence)


_PLAIN = frozenset({str, int, float, bool, type(None)})


def _stays(value: Any, name: str) -> bool:
    """Lengths belong on the CPU (`pack_padded_sequence` wants them there); a state dict is copied into weights."""
    if "state_dict" in name:
        return True
    return "len" in name and isinstance(value, torch.Tensor) and value.dtype in _INTEGERS


_INTEGERS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}


def _positional_parameters(function: Callable[..., Any]) -> tuple[list[str], str]:
    """The names of the parameters that arguments are bound to in turn, and that of all further ones; "" if unknown."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return [], ""
    names = [p.name for p in parameters if p.kind in {p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD}]
    return names, next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "")


@dataclass(frozen=True, slots=True)
class _Copy:
    """A container that was copied, and what was in the copy before the method ran."""

    original: Any
    copied: Any
    before: Any


@dataclass(slots=True)
class _Trip:
    """What was brought along for one call. Each object once, so what is passed twice is still one object."""

    device: torch.device
    done: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    """(what was passed, what goes in its place) by the id of the first, which lives as long as this."""
    copies: list[_Copy] = field(default_factory=list)

    def bring(self, value: Any, name: str) -> Any:
        """The value with its tensors on the device; the very same object when they are there already."""
        if _stays(value, name):
            return value
        if id(value) not in self.done:
            self.done[id(value)] = value, value  # a container that contains itself ends here
            self.done[id(value)] = value, self._brought(value, name)
        return self.done[id(value)][1]

    def _brought(self, value: Any, name: str) -> Any:
        if isinstance(value, torch.Tensor):
            elsewhere = value.device != self.device and _can_come(value, self.device)
            return value.to(self.device) if elsewhere else value
        if _contents(type(value)) is None:
            return value
        if isinstance(value, PackedSequence):
            return value.to(self.device)  # type: ignore[arg-type]
        return self._mapping(value, name) if isinstance(value, Mapping) else self._sequence(value, name)

    def _sequence(self, value: Any, name: str) -> Any:
        items = tuple(value)
        brought = [self.bring(item, name) for item in items]
        if all(map(operator.is_, items, brought)):
            return value
        if isinstance(value, tuple):
            return _other_tuple(value, brought)
        return self._noted(value, _changed_copy(value, [(slice(None), brought)]), brought)

    def _mapping(self, value: Mapping[Any, Any], name: str) -> Any:
        items = dict(value.items())
        brought = {key: self.bring(item, key if isinstance(key, str) else name) for key, item in items.items()}
        changed = [(key, item) for key, item in brought.items() if item is not items[key]]
        if not changed:
            return value
        if isinstance(value, dict | UserDict):
            return self._noted(value, _changed_copy(value, changed), brought)
        return self._noted(value, _other_mapping(value, brought), brought)

    def _noted(self, value: Any, copied: Any, brought: Any) -> Any:
        if copied is not value and isinstance(value, list | MutableMapping):
            self.copies.append(_Copy(value, copied, brought))
        return copied

    def hand_back(self) -> None:
        """Puts what the method changed in copied containers into the caller's own."""
        originals = {id(there): given for given, there in self.done.values()}
        for item in self.copies:
            hand_back = _hand_back_list if isinstance(item.original, list) else _hand_back_mapping
            hand_back(item, originals)


_NO_COPY = (TypeError, ValueError, AttributeError, NotImplementedError, copy.Error)
"""What a class that cannot be copied or rebuilt raises. Its object then goes as it is, as without us."""


def _changed_copy(value: Any, changes: Iterable[tuple[Any, Any]]) -> Any:
    """A shallow copy, with its class and attributes, and the changes made."""
    with contextlib.suppress(*_NO_COPY):
        copied = copy.copy(value)
        for key, item in changes:
            copied[key] = item
        return copied
    return value


def _other_tuple(value: Any, contents: list[Any]) -> Any:
    """A tuple of the same class and attributes: a plain one, a named one, or what torch's functions return."""
    with contextlib.suppress(*_NO_COPY):
        other = value._make(contents) if hasattr(value, "_make") else type(value)(contents)
        if hasattr(other, "__dict__"):
            vars(other).update(vars(value))
        return other
    return value


def _other_mapping(value: Any, contents: dict[Any, Any]) -> Any:
    """A mapping of the same class. A shallow copy may share what a class of the user's keeps its items in."""
    with contextlib.suppress(*_NO_COPY):
        return type(value)(contents)
    return value


def _hand_back_list(item: _Copy, originals: dict[int, Any]) -> None:
    now = list(item.copied)
    if len(now) != len(item.before) or not all(map(operator.is_, now, item.before)):
        item.original[:] = [originals.get(id(value), value) for value in now]


def _hand_back_mapping(item: _Copy, originals: dict[int, Any]) -> None:
    now, missing = dict(item.copied.items()), object()
    for key, value in now.items():
        if value is not item.before.get(key, missing):
            item.original[key] = originals.get(id(value), value)
    for key in item.before.keys() - now.keys():
        del item.original[key]


# ------------------------------------------------------------------------------------------------ `device`


@dataclass(slots=True)
class _Answer:
    """A replaced property, and how many models need it."""

    ours: property
    original: property
    needed_by: int = 1


_lock = threading.RLock()  # re-entrant: the garbage collector may run anything anywhere
_answers: dict[type, _Answer] = {}
_placed: dict[int, tuple[weakref.ref[object], tuple[torch.device, ...]]] = {}
"""(object, execution device of each managed model that it is part of) by id: a user's class may define equality, and
the look-up must be fast. An entry is replaced whole, for readers take no lock."""


def _in_child() -> None:
    """A forked child cannot use the accelerator: its models compute where they are."""
    global _lock  # noqa: PLW0603  it may have been held by a thread that the child has not
    _lock = threading.RLock()
    _placed.clear()


os.register_at_fork(after_in_child=_in_child)


def execution_device_of(thing: object) -> torch.device | None:
    """Where the object's managed model computes; None for an object of none."""
    ref, devices = _placed.get(id(thing), _NOWHERE)
    return devices[-1] if ref() is thing else None


_NOWHERE: tuple[Callable[[], object], tuple[torch.device, ...]] = (lambda: None, ())


class ExecutionDevice:
    """The word of one managed model's objects for where they compute."""

    def __init__(self, device: torch.device) -> None:
        self.device = device if device.index is not None else torch.empty(0, device=device).device
        self._announced: dict[int, weakref.ref[object]] = {}
        self._owners: set[type] = set()

    def announce(self, things: Iterable[object]) -> None:
        """Makes ``device`` of these objects name it, where their classes have such a property."""
        with _lock:
            for thing in things:
                owner = _owner_of_device(type(thing))
                if owner is None or self._has(thing):
                    continue
                if owner not in self._owners:
                    if not _replace(owner):
                        continue
                    self._owners.add(owner)
                self._place(thing)

    def withdraw(self) -> None:
        """Takes it all back, as far as no other model needs it."""
        with _lock:
            announced, self._announced = self._announced, {}
            for key, ref in announced.items():
                _displace(key, ref, self.device)
            owners, self._owners = self._owners, set()
            for owner in owners:
                _put_back(owner)

    def _has(self, thing: object) -> bool:
        ref = self._announced.get(id(thing))
        return ref is not None and ref() is thing

    def _place(self, thing: object) -> None:
        ref, devices = _placed.get(id(thing), (None, ()))
        if ref is None or ref() is not thing:
            try:
                ref, devices = weakref.ref(thing, functools.partial(_gone, id(thing))), ()
            except TypeError:
                return  # a class with __slots__ takes no weak reference
        self._announced[id(thing)] = ref
        _placed[id(thing)] = ref, (*devices, self.device)


def _displace(key: int, ref: weakref.ref[object], device: torch.device) -> None:
    known, devices = _placed.get(key, (None, ()))
    if known is not ref:
        return  # it died
    left = list(devices)
    left.remove(device)
    if left:
        _placed[key] = ref, tuple(left)
    else:
        del _placed[key]


def _gone(key: int, ref: weakref.ref[object]) -> None:
    if _placed.get(key, _NOWHERE)[0] is ref:
        _placed.pop(key, None)


def _owner_of_device(kind: type) -> type | None:
    """The class whose property ``device`` is; None where it is something else, or missing."""
    owner = next((base for base in kind.__mro__ if "device" in vars(base)), None)
    found = None if owner is None else vars(owner)["device"]
    # A subclass of property may answer in its own way (for the class itself, say): that one is left alone.
    return owner if type(found) is property and callable(found.fget) else None


def _replace(owner: type) -> bool:
    """Counts one who needs it; False when the class cannot be changed."""
    answer, now = _answers.get(owner), vars(owner)["device"]
    if answer is not None and now is answer.ours:
        answer.needed_by += 1
        return True
    ours = _answering(now)
    try:
        setattr(owner, "device", ours)  # noqa: B010  for a class of any kind
    except (TypeError, AttributeError):
        return False
    # Somebody may have put theirs over ours: then it is theirs that comes back in the end.
    _answers[owner] = _Answer(ours, now, answer.needed_by + 1 if answer else 1)
    return True


def _put_back(owner: type) -> None:
    answer = _answers[owner]
    answer.needed_by -= 1
    if answer.needed_by:
        return
    del _answers[owner]
    if vars(owner).get("device") is answer.ours:  # else somebody else's is there now
        setattr(owner, "device", answer.original)  # noqa: B010


def _answering(original: property) -> property:
    """A property that answers for managed objects, and asks the original for all others."""
    asked: Callable[[Any], Any] = original.fget  # type: ignore[assignment]

    @functools.wraps(asked)
    def device(thing: Any) -> Any:
        # While code is traced the original is what it may look into, and the weights are where they are used.
        place = None if torch.compiler.is_compiling() else execution_device_of(thing)
        return asked(thing) if place is None else place

    return property(device, original.fset, original.fdel, original.__doc__)
