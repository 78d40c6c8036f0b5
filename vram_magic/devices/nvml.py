"""NVIDIA's management library: which processes hold a device's memory. Asked only when somebody wants to know.

It may be absent (other makers' devices), partly supported (WSL) or forbidden (MIG in a container). These are normal
states: nothing is told then. Devices are matched by UUID, since the numbers of torch and NVML differ under
``CUDA_VISIBLE_DEVICES``. Figures are bytes. Takes no lock.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import psutil

from vram_magic.sizes import format_size

__all__ = ["processes_on"]

_SHOWN = 3


def processes_on(uuid: str) -> tuple[str, ...]:
    """The other processes with most memory on the device of that UUID, in words; empty where NVML does not tell."""
    try:
        import pynvml
    except ImportError:
        return ()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        found = _others(pynvml, _handle(pynvml, uuid))
    except (pynvml.NVMLError, TypeError):
        return ()
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
    largest = sorted(found.items(), key=lambda item: -item[1])[:_SHOWN]
    return tuple(f"{_name(pid)} (pid {pid}){(size and f' {format_size(size)}') or ''}" for pid, size in largest)


def _handle(pynvml: Any, uuid: str) -> Any:
    known = uuid.startswith(("GPU-", "MIG-"))
    return pynvml.nvmlDeviceGetHandleByUUID(uuid if known else f"GPU-{uuid}")


def _others(pynvml: Any, handle: Any) -> dict[int, int]:
    """Bytes by process; 0 where the driver does not say (Windows, WSL). Not our own, where its number is ours too."""
    found: dict[int, int] = {}
    for ask in (pynvml.nvmlDeviceGetComputeRunningProcesses, pynvml.nvmlDeviceGetGraphicsRunningProcesses):
        try:
            for process in ask(handle):
                if process.pid != os.getpid():
                    found[process.pid] = max(found.get(process.pid, 0), process.usedGpuMemory or 0)
        except pynvml.NVMLError:
            continue
    return found


def _name(pid: int) -> str:
    try:
        return str(psutil.Process(pid).name())
    except psutil.Error:  # of another container, or gone
        return "a process"
