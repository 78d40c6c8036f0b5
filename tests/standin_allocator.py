"""Two devices without memory, to allocate on in C++: what ``standin_allocator.cpp`` offers, and a guard for them.

A process that has imported this has a CUDA allocator of its own. So tests have their scripts run by a process that is
started for it: `serve` reads them from its input, one after the other, and answers each with what went wrong.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import signal
import sys
import threading
import traceback
from pathlib import Path

from vram_magic.guard import native
from vram_magic.guard.build import build

MIB = 1 << 20

# CDLL lets go of Python's lock while it runs, as torch's operations do.
_library = ctypes.CDLL(str(build(Path(__file__).with_name("standin_allocator.cpp"))))
_library.standin_allocate.argtypes = [ctypes.c_int64, ctypes.c_char_p, ctypes.c_size_t]
_library.standin_free.argtypes = [ctypes.c_void_p]
_library.standin_hammer.argtypes = [ctypes.c_uint64, ctypes.c_int64, ctypes.c_int, ctypes.c_int64]
_library.standin_capacity.argtypes = [ctypes.c_int, ctypes.c_int64]
_library.standin_block.argtypes = [ctypes.c_int64]
for _name in ("allocate", "table"):
    getattr(_library, f"standin_{_name}").restype = ctypes.c_void_p
for _name in ("live", "peak", "hammer"):
    getattr(_library, f"standin_{_name}").restype = ctypes.c_int64

live, peak, table, hammer = (getattr(_library, f"standin_{name}") for name in ("live", "peak", "table", "hammer"))
set_device, set_capacity, set_block = (getattr(_library, f"standin_{name}") for name in ("device", "capacity", "block"))
replace = _library.standin_replace


def start() -> None:
    """The allocator as it is at first, but for what is still allocated and the peak."""
    _library.standin_start()
    for index in range(2):
        set_capacity(index, 2**62)
    set_block(512)
    set_device(0)


def guard(index: int = 0) -> native.NativeGuard:
    """The first way's guard of a device, without the tiny tensor that tries it out: there are no kernels."""
    return native._guard("cuda", index, native.NATIVE)


class RefusalError(Exception):
    """The allocation raised c10's out-of-memory error, of this text."""


class Block:
    """An allocation, until it is freed or collected."""

    def __init__(self, size_bytes):
        reason = ctypes.create_string_buffer(1000)
        self.address = _library.standin_allocate(size_bytes, reason, len(reason))
        if not self.address:
            raise RefusalError(reason.value.decode())

    def free(self):
        address, self.address = self.address, None
        if address:
            _library.standin_free(address)

    def __del__(self):
        self.free()


class Pressure:
    """Answers the guard: notes what it was asked, frees from `idle` until there is room, else refuses with a text."""

    def __init__(self, asked_guard, text="nothing may leave"):
        self.guard, self.text = asked_guard, text
        self.asked, self.idle = [], []

    def __call__(self, need, why, size):
        self.asked.append((need, why, size))
        while True:
            if why == native.OVER_BUDGET and (room := self.guard.reserve(need)):
                break
            if not self.idle:
                self.guard.explain(self.text)
                return native.REFUSED
            self.idle.pop().free()
            if why != native.OVER_BUDGET and (room := self.guard.reserve(need)):
                break
        room.transfer()
        return native.GRANTED


@contextlib.contextmanager
def limited(limit_bytes, index=0, **options):
    """The guard with a limit, and its pressure."""
    one = guard(index)
    pressure = Pressure(one, **options)
    one.install(pressure)
    one.limit_bytes = limit_bytes
    try:
        yield one, pressure
    finally:
        one.uninstall()
        pressure.idle.clear()  # the guard keeps whatever it once called


def serve() -> None:
    """Runs scripts, each a line of JSON, in names of their own: those of this module, and it as `standin`."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    module = sys.modules[__name__]
    for line in sys.stdin:
        start()
        names, trouble = {**vars(module), "standin": module, "threading": threading}, ""
        try:
            exec(json.loads(line), names)
        except BaseException:
            trouble = traceback.format_exc()
        names.clear()
        gc.collect()  # blocks of one script must not count in the next
        print(json.dumps(trouble), flush=True)
