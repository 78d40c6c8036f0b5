"""What the manager asks of a device: a budget, counted bytes, memory for weights, and copies between it and the host.

All figures are bytes. A device takes no lock but its meter's leaf lock. It refuses to know models, tiers and plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from vram_magic.devices.meter import Meter, Reservation

if TYPE_CHECKING:
    import torch

__all__ = ["AUTO", "PIECE_BYTES", "Device", "Outside"]

AUTO = "auto"

PIECE_BYTES = 16 << 20
"""The size of one piece of a copy: hashed while it is still in the processor's cache, and two fit into pinned RAM."""


@dataclass(frozen=True, slots=True)
class Outside:
    """What the driver says of the whole device, beyond this kernel."""

    total_bytes: int
    free_bytes: int
    foreign_bytes: int
    """Held by other processes, and by the driver for itself."""
    processes: tuple[str, ...] = ()
    """The largest of them in words, where the driver tells; empty where it does not."""


class Device(Protocol):
    """Memory with a budget."""

    name: str
    meter: Meter
    holds_tensors: bool
    """False for a ledger: only declared sizes can be registered there."""
    is_host: bool
    """Whether the processor's own RAM is the device."""
    budget_setting: int | str
    """Bytes, or ``"auto"``."""

    @property
    def torch_device(self) -> torch.device:
        """Where tensors of this device lie."""

    @property
    def budget_bytes(self) -> int:
        """What this kernel may use; for ``auto``, as of the last `refresh`.

        The meter's limit is lower while others hold the device's memory.
        """

    @property
    def shares_ram(self) -> bool:
        """Whether the device's memory is the processor's: then a copy in RAM gives no room."""

    def start(self) -> None:
        """Begins to watch what else uses the device."""

    def stop(self) -> None:
        """Undoes `start`."""

    def set_budget(self, setting: int | str) -> None: ...
    def budget_for(self, setting: int | str) -> int:
        """The bytes that a setting would mean now."""

    def refresh(self, *, flushed: bool = False) -> None:
        """Reads the outside world again.

        ``flushed``: the allocator has just given up its cache and failed all the same: what it still keeps is no use.
        """

    @property
    def guard(self) -> str:
        """How allocations are noticed, for the report."""

    def describe(self) -> str:
        """The device in a few words, for the report."""

    def outside(self, *, processes: bool = False) -> Outside | None:
        """The driver's view, or None where there is no driver; with ``processes`` by name, which takes longer."""

    def capturing(self) -> bool:
        """Whether a graph of the device's operations is being recorded somewhere in this process.

        Then memory may neither be allocated nor freed by us.
        """

    def owns(self, storage: torch.UntypedStorage) -> bool:
        """Whether the memory is this device's allocator's own, so that freeing it gives room."""

    def adopt(self, tensor: torch.Tensor) -> None:
        """Counts a resident tensor's storage from now on, if it was not."""

    def footprint(self, size_bytes: int) -> int:
        """What an allocation of this size really takes."""

    def allocate(self, size_bytes: int, reservation: Reservation) -> torch.Tensor:
        """Uninitialised bytes (uint8, shape ``(size_bytes,)``) paid for by the reservation."""

    def freed(self, size_bytes: int) -> None:
        """Told after a storage of this size left the device."""

    def settle(self) -> None:
        """Waits until nothing that was started on the device is still running, in any stream."""

    def read(self, memory: torch.Tensor) -> Iterator[memoryview]:
        """The bytes of device memory (uint8, one-dimensional) in pieces; each is valid until the next is asked for."""

    def write(self, memory: torch.Tensor, fill: Callable[[memoryview, int], object]) -> None:
        """Writes device memory in pieces: ``fill(piece, start)`` is to write the bytes from ``start`` on into each.

        On return all of it has arrived, for every stream.
        """
