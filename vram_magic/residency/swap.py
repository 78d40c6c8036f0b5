"""Replacing the memory behind a span's tensors while nobody is using it.

An operation that runs in another thread, or that this allocation interrupted, reads its weights through raw pointers:
replacing them then gives wrong values or kills the process. What tells (measured with convolutions, LSTMs, matmuls in
a second thread and live autograd graphs):

* the storage's use count: a tensor that we do not know lies over it (a view, ``numpy()``, an alias)
* each tensor's use count: an operation or an autograd graph holds it
* each Python object's reference count: a frame holds it; ``w.sum(0)`` shows nowhere else

The counts must equal those that the model itself explains. Reference counts above it may still be explained by lists
and dicts on the heap (an optimizer, a notebook variable): those do not run. Only a frame, or C code, is left then.

The look and the replacement must be one step, or another thread starts an operation in between. `replace` does both
inside a single call into C iterators: the interpreter hands the GIL over between bytecodes, and there are none inside.
"""

from __future__ import annotations

import gc
import operator
import sys
import types
from itertools import chain, compress, repeat
from typing import Any

import torch

from vram_magic.residency.spans import Span

__all__ = ["busy", "replace"]

_refcounts = sys.getrefcount
_use_count = torch.Tensor._use_count
_storage_use_count = torch._C._storage_Use_Count
_version = operator.attrgetter("_version")
_OVERHEAD = next(map(_refcounts, [object()]))  # the list that holds it and the call itself

# What holds a reference without running: a tuple or a frame may be the arguments of a call in progress.
_RESTING = (dict, list, set, types.CellType)


def busy(span: Span, *, holders: int = 0) -> str:
    """Why the span's memory cannot be replaced now, or an empty string. A look only: it may be out of date at once.

    ``holders`` is the number of tensors of our own over the same memory.
    """
    tensors = span.tensors
    if span.alone and _storage_use_count(span.memory._cdata) != _owners(span, holders):
        return "another tensor shares its memory"
    if any(count != 1 for count in map(_use_count, tensors)):
        return "an operation or an autograd graph uses it"
    if list(map(_refcounts, tensors)) != _expected_references(span):
        return "Python code is using it"
    return ""


def replace(span: Span, fresh: list[torch.Tensor], *, holders: int = 0, ignore_python: bool = False) -> bool:
    """Gives each of the span's tensors the data of its counterpart in ``fresh``, all or none; False: it is in use.

    The span still holds the old memory, so nothing is freed here. ``ignore_python`` leaves reference counts out: right
    when the old memory stays valid for late readers.
    """
    tensors = span.tensors
    looks = [
        map(operator.eq, map(_use_count, tensors), repeat(1)),
        map(operator.eq, map(_version, tensors), list(map(_version, tensors))),
    ]
    if span.alone:
        looks.append(map(operator.eq, map(_storage_use_count, [span.memory._cdata]), [_owners(span, holders)]))
    if not ignore_python:
        looks.append(map(operator.eq, map(_refcounts, tensors), _expected_references(span)))
    idle = map(all, [chain.from_iterable(looks)])
    # One call into C: from the first look to the last replacement no other thread runs.
    done = list(map(setattr, chain.from_iterable(compress([tensors], idle)), repeat("data"), fresh))
    return bool(done)


def _owners(span: Span, holders: int) -> int:
    """The storage's use count while idle: its tensors, the span's own hold, and ours."""
    return len(span.tensors) + 1 + holders


def _expected_references(span: Span) -> list[int]:
    """The reference counts that are harmless; differs from the real ones where a frame or C code holds a tensor."""
    by_slots = [_OVERHEAD + slots for slots in span.slots]
    actual = list(map(_refcounts, span.tensors))
    if actual == by_slots:
        return by_slots
    return [_OVERHEAD + max(slots, rest) for slots, rest in zip(span.slots, _resting_references(span), strict=True)]


def _resting_references(span: Span) -> list[int]:
    """References to each tensor from containers that rest on the heap, found by one pass of the garbage collector's
    lists (tens of milliseconds; it collects nothing and runs no finaliser).
    """
    counts = dict.fromkeys(map(id, span.tensors), 0)
    ours: set[int] = {id(span.tensors)}
    for holder in gc.get_referrers(*span.tensors):
        if isinstance(holder, _RESTING) and id(holder) not in ours:
            _count_inside(holder, counts)
    return list(counts.values())


def _count_inside(holder: Any, counts: dict[int, int]) -> None:
    for inside in map(id, gc.get_referents(holder)):
        if inside in counts:
            counts[inside] += 1
