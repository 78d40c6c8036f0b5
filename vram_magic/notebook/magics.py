"""The two magics, ``%load_model`` and ``%vram``, and what comes into a shell with them.

A `VRAMMagics` owns everything that the extension adds to one shell: magics, cell events, completion, the short form of
out-of-memory errors. It holds no model and no manager: those are looked up at each use. Takes no lock.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from IPython.core.magic import Magics, line_magic, magics_class, no_var_expand

import vram_magic
from vram_magic.defaults import options
from vram_magic.errors import SourceError, VRAMError
from vram_magic.notebook import commands, load_line
from vram_magic.notebook.arguments import Arguments
from vram_magic.notebook.completer import make_matcher
from vram_magic.notebook.current import open_managers
from vram_magic.notebook.debris import Debris
from vram_magic.notebook.events import CellWatch
from vram_magic.notebook.failures import ShortFailures
from vram_magic.notebook.progress import progress
from vram_magic.notebook.settings import Settings
from vram_magic.notebook.source import evaluated, read_source, read_word, with_variables

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from vram_magic.handle import Handle
    from vram_magic.notebook.story import Stories
    from vram_magic.vram_manager import VRAMManager

__all__ = ["VRAMMagics"]


@magics_class
class VRAMMagics(Settings, Magics):
    """What the extension adds to one shell."""

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self._shell = shell
        self._failures = ShortFailures(shell)
        debris = Debris(shell, lambda: bool(self.keep_failed_frames))
        self._watch = CellWatch(shell, self._failures, debris, lambda: bool(self.tell_departures))
        self._matcher = make_matcher()

    @property
    def stories(self) -> Stories:
        """What happened in each cell."""
        return self._watch.stories

    def attach(self) -> None:
        """Begins to watch cells and to complete."""
        self.hand_on()
        self._watch.attach()
        if (completer := getattr(self._shell, "Completer", None)) is not None:
            completer.custom_matchers.append(self._matcher)

    def detach(self) -> None:
        """Undoes `attach`."""
        self.withdraw()
        self._watch.detach()
        self._failures.remove()
        completer = getattr(self._shell, "Completer", None)
        if completer is not None and self._matcher in completer.custom_matchers:
            completer.custom_matchers.remove(self._matcher)

    @line_magic
    def vram(self, line: str) -> None:
        """The report, and all commands about models; ``%vram help`` lists them."""
        commands.run(line)
        self.take_budget()
        self._failures.install()

    @no_var_expand  # a SOURCE may hold braces and dollars of its own
    @line_magic
    def load_model(self, line: str) -> Handle | None:
        """Loads a model, manages it and binds it: ``%load_model NAME SOURCE``; ``--help`` tells the options."""
        __tracebackhide__ = True  # IPython then shows the user's own frames, where the expression or builder failed
        arguments = Arguments(line, load_line.USAGE, functools.partial(read_word, self._shell))
        if arguments.flag("--help", "-h"):
            print(f"usage: {load_line.USAGE}\n{load_line.HELP}")  # noqa: T201  asked for
            return None
        asked = load_line.LoadLine.read(arguments)
        if asked.dtype is not None:
            _check_dtype(arguments, asked.dtype)
        manager = _manager_on(asked.device)
        self._failures.install()
        tier = arguments.tier(asked.tier or _default_tier(asked.name, manager), manager.tiers)
        return self._load(manager, asked, tier)

    def _load(self, manager: VRAMManager, asked: load_line.LoadLine, tier: str | int) -> Handle:
        __tracebackhide__ = True
        into = None if asked.into is None else evaluated(self._shell, asked.into)
        source = read_source(self._shell, asked.source)
        try:
            with progress(manager, [asked.name]):
                handle = manager.load(
                    asked.name,
                    source,
                    tier,
                    asked.priority,
                    asked.residency,
                    asked.pin,
                    lazy=asked.lazy,
                    dtype=asked.dtype,
                    into=into,
                )
        except SourceError as error:
            raise with_variables(self._shell, asked.source, error) from error.__cause__
        # The handle of `load` keeps what it built; the notebook's variable shall be the only one to do so.
        self._shell.push({asked.name: handle.model})  # type: ignore[no-untyped-call]
        return manager[asked.name]


def _default_tier(name: str, manager: VRAMManager) -> str:
    return name if name in manager.tiers else "llm"


def _check_dtype(arguments: Arguments, dtype: str) -> None:
    """Raises `UsageError` for what is no dtype of weights."""
    from vram_magic.models.sources import resolve  # here: it needs torch

    try:
        resolve(dict, dtype=dtype)  # a builder like any other: only the dtype can be wrong, and nothing is built
    except SourceError:
        raise arguments.wrong(f"{dtype} is no floating-point dtype of torch, such as bfloat16") from None


def _manager_on(device: str | None) -> VRAMManager:
    """The manager, on that device if one is named. Raises `VRAMError` when it is on another one."""
    if device is None:
        return vram_magic.manager()
    from vram_magic.opening import which_device  # here: it needs torch

    device, managers = str(which_device(device)), open_managers()
    if device in managers or not managers:
        return managers.get(device) or vram_magic.VRAMManager(device=device, **options)
    manager = next(iter(managers.values()))
    raise VRAMError(
        f"The model cannot be loaded on {device!r}.\n"
        f"{len(manager.models)} models are managed on {manager.device!r}.\n"
        "One notebook manages one device, chosen when its first model is loaded.\n"
        f"Leave --device out, or begin anew: %reload_ext vram_magic, then %load_model NAME SOURCE --device {device}"
    )
