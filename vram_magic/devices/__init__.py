"""Devices: capacity, bytes in use, raw copies between device and processor. They know nothing of models or policy."""

from vram_magic.devices.base import Device
from vram_magic.devices.ledger import FakeDevice, LedgerDevice

__all__ = ["Device", "FakeDevice", "LedgerDevice"]
