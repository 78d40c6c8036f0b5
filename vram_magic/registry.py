"""The register of managed models, and the one lock.

The lock guards: which models there are, their leases, their ``moving`` marks, pins, tiers and the clock. Under it
nothing is waited for, nobody's code runs and nothing is moved; whoever wants to move a model sets ``moving`` under the
lock, lets it go, moves, and clears the mark under it again. It is re-entrant, since a finaliser of a generator may end
a lease in whatever thread, and leases are entries of a set, which such an interruption cannot miscount.

Lock order: this lock, then a meter's leaf lock. Never the other way round, and no other lock under it.

A thread that finds no room may wait for leases and moves of others, but only while somebody among them does not wait
in turn for it: two models, each the other's victim, do not hang; one of the calls fails with a clear error.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from vram_magic.errors import UnknownModelError, VRAMError, closed_manager, closest
from vram_magic.models.managed import ManagedModel, TorchModel
from vram_magic.oom import VRAMOutOfMemoryError
from vram_magic.policy import DEFAULT_TIERS
from vram_magic.residency.swap import all_rest
from vram_magic.workers import Workers

__all__ = ["Lease", "Registry"]

_PATIENCE_S = 10.0  # how long a call waits for a lease of a thread that does nothing itself
_MOST_IN_VAIN = 3  # tries of a load between which others only gave up their marks
_POLL_S = 0.2  # how often a waiting job looks whether its caller has gone


class Lease:
    """One use of a model in progress."""

    __slots__ = ("model", "suspended", "thread")

    def __init__(self, model: ManagedModel, *, suspended: bool = False) -> None:
        self.model = model
        self.thread = threading.get_ident()
        self.suspended = suspended
        """Held by a generator: it may never end by itself, so nobody waits for it."""


_registries: weakref.WeakSet[Registry] = weakref.WeakSet()


def _in_child() -> None:
    """A forked child has none of our threads, and may have copied a lock that nobody will open."""
    for registry in list(_registries):
        registry.become_child()


os.register_at_fork(after_in_child=_in_child)


class Registry:
    """Models by name, their leases, and waiting for one another."""

    def __init__(self, workers: Workers, bring: Callable[[ManagedModel], None]) -> None:
        self.lock = threading.RLock()
        self.models: dict[str, ManagedModel] = {}
        self.tiers: dict[str, int] = dict(DEFAULT_TIERS)
        self.closed = False
        self.gone: deque[str] = deque()
        """Names whose objects died; finalisers append, `Reclaimer` clears up."""
        self._changed = threading.Condition(self.lock)
        self.changes = 0
        """Counts what may give room: a lease that ended, a move that ended or was given up. A decision that failed is
        worth a second try when it has grown since before the first."""
        self.given_up = 0
        """How many of them are marks of loads that found no room."""
        self._clock = itertools.count(1)
        self._waiting: dict[int, Callable[[], Iterable[int]]] = {}
        """By waiting thread: a look at the threads that it waits for."""
        self._thread = threading.local()
        self._workers = workers
        self._bring = bring
        self._pid = os.getpid()
        _registries.add(self)

    def become_child(self) -> None:
        """Models compute where they are from now on, and nothing is moved any more."""
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self._waiting.clear()
        self._workers.become_child()
        for model in self.models.values():
            model.moving = ""

    # ------------------------------------------------------------------------------------------------- models

    def get(self, name: str) -> ManagedModel:
        """The model of that name. Raises `UnknownModelError`."""
        with self.lock:
            model = self.models.get(name)
            names = sorted(self.models)
        if model is None:
            meant = closest(str(name), names)
            raise UnknownModelError(
                f"No model is called {name!r}.\nManaged are: {', '.join(names) or 'none'}.\n"
                "It was never loaded, or was forgotten, or its last reference went.\n"
                f"{f'Did you mean {meant!r}? Else load' if meant else 'Load'} it with: %load_model {name} SOURCE"
            )
        return model

    def rank_of(self, tier: str | int | None, priority: int | None = None) -> tuple[str | None, int]:
        """(tier name, rank) of a tier or a bare priority. Raises ValueError."""
        if priority is not None:
            if isinstance(priority, bool) or not isinstance(priority, int):
                raise ValueError(f"a priority is an integer, not {priority!r}; for example 1")
            return None, priority
        if isinstance(tier, int) and not isinstance(tier, bool):
            return None, tier
        if tier not in self.tiers:
            known = ", ".join(sorted(self.tiers, key=self.tiers.__getitem__))
            raise ValueError(f"no tier is called {tier!r}; there are {known}; add one with mgr.tiers[{tier!r}] = RANK")
        return tier, self.tiers[tier]

    def add(self, model: TorchModel) -> bool:
        """Lists a new model, as the most recently used. False: its name or its object is taken.

        Raises `VRAMError` after `close`.
        """
        with self.lock:
            if self.closed:
                raise closed_manager()
            things = [known.thing for known in self.models.values() if isinstance(known, TorchModel)]
            if model.name in self.models or any(thing is model.thing for thing in things):
                return False
            self.models[model.name] = model
            self.touch(model)
        return True

    def close(self) -> bool:
        """Takes no more models; False when that is so already."""
        with self.lock:
            was_open, self.closed = not self.closed, True
        return was_open

    def remove(self, model: ManagedModel) -> None:
        """Takes a model off the list; calls of it compute where it is from now on."""
        with self.lock:
            model.forgotten = True
            if self.models.get(model.name) is model:
                del self.models[model.name]
            self.notify()

    def remove_unloaded(self, model: ManagedModel) -> None:
        """After a failed load: an engine is absent, unless somebody else loads it meanwhile or has."""
        with self.lock:
            if not model.complete and not model.moving:
                self.remove(model)

    def rename(self, model: ManagedModel, name: str) -> bool:
        """Lists a model under another name; False where that is taken."""
        with self.lock:
            if name in self.models:
                return False
            self.models.pop(model.name, None)
            model.name = name
            self.models[name] = model
        return True

    def touch(self, model: ManagedModel) -> None:
        """Counts a use, now."""
        model.last_used = next(self._clock)

    # ------------------------------------------------------------------------------------------------- leases

    def inside(self, model: ManagedModel) -> bool:
        """Whether this thread's innermost managed call is one of the model already."""
        return self.current is model

    @property
    def current(self) -> ManagedModel | None:
        """The model whose call this thread is in."""
        stack: list[Lease] | None = getattr(self._thread, "stack", None)
        while stack:
            model = stack[-1].model
            if stack[-1] in model.leases:
                return model
            stack.pop()  # ended by another thread
        return None

    @property
    def held_by_me(self) -> bool:
        """Whether this thread holds the lock (a finaliser that allocates, under it)."""
        return bool(self.lock._is_owned())  # type: ignore[attr-defined]  # noqa: SLF001

    def begin(self, model: ManagedModel, *, suspended: bool = False, bring: bool = True) -> Lease:
        """A lease on the model, with everything it needs on the device. Raises `VRAMOutOfMemoryError` and others.

        ``suspended``: held by a generator. Without ``bring`` the weights stay where they are, and are not moved.
        """
        lease = Lease(model, suspended=suspended)
        try:
            with self.lock:
                ready = model.surely_complete and not model.moving
                if ready:
                    self._grant(lease)
            if not ready:
                self._make_ready(lease, bring=bring)
            if not suspended:
                stack = getattr(self._thread, "stack", None)
                if stack is None:
                    stack = self._thread.stack = []
                stack.append(lease)
        except BaseException:  # an interrupt may come after the grant
            with self.lock:
                model.leases.discard(lease)
                self.notify()
            raise
        return lease

    async def begin_async(self, model: ManagedModel) -> Lease:
        """`begin` for a coroutine: waits without blocking the event loop."""
        with self.lock:
            if model.surely_complete and not model.moving:
                return self._grant(Lease(model, suspended=True))
        return await self._workers.call(lambda: self.begin(model, suspended=True), self.end)

    def end(self, lease: Lease) -> None:
        """Ends a lease; once is enough, from any thread."""
        with self.lock:
            lease.model.leases.discard(lease)
            self.touch(lease.model)
            self.notify()
        if not lease.suspended:
            stack = getattr(self._thread, "stack", None)
            if stack and lease in stack:
                stack.remove(lease)  # most often the last

    def _grant(self, lease: Lease) -> Lease:
        lease.model.leases.add(lease)
        self.touch(lease.model)
        return lease

    def _make_ready(self, lease: Lease, *, bring: bool) -> None:
        """Brings in what is missing; whoever moves the model meanwhile is waited for."""
        model = lease.model
        if os.getpid() != self._pid or model.forgotten:
            self._grant(lease)  # a forked child, or a model that is not ours any more: it computes where it is
            return
        with self.moving(model, "loading"):
            if bring and not model.surely_complete:
                self._bring_or_wait(model)
            # Granted before the mark is cleared: nobody can take away what has just been brought.
            with self.lock:
                self._grant(lease)

    def ensure(self, model: ManagedModel) -> bool:
        """Everything of the model is on the device on return; no lease is taken. False: it was forgotten meanwhile."""
        with self.moving(model, "loading"):
            if not model.surely_complete:
                self._bring_or_wait(model)
            with self.lock:
                self.touch(model)
            return not model.forgotten

    def _bring_or_wait(self, model: ManagedModel) -> None:
        vain, before = 0, -1
        for attempt in itertools.count():
            if model.forgotten:
                return
            if attempt > 1:  # calls that all lack the same room wake each other: not as fast as they can
                time.sleep(min(0.001 * 2 ** min(attempt, 8), _POLL_S))
            gains = self._seen(marks=False)
            vain, before = (vain + 1 if gains == before else 0), gains
            # Two that cannot fit, and only give up their marks in turn, would wake each other for ever.
            marks = vain < _MOST_IN_VAIN
            seen = self._seen(marks=marks)
            try:
                self._bring(model)
            except VRAMOutOfMemoryError as error:
                can_fit = error.needed_bytes <= error.budget_bytes
                if not can_fit or not self._wait_for_others(model, seen, marks=marks):
                    raise
            else:
                return

    def _seen(self, *, marks: bool) -> int:
        """The changes until now, with or without the marks that were only given up."""
        with self.lock:
            return self.changes if marks else self.changes - self.given_up

    # ------------------------------------------------------------------------------------------------- moving

    @contextmanager
    def moving(self, model: ManagedModel, how: str) -> Iterator[None]:
        """Marks the model for a move, after whatever moves it now."""
        try:
            with self.lock:
                self._mark(model, how)
            yield
        finally:
            self.done_moving(model)

    def _mark(self, model: ManagedModel, how: str) -> None:
        def moved() -> bool:
            if model.moving:
                self._workers.check_not_awaited_by(model.mover)
            return bool(model.moving)

        self._wait_while(moved, lambda: [model.mover])
        model.moving, model.mover = how, threading.get_ident()

    def claim(self, model: ManagedModel) -> None:
        """Called with the lock held, for a model that nobody moves: marks it as leaving."""
        model.moving, model.mover = "leaving", threading.get_ident()

    def done_moving(self, model: ManagedModel, *, changed: bool = True) -> None:
        """Clears this thread's mark; ``changed``: whether anything moved."""
        with self.lock:
            if model.moving and model.mover == threading.get_ident():
                self._clear_mark(model)
                self.changes += changed

    def _clear_mark(self, model: ManagedModel) -> None:
        model.moving, model.mover = "", 0
        self._changed.notify_all()

    def notify(self) -> None:
        """Called with the lock held, after anything that a waiting thread may hope for."""
        self.changes += 1
        if self._waiting:
            self._changed.notify_all()

    # ------------------------------------------------------------------------------------------------- waiting

    def wait_for_moves(self, changes: int, mine: ManagedModel | None = None) -> bool:
        """Waits until something has changed since `changes` was read. False when no move of another model will."""

        def movers() -> list[int]:
            return [model.mover for model in self.models.values() if model.moving and model is not mine]

        with self.lock:
            waited = self._hope(movers)
            self._wait_while(lambda: self.changes == changes and self._hope(movers), movers)
            return waited or self.changes != changes

    def _wait_for_others(self, model: ManagedModel, seen: int, *, marks: bool = True) -> bool:
        """Waits until something has changed since `seen` was read. False when no lease or move of others will.

        ``marks``: whether a mark that was only given up is such a change.
        """
        me = threading.get_ident()

        def holders() -> list[int]:
            others = [m for m in self.models.values() if m is not model]
            leases = [lease for m in others for lease in list(m.leases) if not lease.suspended and lease.thread != me]
            return [lease.thread for lease in leases] + [m.mover for m in others if m.moving]

        with self.lock:
            self._clear_mark(model)  # ours may be what the other one waits for
            if model.device_bytes:
                self.changes += 1  # or what its decision failed for; ours it does not help
                self.given_up += 1
                seen += marks
            started = time.monotonic()

            def worth_it() -> bool:
                # Who holds a lease and waits for something itself may wait for us: for a thread of its own, say.
                stuck = time.monotonic() - started > _PATIENCE_S and all_rest(holders())
                return self._seen(marks=marks) == seen and self._hope(holders) and not stuck

            self._wait_while(worth_it, holders)
            changed = self._seen(marks=marks) != seen
            self._mark(model, "loading")
            return changed

    def _hope(self, awaited: Callable[[], Iterable[int]]) -> bool:
        """Whether one of the threads runs, or waits for one that runs, and none of it for this thread."""
        seen, todo = {threading.get_ident(), *self._workers.waiting_for_me}, list(awaited())
        while todo:
            thread = todo.pop()
            if thread in seen:
                continue
            if thread not in self._waiting:
                return True
            seen.add(thread)
            further = list(self._waiting[thread]())
            if not further:
                return True  # what it waited for is over, it has only not woken up yet
            todo += further
        return False

    def _wait_while(self, condition: Callable[[], bool], awaited: Callable[[], Iterable[int]]) -> None:
        """Called with the lock held, which is given away meanwhile."""
        if not condition():
            return
        if self._workers.is_ours:
            raise VRAMError("A move would wait for itself.\nPlease report this: it is a defect of vram_magic.")
        me = threading.get_ident()
        self._waiting[me] = awaited
        self._changed.notify_all()  # others may be waiting for this thread: let them look again
        try:
            while condition():
                self._changed.wait(_POLL_S)
                self._workers.check_cancelled()
        finally:
            del self._waiting[me]
