"""The CPU as a device: RAM under a budget.

``auto`` is the available RAM (with the container's limit) plus what is live already, less a reserve for everything
that is not torch. Bytes are counted by the native guard where there is one; else by a ledger that is told of moves,
and then allocations of cells go unseen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from vram_magic.devices.base import AUTO
from vram_magic.devices.host import available_ram_bytes, ram_reserve_bytes, read_ram, write_ram
from vram_magic.devices.meter import LedgerMeter, Meter, Reservation
from vram_magic.sizes import parse_size

__all__ = ["CpuDevice"]


class CpuDevice:
    """RAM that this kernel's tensors may use."""

    name = "cpu"
    torch_device = torch.device("cpu")
    holds_tensors = True
    is_host = shares_ram = True

    def __init__(self, budget: int | str = AUTO, *, meter: Meter | None = None, without_guard: str = "") -> None:
        self.meter: Meter = meter or LedgerMeter(0)
        self._without_guard = without_guard
        self.budget_setting: int | str = budget
        self.set_budget(budget)

    def start(self) -> None:
        """There is nothing to watch."""

    stop = start

    @property
    def budget_bytes(self) -> int:
        return self.meter.limit_bytes

    def budget_for(self, setting: int | str) -> int:
        if setting != AUTO:
            return parse_size(setting, what="budget")
        return max(available_ram_bytes() + self.meter.live_bytes - ram_reserve_bytes(), 0)

    def set_budget(self, setting: int | str) -> None:
        self.meter.limit_bytes = self.budget_for(setting)
        self.budget_setting = setting if setting == AUTO else self.meter.limit_bytes

    def refresh(self, *, flushed: bool = False) -> None:  # noqa: ARG002  malloc keeps nothing that matters
        if self.budget_setting == AUTO:
            self.meter.limit_bytes = self.budget_for(AUTO)

    @property
    def guard(self) -> str:
        return "native" if self.meter.counts_allocations else f"none: {self._without_guard}"

    def describe(self) -> str:
        return "CPU memory"

    def outside(self, *, processes: bool = False) -> None:
        """No driver tells; `psutil` does, and what it says is in the budget."""

    def capturing(self) -> bool:
        return False

    def owns(self, storage: torch.UntypedStorage) -> bool:
        if storage.device.type != "cpu":
            return False
        if isinstance(self.meter, LedgerMeter):
            # A guess: mappings, numpy's and shared memory cannot grow; nor can what `numpy()` once looked at.
            return storage.resizable()
        return self.meter.owns(storage)

    def adopt(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.meter.adopt(storage._cdata, storage.nbytes())

    def footprint(self, size_bytes: int) -> int:
        return size_bytes

    def allocate(self, size_bytes: int, reservation: Reservation) -> torch.Tensor:
        with reservation.draw(own_move=True):
            memory = torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
        if not self.meter.counts_allocations:
            reservation.spend(size_bytes)
        return memory

    def freed(self, size_bytes: int) -> None:
        if not self.meter.counts_allocations:
            self.meter.give_back(size_bytes)

    def settle(self) -> None:
        """Operations of the CPU have ended when they return."""

    def read(self, memory: torch.Tensor) -> Iterator[memoryview]:
        return read_ram(memory)

    def write(self, memory: torch.Tensor, fill: Callable[[memoryview, int], object]) -> None:
        write_ram(memory, fill)
