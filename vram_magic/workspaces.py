"""Working memory that idle models give back without leaving: caches and buffers, by a callable that each brought along.

How much it is shows only afterwards, in the device's count. Sizes are bytes. The callables are the user's: no lock is
held while they run, and their trouble is noted, not passed on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from vram_magic.devices.meter import Meter
from vram_magic.journal import StepTaken
from vram_magic.models.managed import ManagedModel

__all__ = ["given_back"]


def given_back(idle: Iterable[ManagedModel], meter: Meter) -> Iterator[StepTaken]:
    """Asks one model after the other, lowest rank and longest idle first; yields what gave something, or failed."""
    for model in sorted(idle, key=lambda m: (m.rank, m.last_used, m.name)):
        before, start = meter.live_bytes, time.perf_counter()
        problem = _quietly(model.workspace)
        freed = max(before - meter.live_bytes, 0)
        if freed or problem:
            ms = (time.perf_counter() - start) * 1e3
            reason = problem or "memory that an idle model can give back"
            yield StepTaken(model.name, 0, freed, "workspace", reason, ms)


def _quietly(workspace: Callable[[], object] | None) -> str:
    """Runs a user's callable; returns its trouble in words."""
    try:
        if workspace is not None:
            workspace()
    except Exception as error:  # noqa: BLE001
        return f"its workspace raised {type(error).__name__}: {error}"
    return ""
