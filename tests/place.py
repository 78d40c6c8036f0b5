"""Where the tests run: on the CPU, or with ``VRAM_MAGIC_TEST_DEVICE=cuda`` on the simulated GPU.

Import this before anything that imports torch, in scripts that a test starts, too: they find it, since conftest.py puts
this folder on ``PYTHONPATH``, and they run where the test does.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import simulated

__all__ = ["DEVICE", "GRAIN_BYTES", "footprint", "loaded", "same_values", "until"]

DEVICE = os.environ.get("VRAM_MAGIC_TEST_DEVICE", "cpu")
"""``"cpu"`` or ``"cuda"``."""

if DEVICE == "cuda":
    simulated.load()

import torch  # noqa: E402  not before the simulation is in the process

import vram_magic as vm  # noqa: E402

GRAIN_BYTES = 512 if DEVICE == "cuda" else 1
"""The device's allocator rounds each allocation up to this."""


def footprint(*size_bytes: int) -> int:
    """What allocations of these sizes take there together."""
    return sum(-(-size // GRAIN_BYTES) * GRAIN_BYTES for size in size_bytes)


def same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit, wherever each of them lies: an evicted weight of an accelerator lies on the CPU."""
    return one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())


def loaded(handle: vm.Handle, others_may_run: threading.Event) -> None:
    """Loads it. Threads that use its weights all the time may leave no moment for it: then they pause."""
    try:
        handle.load()
    except vm.ModelInUseError:  # right too: it was told
        assert DEVICE != "cpu"
        others_may_run.clear()
        handle.load()
        others_may_run.set()


def until(condition: Callable[[], bool]) -> bool:
    """Waits for it, about a minute. In tries: a clock goes on while a machine is suspended, and the others do not."""
    for _ in range(3000):
        if condition():
            return True
        time.sleep(0.02)
    return condition()
