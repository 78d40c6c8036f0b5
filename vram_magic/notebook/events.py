"""What happens around a cell: one line under it when it made a model leave, and what a failed one left is swept away.

A `CellWatch` owns the two callbacks and the stories of the shell's cells. A callback never raises, since
IPython would print a block under every cell; it does nothing measurable while there is no manager; and neither relies
on the other having run, since IPython skips the first one for empty cells. It keeps no manager and no model. Takes no
lock. Refuses to know who decides, and why.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from vram_magic.notebook.current import open_manager
from vram_magic.notebook.report import shortened
from vram_magic.notebook.story import Stories
from vram_magic.sizes import format_size

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from vram_magic.journal import Record
    from vram_magic.notebook.debris import Debris
    from vram_magic.notebook.failures import ShortFailures

__all__ = ["CellWatch", "departures"]

_SHOWN = 5


def _never_raises(callback: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(callback)
    def quiet(*args: Any) -> None:
        try:
            callback(*args)
        except (Exception, KeyboardInterrupt):  # noqa: BLE001  a line less is better than an error in every cell
            return

    return quiet


class CellWatch:
    """The callbacks of one shell."""

    def __init__(
        self, shell: InteractiveShell, failures: ShortFailures, debris: Debris, tells: Callable[[], bool]
    ) -> None:
        """``tells``: whether the user wants to read who left."""
        self._shell = shell
        self._failures = failures
        self._debris = debris
        self._tells = tells
        self.stories = Stories()

    def attach(self) -> None:
        """Registers both callbacks."""
        self._shell.events.register("pre_run_cell", self.before)
        self._shell.events.register("post_run_cell", self.after)

    def detach(self) -> None:
        """Takes both out."""
        self._shell.events.unregister("pre_run_cell", self.before)
        self._shell.events.unregister("post_run_cell", self.after)

    @_never_raises
    def before(self, info: Any) -> None:
        """Sweeps up after a cell that ran out of memory, and begins the cell's story."""
        if (manager := open_manager()) is not None:
            if self._debris.waits and (line := self._debris.sweep(info.raw_cell, manager)):
                print(line)  # noqa: T201  unasked, as it may change what the cell can do
            self._failures.install()
            self.stories.begin(manager)

    @_never_raises
    def after(self, result: object) -> None:
        """Tells who left since."""
        if (manager := open_manager()) is None:
            return
        story = self.stories.end(manager, getattr(result, "execution_count", None))
        if self._tells() and (line := departures(story.records)):
            print(line)  # noqa: T201  nobody asks, and the model will need time to return
        self._debris.notice(result)


def departures(records: Iterable[Record]) -> str:
    """One line about the models that left to make room; empty when none did. What the user asked for is no news."""
    left: dict[str, list[int]] = {}
    askers: dict[str, None] = {}
    for record in records:
        gone: dict[str, int] = {}  # of one decision, whose steps take different blocks
        for step in record.left:
            if step.blocks and step.stage != "asked":
                gone[step.model] = gone.get(step.model, 0) + step.bytes
                askers[record.asked_by] = None
        for name, size in gone.items():
            left.setdefault(name, []).append(size)
    if not left:
        return ""
    # No sum over decisions: what left twice may be the same blocks.
    sizes = [(shortened(name), _some([format_size(size) for size in times])) for name, times in left.items()]
    who = f"{_some([f'{name} ({size})' for name, size in sizes])} left"
    if len(left) == 1:
        ((name, times),) = left.items()
        often = {1: "", 2: " twice"}.get(len(times), f" {len(times)} times")
        who = f"{shortened(name)} left{often} ({_some([format_size(size) for size in times])})"
    return f"vram_magic: {who} to make room for {_some([shortened(asker) for asker in askers])}"


def _some(words: list[str]) -> str:
    more = len(words) - _SHOWN
    return ", ".join(words[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
