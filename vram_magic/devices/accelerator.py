"""An accelerator as a device: the memory of one GPU under a budget.

Two ledgers bound what this kernel may hold, and the lower counts: the budget that the user gave, and what the device
can still give, which shrinks when other processes take memory. ``auto`` is the second less a reserve. What torch has
allocated is counted by its own allocator; the driver tells the rest. All figures are bytes.

Everything goes through ``torch.accelerator`` and the device's allocator where they suffice, so makers other than NVIDIA
are served as far as torch carries them. Takes no lock but the meter's. Refuses to know models and plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from vram_magic.devices.base import AUTO, Outside
from vram_magic.devices.capture import CaptureWatch
from vram_magic.devices.host import available_ram_bytes, ram_reserve_bytes
from vram_magic.devices.meter import MeasuredMeter, Meter, Reservation
from vram_magic.devices.nvml import processes_on
from vram_magic.devices.staging import Staging
from vram_magic.sizes import format_size, parse_size

__all__ = ["AcceleratorDevice"]

# Left free under ``auto``: contexts, libraries' workspaces that bypass torch, a desktop that opens a window.
_RESERVE_FRACTION, _RESERVE_FLOOR = 0.03, 256 << 20

_GRAIN_BYTES = 512  # c10's caching allocators round each allocation up to this


class AcceleratorDevice:
    """The memory of one accelerator that this kernel's tensors may use.

    Args:
        device: which, with its index
        budget: bytes or ``"auto"``
        meter: the native guard; None where there is none, and then allocations are noticed at managed calls only
        without_guard: why there is none
    """

    holds_tensors = True
    is_host = False

    def __init__(
        self, device: torch.device, budget: int | str = AUTO, *, meter: Meter | None = None, without_guard: str = ""
    ) -> None:
        self.torch_device = device
        self.name = str(device)
        self.meter: Meter = meter or MeasuredMeter(lambda: torch.accelerator.memory_allocated(device))
        self._without_guard = without_guard
        self._staging = Staging(device)
        self._captures = CaptureWatch()
        self._properties = _properties(device)
        self.budget_setting: int | str = budget
        self._budget_bytes = 0
        self.set_budget(budget)

    def start(self) -> None:
        """Begins to watch for graphs that are being captured."""
        if self.torch_device.type == "cuda":
            self._captures.install()

    def stop(self) -> None:
        self._captures.remove()

    # ------------------------------------------------------------------------------------------------- budget

    @property
    def budget_bytes(self) -> int:
        return self._budget_bytes

    def budget_for(self, setting: int | str) -> int:
        if setting != AUTO:
            return parse_size(setting, what="budget")
        total, _ = self._total_and_free()
        reserve = max(int(total * _RESERVE_FRACTION), _RESERVE_FLOOR)
        if self.shares_ram:
            reserve = max(reserve, ram_reserve_bytes())
        return max(self._obtainable_bytes() - reserve, 0)

    def set_budget(self, setting: int | str) -> None:
        self._budget_bytes = self.budget_for(setting)
        self.budget_setting = setting if setting == AUTO else self._budget_bytes
        self._limit(self._obtainable_bytes())

    def refresh(self, *, flushed: bool = False) -> None:
        if self.budget_setting == AUTO:
            self._budget_bytes = self.budget_for(AUTO)
        self._limit(self._obtainable_bytes(flushed=flushed))

    def _limit(self, obtainable_bytes: int) -> None:
        self.meter.limit_bytes = min(self._budget_bytes, obtainable_bytes)

    def _obtainable_bytes(self, *, flushed: bool = False) -> int:
        """What this kernel holds or could: in use, kept by the allocator for reuse, and free."""
        held = torch.accelerator.memory_allocated(self.torch_device)
        # What the allocator still keeps after it has given up what it could is scattered.
        cached = 0 if flushed else torch.accelerator.memory_reserved(self.torch_device) - held
        total, free = self._total_and_free()
        obtainable = self.meter.live_bytes + cached + free
        return min(obtainable, total) if self.shares_ram else obtainable  # there what is free is another's word

    def _total_and_free(self) -> tuple[int, int]:
        free, total = torch.get_device_module(self.torch_device).mem_get_info(self.torch_device)
        if self.shares_ram:  # free there counts neither the page cache nor a container's limit
            free = min(available_ram_bytes(), total)
        return total, free

    # ------------------------------------------------------------------------------------------------- telling

    @property
    def shares_ram(self) -> bool:
        """Unified memory: the device's memory is the processor's, so a copy in RAM gives no room."""
        return bool(getattr(self._properties, "is_integrated", False))

    @property
    def guard(self) -> str:
        way: str = getattr(self.meter, "way", "")
        if not way:
            return f"none: {self._without_guard}; room is made at managed calls and reserve only"
        return way if getattr(self.meter, "installed", True) else "lost: another allocator was installed after it"

    def describe(self) -> str:
        name = getattr(self._properties, "name", self.torch_device.type)
        total, _ = self._total_and_free()
        return f"{name}, {format_size(total)}{' shared with the processor' if self.shares_ram else ''}"

    def outside(self, *, processes: bool = False) -> Outside:
        total, free = self._total_and_free()
        foreign = max(total - free - torch.accelerator.memory_reserved(self.torch_device), 0)
        uuid = str(getattr(self._properties, "uuid", ""))
        return Outside(total, free, foreign, processes_on(uuid) if processes and uuid else ())

    def capturing(self) -> bool:
        return self.torch_device.type == "cuda" and self._captures.capturing

    # -------------------------------------------------------------------------------------------------- memory

    def owns(self, storage: torch.UntypedStorage) -> bool:
        if storage.device != self.torch_device:
            return False
        return self.meter.owns(storage)

    def adopt(self, tensor: torch.Tensor) -> None:
        """The allocator has counted it since it was made."""

    def footprint(self, size_bytes: int) -> int:
        return -(-size_bytes // _GRAIN_BYTES) * _GRAIN_BYTES

    def allocate(self, size_bytes: int, reservation: Reservation) -> torch.Tensor:
        with reservation.draw(own_move=True):
            return torch.empty(size_bytes, dtype=torch.uint8, device=self.torch_device)

    def freed(self, size_bytes: int) -> None:
        """The allocator counts it."""

    def settle(self) -> None:
        torch.accelerator.synchronize(self.torch_device)

    def read(self, memory: torch.Tensor) -> Iterator[memoryview]:
        return self._staging.read(memory)

    def write(self, memory: torch.Tensor, fill: Callable[[memoryview, int], object]) -> None:
        self._staging.write(memory, fill)


def _properties(device: torch.device) -> Any:
    module = torch.get_device_module(device)
    return module.get_device_properties(device) if hasattr(module, "get_device_properties") else None
