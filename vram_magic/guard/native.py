"""The native guard seen from Python: a `Meter` that limits, and counts by itself, what torch allocates on a device.

A guard stands before torch's allocator of the CPU (``cpu.cpp``), or of an accelerator in one of two ways
(``accelerator.cpp``, else ``forwarding.cpp``). There is one allocator of a kind in a process, so each library is loaded
once and each device has one guard; guards of several accelerators share a library and have callbacks of their own. The
callback runs in whatever thread allocates, in the middle of an operation: it must not raise, and it must not be
interrupted, or an exception would cross C++ frames. `PressureFn` therefore gives its answer as a value.

All figures are bytes. The locks are the library's; none is held here. Refuses to know who leaves.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from vram_magic.guard.build import GuardUnavailable, load
from vram_magic.guard.forwarding import (
    GENERATED,
    cuda_includes,
    has_device_allocator,
    overrides,
    raw_alloc_comes_first,
    torch_includes,
)

__all__ = [
    "FORWARDING",
    "GRANTED",
    "INTERRUPTED",
    "NATIVE",
    "OUT_OF_MEMORY",
    "OVER_BUDGET",
    "REFUSED",
    "NativeGuard",
    "NativeReservation",
    "PressureFn",
    "load_accelerator_guard",
    "load_guard",
]

GRANTED, INTERRUPTED, REFUSED = 1, 2, 4
"""Bits of a pressure callback's answer: the bytes are committed, or will not be; raise KeyboardInterrupt when the
operation ends. An answer of 0 is none."""

OVER_BUDGET, OUT_OF_MEMORY = 0, 1
"""Why there is pressure: the budget would be passed; or the allocator found no memory even without its cache, and one
more for each time that this happened again although room had been granted."""

PressureFn = Callable[[int, int, int], int]
"""Called with the bytes that lack room, why, and the size of the whole request."""

NATIVE, FORWARDING = "native", "native, forwarding"
_SOURCES = Path(__file__).parent
_DEVICES = 64  # as in room.h
_NO_LIMIT = 2**63 - 1

_int, _int64, _pointer = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
_PRESSURE = ctypes.CFUNCTYPE(_int64, _int64, ctypes.c_int32, _int64)
_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "vm_device_type": (_int, [ctypes.c_char_p]),
    "vm_install": (ctypes.c_char_p, [_int, _int, _int]),  # device type, index, whether raw_alloc is known
    "vm_uninstall": (None, [_int, _int]),
    "vm_installed": (_int, [_int]),
    "vm_forked": (None, [_int]),
    "vm_callbacks": (None, [_int, _PRESSURE, _pointer]),
    "vm_message": (None, [ctypes.c_char_p]),
    "vm_set_budget": (None, [_int, _int64]),
    "vm_live": (_int64, [_int]),
    "vm_committed": (_int64, [_int]),
    "vm_peak": (_int64, [_int]),
    "vm_reset_peak": (None, [_int]),
    "vm_start_lap": (_int64, [_int]),
    "vm_asks": (_int64, [_int]),
    "vm_oom_asks": (_int64, [_int]),
    "vm_reserve": (_pointer, [_int, _int64]),
    "vm_left": (_int64, [_pointer]),
    "vm_transfer": (None, [_pointer]),
    "vm_release": (None, [_pointer]),
    "vm_draw_on": (None, [_int, _pointer, _int]),
    "vm_credit": (_int64, [_int]),
    "vm_spend": (None, [_int, _pointer, _int64]),
    "vm_give_back": (None, [_int, _int64]),
    "vm_owns": (_int, [_int, _pointer]),
    "vm_counts": (_int, [_int, _pointer]),
    "vm_adopt": (_int64, [_int, _pointer]),
}
_ACCELERATOR_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "vm_calls": (_int64, [_int]),
    "vm_bench": (_int64, [_int, _int64, _int64]),
}


def load_guard() -> NativeGuard:
    """The guard of torch's CPU allocator, built on first use. Raises `GuardUnavailable`."""
    return _guard("cpu", 0, NATIVE)


def load_accelerator_guard(device: torch.device) -> NativeGuard:
    """The guard of an accelerator, in the best way that works here; uses the device. Raises `GuardUnavailable`.

    ``VRAM_MAGIC_GUARD=forwarding`` in the environment leaves out the first way.
    """
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    ways = [NATIVE, FORWARDING] if device.type == "cuda" else [NATIVE]
    if os.environ.get("VRAM_MAGIC_GUARD") == "forwarding":
        ways.remove(NATIVE)
    reasons = []
    for way in ways:
        try:
            guard = _guard(device.type, index, way)
            guard.check()
        except GuardUnavailable as unavailable:
            reasons.append(str(unavailable))
        else:
            return guard
    raise GuardUnavailable("; ".join(dict.fromkeys(reasons)) or f"{device.type} has no second way")


