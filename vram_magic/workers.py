"""The manager's own threads, and waiting for them so that nothing is left half done.

* one thread decides and evicts, so decisions never race
* one thread loads
* one thread runs an event loop for the coroutines of outside engines, so that they run while a cell blocks the kernel's
* callers from an event loop wait in threads of a pool

A thread of ours is clean: no torch mode, no inference mode, no autocast of the user's is active in it, and a keyboard
interrupt, which Python delivers to the main thread only, cannot cut a move in two.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, ParamSpec, TypeVar

from vram_magic.errors import VRAMError

__all__ = ["Cancelled", "Workers", "settled"]

P = ParamSpec("P")
R = TypeVar("R")
Cancelled = concurrent.futures.CancelledError

_CALL_THREADS = 64


def settled(future: concurrent.futures.Future[R], discard: Callable[[R], None] | None = None) -> R:
    """The future's result. An interrupt is raised only after the future is done, and its result then discarded."""
    interrupt: KeyboardInterrupt | None = None
    while True:
        try:
            future.exception()
            break
        except KeyboardInterrupt as error:
            interrupt = error
    if interrupt is None:
        try:
            return future.result()
        finally:
            del future  # its exception refers to this frame: a cycle would keep alive whatever the failed call held
    if discard is not None and future.exception() is None:
        discard(future.result())
    raise interrupt


class Workers:
    """The threads of one manager, started when first needed."""

    def __init__(self) -> None:
        self._decider = concurrent.futures.ThreadPoolExecutor(1, "vram-magic-decide")
        self._loader = concurrent.futures.ThreadPoolExecutor(1, "vram-magic-load")
        self._callers = concurrent.futures.ThreadPoolExecutor(_CALL_THREADS, "vram-magic-call")
        self._local = threading.local()
        self._ours: set[int] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = 0
        self._starting = threading.Lock()  # a leaf: held while the loop thread starts

    @property
    def is_ours(self) -> bool:
        """Whether the calling thread is one that decisions wait for: it must not wait for a decision."""
        return threading.get_ident() in self._ours

    def decide(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> concurrent.futures.Future[R]:
        """Runs the function in the deciding thread (at once when called from there)."""
        if self.is_ours:
            future: concurrent.futures.Future[R] = concurrent.futures.Future()
            try:
                future.set_result(function(*args, **kwargs))
            except Exception as error:  # noqa: BLE001  it belongs to the future
                future.set_exception(error)
            return future
        return self._decider.submit(self._as_ours, functools.partial(function, *args, **kwargs))

    def load(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> concurrent.futures.Future[R]:
        """Runs the function in the loading thread."""
        return self._loader.submit(self._as_ours, functools.partial(function, *args, **kwargs))

    def _as_ours(self, function: Callable[[], R]) -> R:
        self._ours.add(threading.get_ident())
        return function()

    def run_coroutine(self, coroutine: Coroutine[Any, Any, R]) -> R:
        """The coroutine's result, from the manager's event loop; cancelled when the calling job is cancelled.

        Waits for its real end, also when it takes its time to be cancelled, or completes all the same.
        """
        loop = self._event_loop()
        if threading.get_ident() == self._loop_thread:
            coroutine.close()
            raise VRAMError(
                "An engine's load or unload would wait for itself.\nNothing was moved.\n"
                "A backend's coroutine called the manager, and the call needs the loop that the coroutine blocks.\n"
                "Use the awaitable form in it: await mgr.amake_room(...), await handle.aload()"
            )
        # Not `run_coroutine_threadsafe`: its future is done as soon as it is cancelled, while the coroutine still runs.
        future: concurrent.futures.Future[R] = concurrent.futures.Future()
        tasks: list[asyncio.Task[R]] = []

        def start() -> None:
            tasks.append(loop.create_task(coroutine))
            tasks[0].add_done_callback(functools.partial(_hand_over, future))

        def stop() -> None:
            tasks[0].cancel()

        loop.call_soon_threadsafe(start)
        job: _Job | None = getattr(self._local, "job", None)
        cancel = functools.partial(loop.call_soon_threadsafe, stop)
        with job.cancelling(cancel) if job else contextlib.nullcontext():
            return settled(future)

    def check_cancelled(self) -> None:
        """Raises `Cancelled` in a job whose caller has gone."""
        job: _Job | None = getattr(self._local, "job", None)
        if job is not None and job.cancelled:
            raise Cancelled

    async def call(self, function: Callable[[], R], discard: Callable[[R], None] | None = None) -> R:
        """Runs a blocking function without blocking the caller's loop.

        A cancelled caller cancels the job, and leaves only when the job has ended, so that what it did is known; a
        result that came all the same goes to ``discard``.
        """
        job = _Job()
        future = asyncio.wrap_future(self._callers.submit(self._as_job, job, function))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            job.cancel()
            while not future.done():
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await asyncio.shield(future)
            if future.exception() is None and discard is not None:
                discard(future.result())
            raise

    def _as_job(self, job: _Job, function: Callable[[], R]) -> R:
        self._local.job = job
        try:
            return function()
        finally:
            self._local.job = None

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._run_loop, args=(self._loop,), name="vram-magic-loop", daemon=True).start()
            return self._loop

    def _run_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop_thread = threading.get_ident()
        self._ours.add(self._loop_thread)
        asyncio.set_event_loop(loop)
        loop.run_forever()
        loop.close()

    def close(self) -> None:
        """Ends the threads; what is running finishes."""
        for pool in (self._decider, self._loader, self._callers):
            pool.shutdown(wait=not self.is_ours)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None


def _hand_over(future: concurrent.futures.Future[R], task: asyncio.Task[R]) -> None:
    if task.cancelled():
        future.set_exception(Cancelled())
    elif (error := task.exception()) is not None:
        future.set_exception(error)
    else:
        future.set_result(task.result())


class _Job:
    """A function that runs for a coroutine of the user's."""

    def __init__(self) -> None:
        self.cancelled = False
        self._cancel: Callable[[], object] | None = None

    def cancel(self) -> None:
        self.cancelled = True
        if (cancel := self._cancel) is not None:
            cancel()

    @contextlib.contextmanager
    def cancelling(self, cancel: Callable[[], object]) -> Iterator[None]:
        self._cancel = cancel
        if self.cancelled:
            cancel()
        try:
            yield
        finally:
            self._cancel = None
