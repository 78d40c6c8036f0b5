"""The options with which `vram_magic.manager` makes its manager: the notebook's settings, without needing torch.

Keys and values are those of `VRAMManager`. Takes no lock: the main thread writes, whole values at a time.
"""

from __future__ import annotations

from typing import Any

__all__ = ["options"]

options: dict[str, Any] = globals().get("options", {})  # survives a reload of this module
