"""Copies between an accelerator and the processor, through two small pinned buffers for each thread that copies.

One buffer is on its way while the other is read or filled, so a copy runs at the speed of the slower side and pins no
more than ``2 * PIECE_BYTES`` of RAM. Pinned memory is several times as fast to copy from as pageable memory, but slow
to get and bad for everybody else in quantity. Sizes are bytes. Takes no lock. Refuses to know what is copied.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Iterator

import torch

from vram_magic.devices.base import PIECE_BYTES
from vram_magic.devices.host import memory_at

__all__ = ["Staging"]


class _Buffer:
    """One pinned piece, and the event after which it may be touched again."""

    def __init__(self, device: torch.device) -> None:
        self.memory = _pinned(PIECE_BYTES)
        self.event = torch.Event(device=device)

    def view(self, size_bytes: int) -> memoryview:
        return memory_at(self.memory.data_ptr(), size_bytes)


class Staging:
    """The buffers of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Not a `threading.local`: a forked child drops those of threads that it has not, and freeing pinned memory
        # there ends it.
        self._of_thread: dict[int, tuple[_Buffer, _Buffer]] = {}
        _all.add(self)

    def read(self, memory: torch.Tensor) -> Iterator[memoryview]:
        """The bytes of device memory in pieces; each is valid until the next is asked for."""
        buffers, stream = self._buffers(), torch.accelerator.current_stream(self._device)
        pieces = torch.split(memory, PIECE_BYTES)

        def start(index: int) -> None:
            buffer = buffers[index % 2]
            buffer.memory[: pieces[index].numel()].copy_(pieces[index], non_blocking=True)
            buffer.event.record(stream)

        for index in range(len(pieces)):
            if index == 0:
                start(0)
            buffers[index % 2].event.synchronize()
            if index + 1 < len(pieces):
                start(index + 1)  # into the buffer whose piece the caller has let go of
            yield buffers[index % 2].view(pieces[index].numel())

    def write(self, memory: torch.Tensor, fill: Callable[[memoryview, int], object]) -> None:
        """Device memory piece by piece from ``fill(piece, start)``; on return it has arrived, for every stream."""
        buffers, stream = self._buffers(), torch.accelerator.current_stream(self._device)
        for index, piece in enumerate(torch.split(memory, PIECE_BYTES)):
            buffer = buffers[index % 2]
            buffer.event.synchronize()  # an event that was never recorded does not wait
            fill(buffer.view(piece.numel()), index * PIECE_BYTES)
            piece.copy_(buffer.memory[: piece.numel()], non_blocking=True)
            buffer.event.record(stream)
        for buffer in buffers:
            buffer.event.synchronize()

    def _buffers(self) -> tuple[_Buffer, _Buffer]:
        thread = threading.get_ident()
        if thread not in self._of_thread:
            self._of_thread[thread] = (_Buffer(self._device), _Buffer(self._device))
        return self._of_thread[thread]


_all: weakref.WeakSet[Staging] = weakref.WeakSet()


def _keep_for_ever() -> None:
    """In a forked child: even its end must not free what only the parent's driver can."""
    for staging in list(_all):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(staging))


os.register_at_fork(after_in_child=_keep_for_ever)


def _pinned(size_bytes: int) -> torch.Tensor:
    try:
        return torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError:  # no more may be locked (ulimit -l): copies are slower then, not wrong
        return torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
