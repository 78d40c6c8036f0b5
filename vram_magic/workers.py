"""The manager's own threads, and waiting for them so that nothing is left half done.

* one thread decides and evicts, so decisions never race
* one thread loads
* one thread runs an event loop for the coroutines of outside engines, so that they run while a cell blocks the kernel's
* callers from an event loop wait in threads of a pool

A thread of ours is clean: no torch mode, no inference mode, no autocast of the user's is active in it, and what signal
handlers raise, which Python runs in the main thread only, cannot cut a move in two: who waits raises it afterwards.
Context variables do come along, with calls from coroutines and into the threads that a backend's coroutine starts: by
one of them what an engine's unload calls is known, and refused, as the deciding thread waits for that unload.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import functools
import queue
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

from vram_magic.errors import VRAMError, closed_manager

__all__ = ["Cancelled", "Outcome", "Workers", "outlasted", "settled"]

P = ParamSpec("P")
R = TypeVar("R")
Cancelled = concurrent.futures.CancelledError

_CALL_THREADS = 64


class Outcome(Generic[R]):
    """The result of a job in another thread, to come.

    ``concurrent.futures`` waits and queues through locks that are written in Python: an interrupt in the middle of one
    leaves it held, and the kernel hangs. Here a C lock and a flag do: the flag is set before the lock is opened.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._ready = False
        self._value: R | None = None
        self._error: BaseException | None = None

    def finish(self, value: R | None = None, error: BaseException | None = None) -> None:
        self._value, self._error, self._ready = value, error, True
        self._lock.release()

    def run(self, function: Callable[[], R]) -> None:
        """Finishes with what the function returns or raises."""
        try:
            value = function()
        except BaseException as error:  # noqa: BLE001  it belongs to who waits
            self.finish(error=error)
        else:
            self.finish(value)

    @property
    def ready(self) -> bool:
        """Whether the job has ended."""
        return self._ready

    def wait(self) -> None:
        while not self._ready:
            with self._lock:
                pass

    def abandon(self) -> None:
        """Nobody takes the value: what it reserved is released."""
        value, self._value = self._value, None
        if callable(release := getattr(value, "release", None)):
            release()

    def result(self) -> R:
        """The value, once there; raises what the job raised."""
        self.wait()
        if self._error is not None:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error  # it refers to this frame: a cycle would keep what the job held
        return self._value  # type: ignore[return-value]  # with no error the value is there


def outlasted(outcome: Outcome[R]) -> BaseException | None:
    """Waits until the job is done; returns what a signal handler raised meanwhile (the last), an interrupt say."""
    late: BaseException | None = None
    while True:
        try:
            outcome.wait()
            return late
        except BaseException as error:  # noqa: BLE001  the wait itself raises nothing; who calls raises it
            late = error


def settled(outcome: Outcome[R]) -> R:
    """The outcome's value. What a signal handler raises is raised after the job is done; what it reserved goes."""
    late = outlasted(outcome)
    try:
        if late is not None:
            outcome.abandon()  # the traceback keeps the outcome for as long as the user looks at it
            raise late
        return outcome.result()
    finally:
        del outcome, late  # their tracebacks refer to this frame: a cycle would keep what the job reserved


class _Line:
    """One thread that does jobs in their order. It ends when the line is closed or collected."""

    def __init__(self, name: str) -> None:
        self._jobs = _Jobs()
        self.thread = threading.Thread(target=self._jobs.work, name=name, daemon=True)
        self.thread.start()
        self.close = weakref.finalize(self, self._jobs.end)
        self.close.atexit = False

    def submit(self, function: Callable[[], R]) -> Outcome[R]:
        outcome: Outcome[R] = Outcome()
        self._jobs.put(outcome, function)
        return outcome


