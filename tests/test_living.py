"""Looks at what lives in the process disturb nobody: no object is kept, the collector stays as it was.

Without this a thread of the user's gets a SystemError out of ``tuple(...)``, memory that was let go of stays until the
next collection, or the collector stays off for ever.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import weakref
from collections.abc import Iterator

import place  # noqa: F401  where the tests run; before torch
import pytest
import torch

from vram_magic.residency import living, swap


class Thing:
    pass


class Liar:
    """Says that it is a thing, and counts how often it was asked."""

    asked = 0

    @property
    def __class__(self):
        type(self).asked += 1
        return Thing


class Special(Thing):
    pass


def test_instances_are_found_by_what_they_are_and_not_by_what_they_say():
    mine, liar = [Thing(), Special()], Liar()
    found = living.instances(Thing)
    assert {id(thing) for thing in mine} <= {id(thing) for thing in found}
    assert {type(thing) for thing in found} == {Thing, Special}
    assert not any(holder is liar for holder in living.referrers([Thing], but=type))
    assert not Liar.asked
    parameter = torch.nn.Parameter(torch.ones(1))
    assert any(tensor is parameter for tensor in tensors())


def tensors() -> list[torch.Tensor]:
    return living.instances(torch.Tensor)


def test_what_refers_to_a_thing_is_found_but_not_what_runs():
    thing = Thing()
    held, in_a_tuple = [thing], (thing,)
    running = (tuple, type(sys._getframe()))
    assert any(holder is held for holder in living.referrers([thing], but=running))
    assert not any(isinstance(holder, running) for holder in living.referrers([thing], but=running))
    assert any(holder is in_a_tuple for holder in living.referrers([thing], but=()))


@pytest.mark.parametrize("look", [lambda: living.instances(Thing), tensors], ids=["things", "tensors"])
def test_a_look_keeps_nothing(uncollected, look):
    things = [Thing() for _ in range(1000)]
    for thing in things:
        thing.tensor = torch.ones(1)
    look()
    gone = [weakref.ref(one) for thing in things for one in (thing, thing.tensor)]
    del things, thing
    assert not [ref for ref in gone if ref() is not None]


@pytest.fixture
def uncollected():
    gc.disable()
    yield
    gc.enable()


@contextlib.contextmanager
def threads_that_switch_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


LOOKS = [swap.frames_rest, lambda: living.instances(Thing), lambda: living.referrers([LOOKS], but=())]


@pytest.mark.parametrize("look", LOOKS, ids=["frames", "instances", "referrers"])
@pytest.mark.parametrize("on", [True, False])
def test_a_look_leaves_the_collector_as_it_was(uncollected, look, on):
    (gc.enable if on else gc.disable)()
    look()
    assert gc.isenabled() is on


@pytest.mark.parametrize("look", LOOKS, ids=["frames", "instances", "referrers"])
def test_no_other_thread_runs_in_the_middle_of_a_look(look):
    """Two threads that turn the collector off and on again, each in Python, may leave it off."""
    calls = []

    def note(_frame, event, function):
        if event == "c_call" and function.__module__ == "gc":
            calls.append(function.__name__)

    things = [Thing()]
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        look()
    finally:
        sys.setprofile(before)
    assert not calls
    assert len(things) == 1


def test_a_look_breaks_no_tuple_that_another_thread_is_filling():
    things = [Thing() for _ in range(80)]
    enough, broken = threading.Event(), []

    def fill():
        try:
            while not enough.is_set():
                tuple(thing for thing in things)
        except SystemError as error:
            broken.append(error)

    thread = threading.Thread(target=fill)
    thread.start()
    try:
        with threads_that_switch_often():
            for _ in range(25):
                living.referrers(things, but=tuple)
                living.instances(Thing)
    finally:
        enough.set()
        thread.join()
    assert not broken
