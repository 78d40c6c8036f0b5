"""What lives in the process: the objects of a class, and what refers to some objects, as Python's collector knows them.

Each look is one call into C, from the collector's lists to the few objects that are asked for:

* a reference to any other object, while other threads run, may break them: a ``tuple(...)`` that one is filling must
  have no second reference when it is full (CPython refuses to cut it to size: SystemError)
* a loop in Python over a million objects takes seconds while other threads want to run, too
* by type, since `isinstance` may run an object's own code; nothing is compared or hashed, and nothing is collected

Takes no lock. Refuses to know tensors.
"""

from __future__ import annotations

import gc
import operator
from collections.abc import Iterable, Iterator
from itertools import chain, compress, islice, repeat, starmap, tee
from typing import Any, TypeVar

__all__ = ["instances", "referrers", "uncollected"]

T = TypeVar("T")
Classes = type | tuple[type, ...]


def instances(kind: type[T]) -> list[T]:
    """Every object of the class that the collector knows. ``kind`` has the usual ``__subclasscheck__``, `type`'s own.

    Two passes: for the classes of such objects, and for what refers to those. A `tee` over all objects would do it in
    one, but is among them: it would refer to itself, and keep what it has seen until the next collection.
    """
    objects = chain.from_iterable(map(gc.get_objects, [None]))  # asked for when the list below is made
    found = list(uncollected(filter(kind.__subclasscheck__, map(type, objects))))
    classes = {id(one): one for one in found}.values()
    return _referrers(classes, kind, yes=True) if classes else []


def referrers(things: Iterable[object], *, but: Classes) -> list[Any]:
    """What refers to the things, without what is of one of the classes."""
    return _referrers(things, but, yes=False)


def _referrers(things: Iterable[object], classes: Classes, *, yes: bool) -> list[Any]:
    found = chain.from_iterable(starmap(gc.get_referrers, [tuple(things)]))
    return list(uncollected(_of_class(found, classes, yes=yes)))


def _of_class(things: Iterator[object], classes: Classes, *, yes: bool) -> Iterator[object]:
    """Nobody but the one call that takes them may hold the iterators: they keep the last things that they gave."""
    some, same = tee(things)
    are = map(issubclass, map(type, same), repeat(classes))
    return compress(some, are if yes else map(operator.not_, are))


def uncollected(things: Iterable[T]) -> Iterator[T]:
    """The things, with the collector off from before the first until after the last, for one call into C to take.

    In one call no other thread sees it off: what that one puts back afterwards would leave it off for ever.
    """
    was_on, on = tee(starmap(gc.isenabled, [()]))
    begin, end = starmap(gc.disable, [()]), starmap(gc.enable, compress([()], on))
    return chain(_done(was_on), _done(begin), things, _done(end))


def _done(calls: Iterator[Any]) -> Iterator[Any]:
    """Makes the one call, in its turn, and gives nothing."""
    return islice(calls, 1, None)
