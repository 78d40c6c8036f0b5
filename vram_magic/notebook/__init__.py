"""The notebook's door: what ``%load_ext vram_magic`` puts into a shell, and how it is taken out again.

All that was put in hangs on one `VRAMMagics`, kept in the shell's own registry of magics and nowhere in our modules: so
a reload of them, or loading twice, finds what is there and leaves one of everything. Importing this package imports
neither torch nor widgets, and makes no manager. Takes no lock; refuses to know models and bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vram_magic.notebook.current import close_managers
from vram_magic.notebook.magics import VRAMMagics
from vram_magic.notebook.panel import close_panel

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["load", "unload"]


def load(shell: InteractiveShell) -> None:
    """Adds magics, cell events and completion. A second time replaces them."""
    _take_out(shell)
    magics = VRAMMagics(shell)
    shell.register_magics(magics)
    magics.attach()


def unload(shell: InteractiveShell) -> None:
    """Takes all of it out, closes the panel and the manager; the models stay in the notebook, whole and usable."""
    _take_out(shell)
    close_panel()
    close_managers()


def _take_out(shell: InteractiveShell) -> None:
    # Found by name, not by class: after a reload of our modules the old one's class is another.
    magics = shell.magics_manager.registry.pop(VRAMMagics.__name__, None)
    if magics is None:
        return
    magics.detach()
    for kind, mine in magics.magics.items():
        table = shell.magics_manager.magics[kind]
        for name in [name for name, magic in mine.items() if table.get(name) == magic]:
            del table[name]
    if magics in shell.configurables:  # or %config would list it once more after each load
        shell.configurables.remove(magics)
