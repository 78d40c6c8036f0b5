"""Devices without memory: a ledger of declared sizes, and a fake for tests.

`FakeDevice` is public: it answers like a shared card whose other users come and go, and needs no hardware.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from vram_magic.devices.base import AUTO, Outside
from vram_magic.devices.meter import LedgerMeter, Meter, Reservation
from vram_magic.sizes import parse_size

if TYPE_CHECKING:
    import torch

__all__ = ["FakeDevice", "LedgerDevice"]


class LedgerDevice:
    """Counts declared sizes against a fixed capacity in bytes."""

    name = "ledger"
    holds_tensors = False
    is_host = shares_ram = False
    guard = "none: sizes are declared"

    def __init__(self, capacity_bytes: int) -> None:
        self.meter: Meter = LedgerMeter(capacity_bytes)
        self.budget_setting: int | str = capacity_bytes

    def start(self) -> None:
        """There is nothing to watch."""

    stop = start

    @property
    def budget_bytes(self) -> int:
        return self.meter.limit_bytes

    def budget_for(self, setting: int | str) -> int:
        return parse_size(setting, what="budget")

    def set_budget(self, setting: int | str) -> None:
        self.meter.limit_bytes = self.budget_for(setting)
        self.budget_setting = setting if setting == AUTO else self.meter.limit_bytes

    def refresh(self, *, flushed: bool = False) -> None:
        """A ledger has no outside world."""

    def describe(self) -> str:
        return "declared sizes"

    def outside(self, *, processes: bool = False) -> Outside | None:  # noqa: ARG002  there are none
        return None

    def capturing(self) -> bool:
        return False

    def footprint(self, size_bytes: int) -> int:
        return size_bytes

    @property
    def torch_device(self) -> NoReturn:
        raise NotImplementedError("a ledger holds no tensors")

    def owns(self, storage: torch.UntypedStorage) -> NoReturn:
        raise NotImplementedError("a ledger holds no tensors")

    def adopt(self, tensor: torch.Tensor) -> NoReturn:
        raise NotImplementedError("a ledger holds no tensors")

    def allocate(self, size_bytes: int, reservation: Reservation) -> NoReturn:
        raise NotImplementedError("a ledger holds no tensors")

    def freed(self, size_bytes: int) -> NoReturn:
        raise NotImplementedError("a ledger holds no tensors")

    def settle(self) -> NoReturn:
        raise NotImplementedError("a ledger holds no tensors")

    def read(self, memory: torch.Tensor) -> NoReturn:
        raise NotImplementedError("a ledger holds no tensors")

    def write(self, memory: torch.Tensor, fill: object) -> NoReturn:
        raise NotImplementedError("a ledger holds no tensors")


class FakeDevice(LedgerDevice):
    """A ledger on a shared card: ``foreign_bytes`` of ``total_bytes`` belong to other processes."""

    name = "fake"

    def __init__(self, total_bytes: int, *, foreign_bytes: int = 0) -> None:
        self.total_bytes = total_bytes
        self.foreign_bytes = foreign_bytes
        super().__init__(total_bytes - foreign_bytes)

    def budget_for(self, setting: int | str) -> int:
        if setting == AUTO:
            return self.total_bytes - self.foreign_bytes
        return min(super().budget_for(setting), self.total_bytes - self.foreign_bytes)

    def refresh(self, *, flushed: bool = False) -> None:  # noqa: ARG002  nothing is cached
        self.meter.limit_bytes = self.budget_for(self.budget_setting)

    def outside(self, *, processes: bool = False) -> Outside:  # noqa: ARG002  they have no names
        free = self.total_bytes - self.foreign_bytes - self.meter.live_bytes
        return Outside(self.total_bytes, max(free, 0), self.foreign_bytes)

    def describe(self) -> str:
        return "a simulated device"