class _Jobs:
    """What a line still has to do. After its end a job fails at once: who waits for it would wait for ever."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Outcome[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._ended = False

    def put(self, outcome: Outcome[Any], function: Callable[[], Any]) -> None:
        self._queue.put((outcome, function))
        if self._ended:
            self._refuse_all()

    def end(self) -> None:
        self._queue.put(None)

    def work(self) -> None:
        while (job := self._queue.get()) is not None:
            outcome, function = job
            outcome.run(function)
            del job, outcome, function  # while waiting for the next one they would keep what they worked on
        self._ended = True  # first: what comes later is refused by who puts it
        self._refuse_all()

    def _refuse_all(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                if (job := self._queue.get_nowait()) is not None:
                    job[0].finish(error=closed_manager())


class _Pool(concurrent.futures.ThreadPoolExecutor):
    """Threads whose jobs run in the context of who asked for them, as in `asyncio.to_thread`."""

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> concurrent.futures.Future[R]:
        job = functools.partial(fn, *args, **kwargs)
        return super().submit(lambda context: context.run(job), contextvars.copy_context())


@dataclass(frozen=True, slots=True)
class _Call:
    """A backend's coroutine that a thread waits for."""

    outcome: Outcome[Any]
    thread: int
    outer: _Call | None
    """That in which the thread runs itself."""


_begun_for: contextvars.ContextVar[_Call | None] = contextvars.ContextVar("vram_magic_begun_for", default=None)
"""In a backend's coroutine, and in what it calls: who waits for it."""


