"""What the manager asks of a device: a budget, counted bytes, and memory to put weights into.

All figures are bytes. A device takes no lock but its meter's leaf lock. It refuses to know models, tiers and plans.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from vram_magic.devices.meter import Meter, Reservation

if TYPE_CHECKING:
    import torch

__all__ = ["AUTO", "Device"]

AUTO = "auto"


class Device(Protocol):
    """Memory with a budget."""

    name: str
    meter: Meter
    holds_tensors: bool
    """False for a ledger: only declared sizes can be registered there."""
    budget_setting: int | str
    """Bytes, or ``"auto"``."""

    @property
    def budget_bytes(self) -> int:
        """What this kernel may use; for ``auto``, as of the last `refresh`."""

    def set_budget(self, setting: int | str) -> None: ...
    def budget_for(self, setting: int | str) -> int:
        """The bytes that a setting would mean now."""

    def refresh(self) -> None:
        """Reads the outside world again where the budget is ``auto``."""

    @property
    def guard(self) -> str:
        """How allocations are noticed, for the report."""

    def describe(self) -> str:
        """The device in a few words, for the report."""

    def owns(self, storage: torch.UntypedStorage) -> bool:
        """Whether the memory is this device's allocator's own, so that freeing it gives room."""

    def adopt(self, tensor: torch.Tensor) -> None:
        """Counts a resident tensor's storage from now on, if it was not."""

    def allocate(self, size_bytes: int, reservation: Reservation) -> torch.Tensor:
        """Uninitialised bytes (uint8, shape ``(size_bytes,)``) paid for by the reservation."""

    def freed(self, size_bytes: int) -> None:
        """Told after a storage of this size left the device."""