@functools.cache
def _guard(kind: str, index: int, way: str) -> NativeGuard:
    """The one guard of a device and way in this process."""
    if index >= _DEVICES:
        raise GuardUnavailable(f"a guard serves {_DEVICES} devices")
    guard = NativeGuard(_library(kind == "cpu", way), torch.device(kind, index), way)
    os.register_at_fork(after_in_child=guard.become_child)
    atexit.register(guard.disable)  # what is allocated while Python ends has nobody left to ask
    return guard


@functools.cache
def _library(cpu: bool, way: str) -> ctypes.PyDLL:
    if cpu:
        library = load(_SOURCES / "cpu.cpp")
    elif not has_device_allocator(torch_includes()):
        raise GuardUnavailable("torch 2.9 or newer is needed")
    elif way == NATIVE:
        library = load(_SOURCES / "accelerator.cpp")
    else:
        library = _load_forwarding()
    for name, (result, arguments) in (_SIGNATURES if cpu else _SIGNATURES | _ACCELERATOR_SIGNATURES).items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def _cuda_library() -> Path:
    """Where the CUDA build of torch has its allocator."""
    return Path(torch.__file__).parent / "lib/libc10_cuda.so"


def _load_forwarding() -> ctypes.PyDLL:
    cuda = _cuda_library()
    if not cuda.is_file():
        raise GuardUnavailable("this torch has no CUDA allocator to forward to")
    generated = {GENERATED: overrides(torch_includes())}
    # torch has loaded it for itself; ours needs some of its functions, and is linked with c10 only.
    ctypes.CDLL(str(cuda), mode=ctypes.RTLD_GLOBAL)
    return load(_SOURCES / "forwarding.cpp", generated=generated, includes=[cuda_includes()])