class Workers:
    """The threads of one manager, started when first needed."""

    def __init__(self) -> None:
        self._decider = _Line("vram-magic-decide")
        self._loader = _Line("vram-magic-load")
        self._callers = _Pool(_CALL_THREADS, "vram-magic-call")
        self._local = threading.local()
        self._forked = self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = 0
        self._starting = threading.Lock()  # a leaf: held while the loop thread starts

    def become_child(self) -> None:
        """After a fork: no thread of ours runs here, so nobody may wait for one."""
        self._forked = True

    @property
    def is_ours(self) -> bool:
        """Whether the calling thread is one that decisions wait for: it must not wait for a decision."""
        return self._forked or threading.get_ident() in (
            self._decider.thread.ident,
            self._loader.thread.ident,
            self._loop_thread,
        )

    @property
    def _in_unload(self) -> bool:
        """Whether the caller is a coroutine that the deciding thread waits for, or was called by it."""
        return self._decider.thread.ident in self.waiting_for_me

    @property
    def waiting_for_me(self) -> set[int]:
        """The threads that wait for a backend's coroutine which the caller is, or was called by."""
        threads, call = set(), _begun_for.get()
        while call is not None:
            if not call.outcome.ready:
                threads.add(call.thread)
            call = call.outer
        return threads

    def decide(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Outcome[R]:
        """Runs the function in the deciding thread (at once when called from there)."""
        job = functools.partial(function, *args, **kwargs)
        if threading.get_ident() == self._decider.thread.ident:
            outcome: Outcome[R] = Outcome()
            outcome.run(job)
            return outcome
        self.check_not_in_unload()
        if self.is_ours:
            raise _waits_for_itself()
        return self._decider.submit(job)

    def load(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Outcome[R]:
        """Runs the function in the loading thread."""
        return self._loader.submit(functools.partial(function, *args, **kwargs))

    def run_coroutine(self, coroutine: Coroutine[Any, Any, R]) -> R:
        """The coroutine's result, from the manager's event loop; cancelled when the calling job is cancelled.

        Waits for its real end, also when it takes its time to be cancelled, or completes all the same.
        """
        loop = self._event_loop()
        if threading.get_ident() == self._loop_thread:
            coroutine.close()
            raise _unload_waits_for_itself() if self._in_unload else _waits_for_itself()
        # Not `run_coroutine_threadsafe`: its future is done as soon as it is cancelled, while the coroutine still runs.
        future: Outcome[R] = Outcome()
        tasks: list[asyncio.Task[R]] = []
        context = contextvars.copy_context()
        context.run(_begun_for.set, _Call(future, threading.get_ident(), _begun_for.get()))

        def start() -> None:
            tasks.append(loop.create_task(coroutine, context=context))
            tasks[0].add_done_callback(functools.partial(_hand_over, future))

        def stop() -> None:
            tasks[0].cancel()

        loop.call_soon_threadsafe(start)
        job: _Job | None = getattr(self._local, "job", None)
        cancel = functools.partial(loop.call_soon_threadsafe, stop)
        with job.cancelling(cancel) if job else contextlib.nullcontext():
            return settled(future)

    def check_not_awaited_by(self, thread: int) -> None:
        """Raises `VRAMError` where the thread waits for the caller: to wait for the thread would take for ever."""
        if thread in self.waiting_for_me:
            raise _unload_waits_for_itself() if self._in_unload else _load_waits_for_itself()

    def check_not_in_unload(self) -> None:
        """Raises `VRAMError` in what an engine's unload called."""
        if self._in_unload:
            raise _unload_waits_for_itself()

    def check_cancelled(self) -> None:
        """Called while waiting for a move: raises `Cancelled` in a job whose caller has gone.

        Raises `VRAMError` in what an engine's unload called: the move may be that of the engine itself.
        """
        self.check_not_in_unload()
        job: _Job | None = getattr(self._local, "job", None)
        if job is not None and job.cancelled:
            raise Cancelled

    async def call(self, function: Callable[[], R], discard: Callable[[R], None] | None = None) -> R:
        """Runs a blocking function without blocking the caller's loop.

        A cancelled caller cancels the job, and leaves only when the job has ended, so that what it did is known; a
        result that came all the same goes to ``discard``.
        """
        job = _Job()
        try:
            future = asyncio.wrap_future(self._callers.submit(self._as_job, job, function))
        except RuntimeError:
            if self._closed:
                raise closed_manager() from None
            raise
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
                self._loop.set_default_executor(_Pool(thread_name_prefix="vram-magic-backend"))
                threading.Thread(target=self._run_loop, args=(self._loop,), name="vram-magic-loop", daemon=True).start()
            return self._loop

    def _run_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop_thread = threading.get_ident()
        try:
            asyncio.set_event_loop(loop)
            while self._loop is loop:  # until `close`, even where a backend stops the loop that it runs in
                # asyncio lets these two end the loop, too. Who waits for the coroutine gets them once it goes on.
                with contextlib.suppress(SystemExit, KeyboardInterrupt):
                    loop.run_forever()
        finally:
            self._loop_thread = 0  # another thread may get the number
            if self._loop is loop:
                self._loop = None
            loop.close()

    def close(self) -> None:
        """Ends the threads; what is running finishes."""
        self._closed = True
        may_wait = not (self.is_ours or self._in_unload)
        self._callers.shutdown(wait=may_wait)
        for line in (self._decider, self._loader):
            line.close()
            if may_wait:
                line.thread.join()
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)


def _waits_for_itself() -> VRAMError:
    return VRAMError(
        "An engine's load or unload would wait for itself.\nNothing was moved.\n"
        "A backend's coroutine called the manager, and the call needs the loop that the coroutine blocks.\n"
        "Use the awaitable form in it: await mgr.amake_room(...), await handle.aload()"
    )


def _load_waits_for_itself() -> VRAMError:
    return VRAMError(
        "An engine's load would wait for itself.\nNothing was moved.\n"
        "A backend's load asked the manager for the very engine that it is loading.\n"
        "Leave the call out of load: the engine is loaded when load returns"
    )


def _unload_waits_for_itself() -> VRAMError:
    return VRAMError(
        "An engine's unload would wait for itself.\nNothing was moved.\n"
        "A backend's unload called the manager, which decides nothing else before that unload has ended; the awaitable "
        "forms would wait for it, too.\n"
        "Leave the call out of unload, and make it afterwards: await mgr.unload_model(NAME), then await handle.aevict()"
    )


def _hand_over(outcome: Outcome[R], task: asyncio.Task[R]) -> None:
    if task.cancelled():
        outcome.finish(error=Cancelled())
    else:
        outcome.run(task.result)


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
