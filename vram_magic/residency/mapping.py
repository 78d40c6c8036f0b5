"""Private mappings of files: what an evicted weight is made of.

A mapping costs no RAM, gives the true bytes to whoever reads it, and keeps a write to itself (copy on write). The
pages that were written are found through ``/proc/self/pagemap``.

Python's ``mmap`` duplicates the file descriptor for every mapping, and a model has hundreds of storages where a process
has a thousand descriptors; so this calls the C library's. There is one mapping for each storage: over a shared one a
written page would come back at the next eviction.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch

__all__ = ["FilePages", "bury", "file_pages", "map_range", "was_written"]

_PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value


def map_range(fd: int, offset: int, size_bytes: int) -> torch.Tensor:
    """Bytes ``[offset, offset + size_bytes)`` of the file as a private uint8 tensor, unmapped when its storage dies."""
    start = offset - offset % _PAGE
    length = offset - start + size_bytes
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    address = _libc.mmap(None, length, protection, mmap.MAP_PRIVATE, fd, start)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot map {size_bytes} bytes of a weight file: {os.strerror(number)}")
    pages = (ctypes.c_char * length).from_address(address)
    weakref.finalize(pages, _libc.munmap, address, length).atexit = False
    return torch.frombuffer(pages, dtype=torch.uint8, offset=offset - start, count=size_bytes)


_GRAVE_S = 60.0
_graves: deque[tuple[float, torch.UntypedStorage]] = deque()


def bury(storage: torch.UntypedStorage) -> None:
    """Keeps a mapping that nothing of ours refers to any more for a while: an operation may still be reading it.

    It costs address space, not memory. No operation takes as long as `_GRAVE_S`.
    """
    now = time.monotonic()
    _graves.append((now, storage))
    while _graves and now - _graves[0][0] > _GRAVE_S:
        _graves.popleft()


def was_written(address: int, size_bytes: int) -> bool | None:
    """Whether a page of a private file mapping left the file; None where the kernel does not tell.

    A page's 64-bit entry: bit 63 present, bit 62 swapped, bit 61 still a page of the file
    (Documentation/admin-guide/mm/pagemap.rst). A neighbour on the same page can make this True: it is suspicion.
    """
    first, last = address // _PAGE, (address + size_bytes - 1) // _PAGE
    try:
        with open("/proc/self/pagemap", "rb") as pagemap:
            pagemap.seek(first * 8)
            entries = memoryview(pagemap.read((last - first + 1) * 8)).cast("Q")
    except (OSError, TypeError):
        return None
    return any(entry >> 62 & 1 or (entry >> 63 and not entry >> 61 & 1) for entry in entries)


@dataclass(frozen=True, slots=True)
class FilePages:
    """One private mapping of a file in this process."""

    start: int
    end: int
    offset: int
    device: int
    inode: int

    def place_of(self, address: int) -> tuple[int, int, int]:
        """(device, inode, offset in the file) of an address inside."""
        return self.device, self.inode, self.offset + address - self.start


def file_pages() -> list[FilePages]:
    """All private file mappings of this process (empty where there is no ``/proc``)."""
    try:
        with open("/proc/self/maps") as maps:
            return list(_parsed(maps))
    except OSError:
        return []


def _parsed(lines: Iterator[str]) -> Iterator[FilePages]:
    for line in lines:
        bounds, flags, offset, device, inode, *_ = line.split(maxsplit=5)
        if flags[3] == "p" and inode != "0":
            start, end = (int(part, 16) for part in bounds.split("-"))
            major, minor = (int(part, 16) for part in device.split(":"))
            yield FilePages(start, end, int(offset, 16), os.makedev(major, minor), int(inode))
