"""Thousands of interrupts, wherever they fall: every model stays whole, nothing is leaked, nothing hangs.

Without this, one Ctrl-C at the wrong moment costs the kernel: a lock that stays held, or room that nobody gives back.
"""

from __future__ import annotations

import contextlib
import random
import signal
import sys
import threading
import time

import pytest
import torch
from place import DEVICE
from torch import nn

from vram_magic.workers import Outcome, settled

MIB = 1 << 20
ROUNDS = 400


@pytest.mark.timeout(300)
def test_interrupts_at_random_moments_leave_all_whole(mgr):
    models = [nn.Sequential(*[nn.Linear(512, 512, bias=False, device=DEVICE) for _ in range(4)]) for _ in range(2)]
    x = torch.randn(1, 512, device=DEVICE)
    armed, done = [False], threading.Event()  # a list: an Event's own lock would not survive the interrupts

    def handler(*_: object) -> None:
        if armed[0]:
            armed[0] = False
            raise KeyboardInterrupt

    def shoot() -> None:
        rng, main = random.Random(0), threading.main_thread().ident
        while not done.is_set():
            time.sleep(rng.random() * 0.004)
            if armed[0]:
                signal.pthread_kill(main, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handler), sys.getswitchinterval()
    shooter = threading.Thread(target=shoot)
    turn = hits = 0
    try:
        sys.setswitchinterval(1e-5)
        with torch.no_grad():
            expected = [model(x) for model in models]
            for i, model in enumerate(models):
                mgr.register(f"m{i}", model)
            mgr.budget_bytes = mgr.used_bytes - 2 * MIB  # room for one and a half
            shooter.start()
            while turn < ROUNDS or hits <= ROUNDS // 10:
                try:
                    armed[0] = True
                    models[turn % 2](x)
                    armed[0] = False
                except KeyboardInterrupt:
                    hits += 1
                if turn % 20 == 0:
                    assert all(torch.equal(model(x), right) for model, right in zip(models, expected, strict=True))
                turn += 1
    finally:
        armed[0] = False
        done.set()
        shooter.join()
        signal.signal(signal.SIGUSR1, before[0])
        sys.setswitchinterval(before[1])
    assert not any(handle.in_use or handle._managed.moving for handle in mgr.models.values())
    meter = mgr._core.device.meter
    assert meter.committed_bytes == meter.live_bytes


def test_an_interrupted_wait_releases_what_was_reserved_while_its_traceback_is_still_shown():
    outcome, released = Outcome(), []

    class Room:
        def release(self) -> None:
            released.append(True)

    def interrupted() -> None:
        outcome.wait = wait
        raise KeyboardInterrupt

    wait, outcome.wait = outcome.wait, interrupted
    outcome.finish(Room())
    with pytest.raises(KeyboardInterrupt) as shown:
        settled(outcome)
    assert released == [True]
    assert shown.traceback is not None


class RangError(Exception):
    """What a signal handler of the user's raises."""


@pytest.fixture
def alarm():
    """Rings, once, and raises `RangError` in the main thread."""
    rung = []

    def ring(*_):
        raise RangError

    before = signal.signal(signal.SIGALRM, ring)

    def once():
        if not rung:
            rung.append(True)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)

    yield once
    signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def slow_decisions(mgr, ring):
    """It rings when the work of a decision is done, and not yet told."""
    decide = mgr._core.workers.decide

    def late(function, *args, **kwargs):
        def slowly():
            result = function(*args, **kwargs)
            ring()
            time.sleep(0.2)
            return result

        return decide(slowly)

    mgr._core.workers.decide = late
    try:
        yield
    finally:
        del mgr._core.workers.decide


def test_a_move_ends_before_what_a_signal_handler_raised_is_raised(mgr, alarm):
    model, x = nn.Linear(512, 512).to(DEVICE), torch.zeros(1, 512, device=DEVICE)
    right, handle = model(x).detach(), mgr.register("model", model)
    with slow_decisions(mgr, alarm), pytest.raises(RangError):
        handle.evict()
    assert handle.device_bytes == 0
    assert not handle._managed.moving
    assert torch.equal(model(x), right)


def test_an_allocation_succeeds_before_a_signal_handlers_exception_interrupts(mgr, alarm):
    model = nn.Linear(512, 512).to(DEVICE)
    handle = mgr.register("model", model)
    mgr.budget_bytes = mgr.used_bytes
    kept = []
    with slow_decisions(mgr, alarm), pytest.raises(KeyboardInterrupt):  # noqa: PT012  or it comes after it
        kept.append(torch.empty(2**18, dtype=torch.uint8, device=DEVICE))
        time.sleep(1)
    assert handle.device_bytes < handle.total_bytes
    assert mgr.used_bytes <= mgr.budget_bytes
