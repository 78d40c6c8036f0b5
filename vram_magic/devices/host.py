"""Host RAM: what of it is available, bytes at an address, and the limit on copies of weights that leave a device.

All figures are bytes. `HostMemory` takes a leaf lock of its own, for arithmetic. Refuses to know what the copies hold.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from vram_magic.devices.base import AUTO, PIECE_BYTES
from vram_magic.sizes import parse_size

if TYPE_CHECKING:
    import torch

__all__ = ["HostMemory", "HostShare", "available_ram_bytes", "memory_at", "ram_reserve_bytes", "read_ram", "write_ram"]

_RESERVE_FRACTION, _RESERVE_FLOOR = 0.10, 512 << 20
_CGROUP = (  # (limit, usage) files of cgroup v2 and v1
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)


class HostMemory:
    """The RAM that host copies may take: a number of bytes, or ``"auto"``: what is available, less a reserve."""

    def __init__(self, limit: int | str = AUTO) -> None:
        self.limit = AUTO if limit == AUTO else parse_size(limit, what="host budget")
        self.used_bytes = 0
        self._lock = threading.RLock()  # a share may be dropped by a collection that starts under it

    def take(self, size_bytes: int) -> HostShare | None:
        """A share of that size, or None: the copy then goes to disk."""
        with self._lock:
            if size_bytes > self._free_bytes():
                return None
            self.used_bytes += size_bytes
        return HostShare(self, size_bytes)

    def _free_bytes(self) -> int:
        if isinstance(self.limit, int):
            return self.limit - self.used_bytes
        return available_ram_bytes() - ram_reserve_bytes()

    def give_back(self, size_bytes: int) -> None:
        with self._lock:
            self.used_bytes -= size_bytes


class HostShare:
    """Bytes of a `HostMemory`, given back when it goes."""

    def __init__(self, host: HostMemory, size_bytes: int) -> None:
        self._host = host
        self._size_bytes = size_bytes

    def __del__(self) -> None:
        self._host.give_back(self._size_bytes)


def available_ram_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """RAM that can be had without swapping, within the container's limit."""
    available = int(psutil.virtual_memory().available)
    for limit, usage in _CGROUP:
        try:
            room = int((cgroup / limit).read_text()) - int((cgroup / usage).read_text())
        except (OSError, ValueError):  # no such file, or "max"
            continue
        return max(0, min(available, room))
    return available


def ram_reserve_bytes() -> int:
    """RAM left to everything that is not torch."""
    return max(int(psutil.virtual_memory().total * _RESERVE_FRACTION), _RESERVE_FLOOR)


def memory_at(address: int, size_bytes: int) -> memoryview:
    """Bytes in this process's memory, writable. Valid while whatever owns them lives."""
    return memoryview((ctypes.c_char * size_bytes).from_address(address)).cast("B")


def read_ram(memory: torch.Tensor) -> Iterator[memoryview]:
    """`Device.read` where the processor reaches the memory itself."""
    for start in range(0, memory.numel(), PIECE_BYTES):
        yield memory_at(memory.data_ptr() + start, min(PIECE_BYTES, memory.numel() - start))


def write_ram(memory: torch.Tensor, fill: Callable[[memoryview, int], object]) -> None:
    """`Device.write` where the processor reaches the memory itself."""
    start = 0
    for piece in read_ram(memory):
        fill(piece, start)
        start += len(piece)
