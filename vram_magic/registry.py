"""The register of managed models, and the one lock.

The lock guards: which models there are, their leases, their ``moving`` marks, pins, tiers and the clock. Under it
nothing is waited for, nobody's code runs and nothing is moved; whoever wants to move a model sets ``moving`` under the
lock, lets it go, moves, and clears the mark under it again. It is re-entrant, since a finaliser of a generator may end
a lease in whatever thread, and leases are entries of a set, which such an interruption cannot miscount.

Lock order: this lock, then a meter's leaf lock. Never the other way round, and no other lock under it.

A thread that finds no room may wait for leases of others, but never for threads that wait themselves: two models, each
the other's victim, do not hang; one of the calls fails with a clear error.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from vram_magic.errors import UnknownModelError, VRAMError
from vram_magic.models.managed import ManagedModel
from vram_magic.oom import VRAMOutOfMemoryError
from vram_magic.policy import DEFAULT_TIERS
from vram_magic.workers import Workers

__all__ = ["Lease", "Registry"]

_POLL_S = 0.2  # how often a waiting job looks whether its caller has gone


class Lease:
    """One use of a model in progress."""

    __slots__ = ("model", "suspended", "thread")

    def __init__(self, model: ManagedModel, *, suspended: bool = False) -> None:
        self.model = model
        self.thread = threading.get_ident()
        self.suspended = suspended
        """Held by a generator: it may never end by itself, so nobody waits for it."""


class Registry:
    """Models by name, their leases, and waiting for one another."""

    def __init__(self, workers: Workers, bring: Callable[[ManagedModel], None]) -> None:
        self.lock = threading.RLock()
        self.models: dict[str, ManagedModel] = {}
        self.tiers: dict[str, int] = dict(DEFAULT_TIERS)
        self.gone: deque[str] = deque()
        """Names whose objects died; finalisers append, `Reclaimer` clears up."""
        self._changed = threading.Condition(self.lock)
        self._changes = 0
        self._clock = itertools.count(1)
        self._waiting: set[int] = set()
        self._thread = threading.local()
        self._workers = workers
        self._bring = bring
        self._pid = os.getpid()

    # ------------------------------------------------------------------------------------------------- models

    def get(self, name: str) -> ManagedModel:
        """The model of that name. Raises `UnknownModelError`."""
        with self.lock:
            model = self.models.get(name)
            names = ", ".join(sorted(self.models)) or "none"
        if model is None:
            raise UnknownModelError(
                f"No model is called {name!r}.\nManaged are: {names}.\n"
                "It was never loaded, or was forgotten, or its last reference went.\n"
                f"Load it with: %load_model {name} SOURCE"
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

    def add(self, model: ManagedModel) -> None:
        """Lists a new model, as the most recently used."""
        with self.lock:
            self.models[model.name] = model
            self.touch(model)

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

    def rename(self, model: ManagedModel, name: str) -> None:
        """Lists a model under another name."""
        with self.lock:
            self.models.pop(model.name, None)
            model.name = name
            self.models[name] = model

    def touch(self, model: ManagedModel) -> None:
        """Counts a use, now."""
        model.last_used = next(self._clock)

    # ------------------------------------------------------------------------------------------------- leases

    def inside(self, model: ManagedModel) -> bool:
        """Whether this thread's innermost managed call is one of the model already."""
        stack = getattr(self._thread, "stack", None)
        return stack is not None and bool(stack) and stack[-1] is model

    @property
    def current(self) -> ManagedModel | None:
        """The model whose call this thread is in."""
        stack: list[ManagedModel] | None = getattr(self._thread, "stack", None)
        return stack[-1] if stack else None

    @property
    def held_by_me(self) -> bool:
        """Whether this thread holds the lock (a finaliser that allocates, under it)."""
        return bool(self.lock._is_owned())  # type: ignore[attr-defined]  # noqa: SLF001

    def begin(self, model: ManagedModel, *, suspended: bool = False) -> Lease:
        """A lease on the model, with everything it needs on the device. Raises `VRAMOutOfMemoryError` and others."""
        lease = Lease(model, suspended=suspended)
        with self.lock:
            ready = model.complete and not model.moving
            if ready:
                self._grant(lease)
        if not ready:
            self._make_ready(lease)
        if not suspended:
            stack = getattr(self._thread, "stack", None)
            if stack is None:
                stack = self._thread.stack = []
            stack.append(model)
        return lease

    async def begin_async(self, model: ManagedModel) -> Lease:
        """`begin` for a coroutine: waits without blocking the event loop."""
        with self.lock:
            if model.complete and not model.moving:
                return self._grant(Lease(model, suspended=True))
        return await self._workers.call(lambda: self.begin(model, suspended=True))

    def end(self, lease: Lease) -> None:
        """Ends a lease; once is enough, from any thread."""
        with self.lock:
            lease.model.leases.discard(lease)
            self.touch(lease.model)
            self.notify()
        if not lease.suspended:
            stack = getattr(self._thread, "stack", None)
            if stack and stack[-1] is lease.model:
                stack.pop()

    def _grant(self, lease: Lease) -> Lease:
        lease.model.leases.add(lease)
        self.touch(lease.model)
        return lease

    def _make_ready(self, lease: Lease) -> None:
        """Brings in what is missing; whoever moves the model meanwhile is waited for."""
        model = lease.model
        if os.getpid() != self._pid or model.forgotten:
            self._grant(lease)  # a forked child, or a model that is not ours any more: it computes where it is
            return
        with self.moving(model, "loading"):
            if not model.complete:
                self._bring_or_wait(model)
            # Granted before the mark is cleared: nobody can take away what has just been brought.
            with self.lock:
                self._grant(lease)

    def ensure(self, model: ManagedModel) -> None:
        """Everything of the model is on the device on return; no lease is taken."""
        with self.moving(model, "loading"):
            if not model.complete:
                self._bring_or_wait(model)
            with self.lock:
                self.touch(model)

    def _bring_or_wait(self, model: ManagedModel) -> None:
        while True:
            changes = self._changes
            try:
                self._bring(model)
            except VRAMOutOfMemoryError as error:
                if error.needed_bytes > error.budget_bytes or not self._wait_for_others(model, changes):
                    raise
            else:
                return

    # ------------------------------------------------------------------------------------------------- moving

    @contextmanager
    def moving(self, model: ManagedModel, how: str) -> Iterator[None]:
        """Marks the model for a move, after whatever moves it now. Raises `VRAMError` when that never ends."""
        with self.lock:
            while model.moving:
                self._wait()
            model.moving = how
        try:
            yield
        finally:
            self.done_moving(model)

    def done_moving(self, model: ManagedModel) -> None:
        with self.lock:
            model.moving = ""
            self.notify()

    def notify(self) -> None:
        """Called with the lock held, after anything that a waiting thread may hope for."""
        self._changes += 1
        if self._waiting:
            self._changed.notify_all()

    def wait_for_moves(self, mine: ManagedModel | None = None) -> bool:
        """Waits until some move of another model ends; False when there is none to wait for."""
        with self.lock:
            others = [model for model in self.models.values() if model.moving and model is not mine]
            if not others:
                return False
            changes = self._changes
            while self._changes == changes:
                self._wait()
            return True

    def _wait_for_others(self, model: ManagedModel, changes: int) -> bool:
        """Waits for a lease or a move of others to end. False when none will, unless something changed already."""
        me = threading.get_ident()
        with self.lock:
            if not self._may_change(model, me):
                return self._changes != changes and self._progress(model)
            # Ours may be what the other one waits for: while waiting we hold no mark.
            model.moving = ""
            self.notify()
            seen = self._changes
            while self._changes == seen and self._may_change(model, me):
                self._wait()
            worth_it = self._changes != seen
            while model.moving:
                self._wait()
            model.moving = "loading"
            return worth_it

    def _progress(self, model: ManagedModel) -> bool:
        """Whether, after a change that we missed, there is an idle model to take."""
        return any(m.device_bytes and not m.leases and not m.pinned for m in self.models.values() if m is not model)

    def _may_change(self, model: ManagedModel, me: int) -> bool:
        others = [m for m in self.models.values() if m is not model]
        leases = [lease for m in others for lease in list(m.leases) if not lease.suspended and lease.thread != me]
        return any(m.moving for m in others) or any(lease.thread not in self._waiting for lease in leases)

    def _wait(self) -> None:
        """One wait for a change, with the lock given away meanwhile."""
        me = threading.get_ident()
        if self._workers.is_ours:
            raise VRAMError("A move would wait for itself.\nPlease report this: it is a defect of vram_magic.")
        self._waiting.add(me)
        self._changed.notify_all()  # others may be waiting for a lease of this thread: let them look again
        try:
            self._changed.wait(_POLL_S)
        finally:
            self._waiting.discard(me)
        self._workers.check_cancelled()
