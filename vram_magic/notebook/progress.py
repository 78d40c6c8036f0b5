"""A progress bar for a load that takes long; a short one prints nothing.

A helper thread waits two seconds, then shows a bar and fills it by what the device says has arrived. It runs in the
caller's context, so that its output lands under the cell that loads. Sizes are bytes. Takes no lock; a bar that cannot
be shown is left out, since it must never harm the load.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vram_magic.notebook.current import managed_models
from vram_magic.notebook.plain import is_plain

if TYPE_CHECKING:
    from vram_magic.vram_manager import VRAMManager

__all__ = ["progress"]

_PATIENCE_S = 2.0
_PERIOD_S = 0.25
_FAREWELL_S = 1.0


@contextlib.contextmanager
def progress(manager: VRAMManager, names: list[str]) -> Iterator[None]:
    """A bar during the body, if it takes long; none in plain mode."""
    if is_plain():
        yield
        return
    done = threading.Event()
    run = contextvars.copy_context().run
    thread = threading.Thread(target=run, args=(_watch, manager, names, done), name="vram-magic-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(_FAREWELL_S)


def _watch(manager: VRAMManager, names: list[str], done: threading.Event) -> None:
    lowest = manager.used_bytes
    if done.wait(_PATIENCE_S):
        return
    with contextlib.suppress(Exception), contextlib.closing(_bar(names)) as bar:
        while not done.wait(_PERIOD_S):
            total = sum(model.total_bytes for model in managed_models(manager) if model.name in names)
            lowest = min(lowest, manager.used_bytes)  # others leave first, to make room
            if total and total != bar.total:
                bar.reset(total=total)  # known once the model is built
            bar.update(min(manager.used_bytes - lowest, total or manager.used_bytes) - bar.n)
        bar.update((bar.total or bar.n) - bar.n)  # or it would stay, in red


def _bar(names: list[str]) -> Any:
    from tqdm.auto import tqdm

    what = f"loading {', '.join(names)}"
    return tqdm(desc=what, unit="B", unit_scale=True, unit_divisor=1024, leave=False, disable=None)
