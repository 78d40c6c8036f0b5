"""The native guard seen from Python: a `Meter` that counts every allocation of torch's CPU allocator by itself.

There is one guard in a process (one allocator), so this module keeps one library and one meter. The callback runs in
whatever thread allocates, in the middle of an operation: it must not raise, and it must not be interrupted, or an
exception would cross C++ frames. `PressureFn` therefore gives its answer as a value.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vram_magic.guard.build import build

if TYPE_CHECKING:
    import torch

__all__ = ["GRANTED", "INTERRUPTED", "REFUSED", "CpuGuard", "PressureFn", "load_guard"]

GRANTED, INTERRUPTED, REFUSED = 1, 2, 4
"""Bits of a pressure callback's answer: the bytes are committed, or will not be; raise KeyboardInterrupt when the
operation ends. An answer of 0 is none."""

PressureFn = Callable[[int], int]

_thread = threading.local()

_int64, _pointer = ctypes.c_int64, ctypes.c_void_p
_PRESSURE = ctypes.CFUNCTYPE(_int64, _int64)
_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "vm_callbacks": (None, [_PRESSURE, _pointer]),
    "vm_message": (None, [ctypes.c_char_p]),
    "vm_set_budget": (None, [_int64]),
    "vm_live": (_int64, []),
    "vm_committed": (_int64, []),
    "vm_peak": (_int64, []),
    "vm_reserve": (_pointer, [_int64]),
    "vm_left": (_int64, [_pointer]),
    "vm_transfer": (None, [_pointer]),
    "vm_release": (None, [_pointer]),
    "vm_draw_on": (_pointer, [_pointer, ctypes.c_int]),
    "vm_credit": (_int64, []),
    "vm_spend": (None, [_pointer, _int64]),
    "vm_give_back": (None, [_int64]),
    "vm_owns": (ctypes.c_int, [_pointer]),
    "vm_adopt": (_int64, [_pointer]),
}


@functools.cache
def load_guard() -> CpuGuard:
    """The guard of this process, built on first use. Raises `GuardUnavailable`."""
    # PyDLL keeps the GIL: each call is some nanoseconds of counting, and giving the GIL away would let others in.
    library = ctypes.PyDLL(str(build(Path(__file__).with_name("cpu.cpp"))))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    guard = CpuGuard(library)
    os.register_at_fork(after_in_child=guard.disable)
    atexit.register(guard.disable)  # what is allocated while Python ends has nobody left to ask
    return guard


class CpuGuard:
    """Counts and limits torch's CPU allocations while installed; memory it handed out is counted until it is freed."""

    counts_allocations = True

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        # ctypes keeps no reference, and a thread may still be inside an old one: a collected callback is a crash.
        self._callbacks: list[Any] = []
        self._limit = 0

    def install(self, pressure: PressureFn) -> None:
        """Puts the guard in; from now on ``pressure(need_bytes)`` is asked before the limit would be passed."""
        self._callbacks.append(_PRESSURE(pressure))
        raise_interrupt = ctypes.cast(ctypes.pythonapi.PyErr_SetInterrupt, ctypes.c_void_p)
        self._library.vm_callbacks(self._callbacks[-1], raise_interrupt)
        self._library.vm_install()

    def uninstall(self) -> None:
        """Gives torch its own allocator back."""
        self.disable()
        self._library.vm_uninstall()

    def disable(self) -> None:
        """Stops limiting, as in a forked child, where nobody could answer."""
        self.limit_bytes = 2**63 - 1
        self._library.vm_callbacks(_PRESSURE(), None)

    @property
    def installed(self) -> bool:
        return bool(self._library.vm_installed())

    @property
    def limit_bytes(self) -> int:
        return self._limit

    @limit_bytes.setter
    def limit_bytes(self, size_bytes: int) -> None:
        self._limit = size_bytes
        self._library.vm_set_budget(size_bytes)

    @property
    def live_bytes(self) -> int:
        return int(self._library.vm_live())

    @property
    def committed_bytes(self) -> int:
        return int(self._library.vm_committed())

    @property
    def peak_bytes(self) -> int:
        return int(self._library.vm_peak())

    @property
    def credit_bytes(self) -> int:
        return int(self._library.vm_credit())

    def reset_peak(self) -> None:
        self._library.vm_reset_peak()

    def reserve(self, size_bytes: int) -> NativeReservation | None:
        pointer = self._library.vm_reserve(size_bytes)
        return NativeReservation(self._library, pointer) if pointer else None

    def give_back(self, size_bytes: int) -> None:
        self._library.vm_give_back(size_bytes)

    def owns(self, storage: torch.UntypedStorage) -> bool:
        """Whether the storage's memory came from torch's allocator, so that freeing it gives room."""
        return bool(self._library.vm_owns(storage._cdata))

    def adopt(self, storage_address: int, size_bytes: int) -> None:  # noqa: ARG002  the storage knows its size
        self._library.vm_adopt(storage_address)

    def explain(self, text: str) -> None:
        """The message of the out-of-memory error that this thread's refused request is about to raise."""
        self._library.vm_message(text.encode())


class NativeReservation:
    """Room that the guard keeps for whoever draws on it."""

    def __init__(self, library: ctypes.CDLL, pointer: int) -> None:
        self._library = library
        self._pointer: int | None = pointer

    def __del__(self) -> None:
        self.release()  # an interrupt may have dropped it on its way to its taker

    @property
    def left_bytes(self) -> int:
        return int(self._library.vm_left(self._pointer)) if self._pointer else 0

    @contextlib.contextmanager
    def draw(self, *, own_move: bool = False) -> Iterator[None]:
        # The thread's list, not "what was before": coroutines of one thread come and go in any order.
        drawn: list[int | None] = _thread.__dict__.setdefault("drawn", [])
        pointer = self._pointer
        drawn.append(pointer)
        self._library.vm_draw_on(pointer, int(own_move))
        try:
            yield
        finally:
            drawn.remove(pointer)
            self._library.vm_draw_on(drawn[-1] if drawn else None, 0)

    def spend(self, size_bytes: int) -> None:
        self._library.vm_spend(self._pointer, size_bytes)

    def transfer(self) -> None:
        """The bytes now belong to the allocation that asked."""
        pointer, self._pointer = self._pointer, None
        self._library.vm_transfer(pointer)

    def release(self) -> None:
        pointer, self._pointer = self._pointer, None
        if pointer:
            self._library.vm_release(pointer)
