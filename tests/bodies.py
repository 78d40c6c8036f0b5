"""Bodies without a manager, for tests of what happens below its decisions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from place import DEVICE

from vram_magic.devices.accelerator import AcceleratorDevice
from vram_magic.devices.cpu import CpuDevice
from vram_magic.residency.body import Body
from vram_magic.residency.checkpoint import TensorRange
from vram_magic.residency.spill import SpillStore

__all__ = ["body_of", "load"]


def body_of(
    model: torch.nn.Module,
    tmp_path: Path,
    *,
    origins: Mapping[str, TensorRange] | None = None,
    shared: dict[Any, Any] | None = None,
) -> Body:
    """One block of up to 1 MiB after the other, on the device that the tests run on."""
    device = CpuDevice("1GiB") if DEVICE == "cpu" else AcceleratorDevice(torch.device(DEVICE, 0), "1GiB")
    return Body([("", model)], device, SpillStore(tmp_path / "spill"), 1 << 20, origins, shared)


def load(body: Body) -> None:
    """Brings all of it to the device."""
    room = body._device.meter.reserve(body.missing_bytes())
    body.load(room)
    room.release()