class NativeGuard:
    """Limits torch's allocations on one device while installed; memory that is in use is counted until it is freed."""

    counts_allocations = True

    def __init__(self, library: ctypes.PyDLL, device: torch.device, way: str) -> None:
        self.device = device
        self.way = way
        """How allocations are noticed, for the report."""
        self._library = library
        self._type, self._index = int(library.vm_device_type(device.type.encode())), device.index
        # ctypes keeps no reference, and a thread may still be inside an old one: a collected callback is a crash.
        self._callbacks: list[Any] = []
        self._limit = _NO_LIMIT
        self._thread = threading.local()

    # --------------------------------------------------------------------------------------------- in and out

    def install(self, pressure: PressureFn) -> None:
        """Puts the guard in; from now on ``pressure`` is asked before the limit would be passed."""
        self._callbacks.append(_PRESSURE(pressure))
        raise_interrupt = ctypes.cast(ctypes.pythonapi.PyErr_SetInterrupt, _pointer)
        self._library.vm_callbacks(self._index, self._callbacks[-1], raise_interrupt)
        self._put_in()

    def uninstall(self) -> None:
        """Gives torch its own allocator back."""
        self.disable()
        self._library.vm_uninstall(self._type, self._index)

    def disable(self) -> None:
        """Stops limiting."""
        self.limit_bytes = _NO_LIMIT
        self._library.vm_callbacks(self._index, _PRESSURE(), None)

    def become_child(self) -> None:
        """After a fork: nobody could answer here."""
        self._limit = _NO_LIMIT
        self._library.vm_forked(self._index)

    def check(self) -> None:
        """Puts the guard in for one tiny allocation, and out again, unless it is in. Raises `GuardUnavailable`."""
        if self.installed:
            return
        self._put_in()
        try:
            before = self._library.vm_calls(self._index)
            with warnings.catch_warnings():  # the first use of a device may warn; that is no failure of the guard
                warnings.simplefilter("ignore")
                torch.empty(1, dtype=torch.uint8, device=self.device)
            if self._library.vm_calls(self._index) == before:
                raise GuardUnavailable(f"the allocator of {self.device} goes around the guard")
        finally:
            self._library.vm_uninstall(self._type, self._index)

    def _put_in(self) -> None:
        raw_alloc = self.device.type == "cuda" and _cuda_library().is_file() and raw_alloc_comes_first(torch_includes())
        reason: bytes | None = self._library.vm_install(self._type, self._index, int(raw_alloc))
        if reason is not None:
            raise GuardUnavailable(f"{self.device} cannot be limited: {reason.decode()}")

    @property
    def installed(self) -> bool:
        """Whether allocations still go through the guard: another tool may have replaced the allocator since."""
        return bool(self._library.vm_installed(self._type))

    # ------------------------------------------------------------------------------------------------ figures

    @property
    def limit_bytes(self) -> int:
        return self._limit

    @limit_bytes.setter
    def limit_bytes(self, size_bytes: int) -> None:
        self._limit = size_bytes
        self._library.vm_set_budget(self._index, size_bytes)

    @property
    def live_bytes(self) -> int:
        return int(self._library.vm_live(self._index))

    @property
    def committed_bytes(self) -> int:
        return int(self._library.vm_committed(self._index))

    @property
    def peak_bytes(self) -> int:
        return int(self._library.vm_peak(self._index))

    @property
    def credit_bytes(self) -> int:
        return int(self._library.vm_credit(self._index))

    @property
    def asks(self) -> tuple[int, int]:
        """How often room was asked for: because of the limit, and because the allocator found no memory."""
        return self._library.vm_asks(self._index), self._library.vm_oom_asks(self._index)

    def reset_peak(self) -> None:
        """Starts a new peak; the accelerator allocator's own, which others may read, is reset too."""
        self._library.vm_reset_peak(self._index)

    def start_lap(self) -> int:
        """Starts a new peak and leaves the allocator's own alone; returns the one until now."""
        return int(self._library.vm_start_lap(self._index))

    # --------------------------------------------------------------------------------------------------- room

    def reserve(self, size_bytes: int) -> NativeReservation | None:
        pointer = self._library.vm_reserve(self._index, size_bytes)
        return NativeReservation(self, self._library, pointer) if pointer else None

    def spend(self, pointer: int | None, size_bytes: int) -> None:
        """Counts bytes that nobody allocates here, paid by the reservation as far as it goes."""
        self._library.vm_spend(self._index, pointer, size_bytes)

    def give_back(self, size_bytes: int) -> None:
        self._library.vm_give_back(self._index, size_bytes)

    def owns(self, storage: torch.UntypedStorage) -> bool:
        """Whether the storage's memory came from torch's allocator, so that freeing it gives room."""
        return bool(self._library.vm_owns(self._index, storage._cdata))

    def counts(self, storage: torch.UntypedStorage) -> bool:
        """Whether the storage's memory is in `live_bytes`."""
        return bool(self._library.vm_counts(self._index, storage._cdata))

    def adopt(self, storage_address: int, size_bytes: int) -> None:  # noqa: ARG002  the storage knows its size
        self._library.vm_adopt(self._index, storage_address)

    def explain(self, text: str) -> None:
        """The message of the out-of-memory error that this thread's refused request is about to raise."""
        self._library.vm_message(text.encode())

    @contextlib.contextmanager
    def drawing(self, pointer: int | None, *, own_move: bool) -> Iterator[None]:
        """Inside, this thread's allocations draw on the reservation."""
        # The thread's list, not "what was before": coroutines of one thread come and go in any order.
        drawn: list[tuple[int | None, bool]] = self._thread.__dict__.setdefault("drawn", [])
        drawn.append((pointer, own_move))
        self._library.vm_draw_on(self._index, *drawn[-1])
        try:
            yield
        finally:
            drawn.remove((pointer, own_move))
            self._library.vm_draw_on(self._index, *(drawn[-1] if drawn else (None, False)))


class NativeReservation:
    """Room that the guard keeps for whoever draws on it."""

    def __init__(self, guard: NativeGuard, library: ctypes.PyDLL, pointer: int) -> None:
        self._guard = guard
        self._library = library
        self._pointer: int | None = pointer

    def __del__(self) -> None:
        self.release()  # an interrupt may have dropped it on its way to its taker

    @property
    def left_bytes(self) -> int:
        return int(self._library.vm_left(self._pointer)) if self._pointer else 0

    def draw(self, *, own_move: bool = False) -> contextlib.AbstractContextManager[None]:
        return self._guard.drawing(self._pointer, own_move=own_move)

    def spend(self, size_bytes: int) -> None:
        self._guard.spend(self._pointer, size_bytes)

    def transfer(self) -> None:
        """The bytes now belong to the allocation that asked."""
        pointer, self._pointer = self._pointer, None
        self._library.vm_transfer(pointer)

    def release(self) -> None:
        pointer, self._pointer = self._pointer, None
        if pointer:
            self._library.vm_release(pointer)
