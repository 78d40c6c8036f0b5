"""Opening a device: which one is meant, its guard where there is one, and what is said where there is none.

Takes no lock; the manager opens one device at a time. Refuses to know models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from vram_magic.devices.accelerator import AcceleratorDevice
from vram_magic.devices.cpu import CpuDevice
from vram_magic.errors import VRAMError
from vram_magic.guard.build import GuardUnavailable
from vram_magic.guard.native import NativeGuard, load_accelerator_guard, load_guard

if TYPE_CHECKING:
    from vram_magic.devices.base import Device
    from vram_magic.vram_manager import VRAMManager

__all__ = ["check_free", "open_device", "which_device"]


def which_device(name: str | None) -> torch.device:
    """The device of that name, with its index; None is the accelerator, or the CPU where there is none.

    Raises `VRAMError` for one that is not there, or that tells no memory figures.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name is None:
        device = accelerator if accelerator is not None and _tells_memory(accelerator) else torch.device("cpu")
    else:
        device = _parsed(name)
    if device.type == "cpu":
        return torch.device("cpu")
    if accelerator is None or device.type != accelerator.type:
        raise _absent(str(name), _why_absent(device.type))
    if not _tells_memory(device):
        raise _absent(str(name), f"Its part of torch, torch.{device.type}, tells no memory figures")
    count = torch.accelerator.device_count()
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    if index >= count:
        raise _absent(str(name), f"Their numbers end at {count - 1}")
    return torch.device(device.type, index)


def check_free(name: str, opened: Mapping[str, VRAMManager]) -> None:
    """Raises `VRAMError` when the device has an open manager."""
    if name in opened:
        raise VRAMError(
            f"The device {name!r} has a manager already.\n{len(opened[name].models)} models are managed there.\n"
            "Two managers would not know of each other's models.\nUse vram_magic.manager(), or close it: mgr.close()"
        )


def open_device(device: torch.device, budget: int | str) -> tuple[Device, NativeGuard | None]:
    """The device under a budget (bytes, text, or ``"auto"``), and its native guard, not yet installed."""
    guard, reason = None, ""
    try:
        guard = load_guard() if device.type == "cpu" else load_accelerator_guard(device)
    except GuardUnavailable as error:
        reason = str(error)
    if device.type == "cpu":
        if guard is not None:
            guard.reset_peak()  # there is one guard in a process; an earlier manager's peak is not ours
        return CpuDevice(budget, meter=guard, without_guard=reason), guard
    return AcceleratorDevice(device, budget, meter=guard, without_guard=reason), guard


def _parsed(name: str) -> torch.device:
    try:
        return torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise _absent(name, "That is no name of a device; there are 'cpu', 'cuda', 'cuda:1'") from error


def _tells_memory(device: torch.device) -> bool:
    return hasattr(torch.get_device_module(device), "mem_get_info")


def _why_absent(kind: str) -> str:
    if kind == "cuda" and torch.version.cuda is None and torch.version.hip is None:
        return f"This build of torch ({torch.__version__}) is for the CPU only: https://pytorch.org/get-started"
    return "torch finds none: is the driver installed, and is the device visible here?"


def _absent(name: str, cause: str) -> VRAMError:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    there = f"cpu and {torch.accelerator.device_count()} of {accelerator.type}" if accelerator else "cpu"
    return VRAMError(
        f"The device {name!r} cannot be used.\nThere are: {there}.\n{cause}.\nUse the CPU: VRAMManager(device='cpu')"
    )
