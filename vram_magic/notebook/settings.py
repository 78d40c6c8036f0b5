"""What ``%config VRAMMagics`` sets: each setting with its unit, and when it takes effect.

Mixed into the magics of one shell, since that is where IPython looks for settings. The budget is set at once; what a
manager takes only when it is made is refused, with the way out, while there is one. Sizes are text with a unit, or
"auto". What is set stands in `vram_magic.defaults` for whoever makes the manager. Takes no lock.
"""

from __future__ import annotations

from typing import Any

from traitlets import Bool, TraitError, Unicode, observe, validate
from traitlets.config import Configurable

from vram_magic import defaults
from vram_magic.errors import VRAMError
from vram_magic.notebook.current import open_manager
from vram_magic.notebook.plain import set_plain
from vram_magic.sizes import format_size, parse_size

__all__ = ["Settings"]

_AUTO = "auto"
_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
_MADE_WITH = ("host_budget", "block_bytes", "spill_dir")
_EARLY = "Set it before the first model is loaded."


class Settings(Configurable):
    """The settings of one shell."""

    budget = Unicode(
        _AUTO,
        help="How much of the device this notebook may use: a size such as '12GiB', or 'auto' for what is free there "
        "less a reserve. Takes effect at once.",
    ).tag(config=True)
    host_budget = Unicode(
        _AUTO,
        help="How much RAM copies of a GPU's weights may take: a size such as '16GiB', or 'auto'. What is more goes to "
        f"disk. {_EARLY}",
    ).tag(config=True)
    block_bytes = Unicode(
        "64MiB", help=f"Weights leave and return in blocks up to this size, such as '64MiB'. {_EARLY}"
    ).tag(config=True)
    spill_dir = Unicode(
        "",
        help="The folder for weights that no file holds; empty for that of VRAM_MAGIC_SPILL_DIR, else /var/tmp. "
        f"{_EARLY}",
    ).tag(config=True)
    tell_departures = Bool(
        default_value=True, help="Print one line under a cell that made a model leave. %vram log tells it in any case."
    ).tag(config=True)
    keep_failed_frames = Bool(
        default_value=False,
        help="Keep the memory that a cell which ran out of memory still holds, so that %debug works for as long as no "
        "other cell fails. Else it is released when the next cell begins, unless that one is %debug or %tb.",
    ).tag(config=True)

    plain = Bool(
        default_value=False,
        help="Leave out times and progress bars, so that the same cells print the same text: for notebooks whose saved "
        "outputs are compared.",
    ).tag(config=True)

    def options(self) -> dict[str, Any]:
        """The settings as `VRAMManager` takes them."""
        return {name: getattr(self, name) or None for name in ("budget", *_MADE_WITH)}

    def hand_on(self) -> None:
        """From now on a manager is made with these settings."""
        defaults.options.update(self.options())
        set_plain(on=bool(self.plain))

    def withdraw(self) -> None:
        """From now on a manager is made as if there were none."""
        defaults.options.clear()
        set_plain(on=False)

    def take_budget(self) -> None:
        """After ``%vram budget``: tells the same."""
        manager = open_manager()
        if manager is not None and manager.budget_setting != _meant(self.budget):
            self.set_trait("budget", _exactly(manager.budget_setting))

    @validate("budget")
    def _take_effect(self, proposal: Any) -> Any:
        value, manager = self._size(proposal), open_manager()
        if manager is not None and defaults.options and _meant(value) != manager.budget_setting:
            try:
                manager.set_budget(value)
            except VRAMError as error:  # traitlets takes a value back for an error of its own only
                raise TraitError(str(error)) from error
        return value

    @validate(*_MADE_WITH)
    def _refuse_when_late(self, proposal: Any) -> Any:
        value = proposal.value if proposal.trait.name == "spill_dir" else self._size(proposal)
        manager = open_manager()
        if manager is not None and defaults.options:
            raise TraitError(
                f"{proposal.trait.name} cannot be set any more.\n"
                f"{len(manager.models)} models are managed, with a budget of {format_size(manager.budget_bytes)}.\n"
                "A manager takes it when it is made, which happens when the first model is loaded.\n"
                f"Begin anew: %unload_ext vram_magic, then %load_ext vram_magic, then %config VRAMMagics."
                f"{proposal.trait.name} = {value!r}"
            )
        return value

    @observe("budget", "plain", *_MADE_WITH)
    def _hand_on_again(self, _change: Any) -> None:
        if defaults.options:
            self.hand_on()

    @staticmethod
    def _size(proposal: Any) -> str:
        value, name = str(proposal.value), str(proposal.trait.name)
        if value == _AUTO and name != "block_bytes":
            return value
        try:
            parse_size(value, what=name)
        except ValueError as error:
            raise TraitError(str(error)) from None
        return value


def _meant(text: str) -> int | str:
    """The bytes that a setting stands for, or "auto"."""
    return _AUTO if text == _AUTO else parse_size(text)


def _exactly(setting: int | str) -> str:
    """The setting as a user writes it, in the largest unit that rounds nothing."""
    if isinstance(setting, int) and setting:
        for unit, size in _UNITS.items():
            if setting % size == 0:
                return f"{setting // size}{unit}"
    return str(setting)
