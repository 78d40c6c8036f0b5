"""The sub-commands of ``%vram``: each takes its arguments, does one thing, and prints at most what is useful.

Wrong arguments are a `UsageError` before anything happens; every name is looked up before the first model is touched.
Sizes are bytes, shown as text. Takes no lock; refuses to know how anything is done: it asks the manager.
"""
# ruff: noqa: T201  a command's output is printed

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from IPython.core.error import UsageError
from IPython.core.getipython import get_ipython
from IPython.display import display

import vram_magic
from vram_magic.errors import ModelInUseError, VRAMError, closest
from vram_magic.notebook.arguments import Arguments
from vram_magic.notebook.kept import restore, save
from vram_magic.notebook.panel import close_panel, open_panel
from vram_magic.notebook.plain import without_times
from vram_magic.notebook.progress import progress
from vram_magic.notebook.report import Report
from vram_magic.notebook.story import log_lines, stories_of
from vram_magic.policy import RESIDENCIES
from vram_magic.sizes import format_size, parse_size

if TYPE_CHECKING:
    from vram_magic.handle import Handle
    from vram_magic.vram_manager import VRAMManager

__all__ = ["COMMANDS", "run"]

_LOGGED = 10  # cells and decisions
_FEW = 2**20  # bytes; a bare number below it was hardly meant as bytes


class Command:
    """One sub-command: how it is used, what it does, and the function that does it."""

    def __init__(self, usage: str, about: str, action: Callable[[Arguments], None]) -> None:
        self.usage = f"%vram {usage}".strip()
        self.about = about
        self.action = action

    def run(self, line: str) -> None:
        arguments = Arguments(line, self.usage)
        if arguments.flag("--help", "-h"):
            print(f"usage: {self.usage}\n{self.about}")
        else:
            self.action(arguments)


def run(line: str) -> None:
    """One line after ``%vram``."""
    word, _, rest = line.strip().rstrip(";").partition(" ")
    word = {"--help": "help", "-h": "help"}.get(word, word)
    if word not in COMMANDS:
        meant = closest(word, filter(None, COMMANDS))
        guess = f"did you mean %vram {meant}? " if meant else ""
        raise UsageError(f"there is no %vram {word}; {guess}%vram help lists what there is")
    COMMANDS[word].run(rest)


# ------------------------------------------------------------------------------------------------------- the commands


def _report(arguments: Arguments) -> None:
    arguments.exactly()
    display(Report.of(vram_magic.manager(), fresh=True))  # type: ignore[no-untyped-call]


def _help(arguments: Arguments) -> None:
    arguments.exactly()
    width = max(len(command.usage) for command in COMMANDS.values())
    print("%load_model NAME SOURCE [OPTIONS]   load a model and bind it to NAME; --help tells the options\n")
    for command in COMMANDS.values():
        print(f"{command.usage:{width}}   {command.about}")


def _budget(arguments: Arguments) -> None:
    words = arguments.names("SIZE")
    setting = "auto" if words == ["auto"] else arguments.size()
    manager = vram_magic.manager()
    try:
        freed = manager.set_budget(setting)
    except VRAMError as error:
        if setting.isdecimal() and int(setting) < _FEW:
            first, rest = str(error).split("\n", 1)
            error.args = (f"{first} {setting} means {setting} bytes.\n{rest}",)
        raise
    print(f"budget {format_size(manager.budget_bytes)}" + (f", freed {format_size(freed)}" if freed else ""))


def _load(arguments: Arguments) -> None:
    manager, handles = _named(arguments)
    with progress(manager, [handle.name for handle in handles]):
        for handle in handles:
            handle.load()
    for handle in handles:
        print(f"{handle.name}: {format_size(handle.device_bytes)} on the device")


def _evict(arguments: Arguments) -> None:
    if spares := arguments.flag("--all"):
        arguments.exactly()
        handles = list(vram_magic.manager().models.values())
    else:
        _, handles = _named(arguments)
    outcomes = [_evicted(handle, spares=spares) for handle in handles]
    print(f"freed {format_size(sum(freed for freed, _ in outcomes))}")
    for _, line in outcomes:
        if line:
            print(line)


def _evicted(handle: Handle, *, spares: bool) -> tuple[int, str]:
    """The bytes freed, and what to tell of the model. ``spares``: one that is in use or pinned is no error."""
    was_out = handle.total_bytes > 0 == handle.device_bytes
    try:
        freed = handle.evict()
    except ModelInUseError as error:
        if not spares:
            raise
        freed, cause = 0, str(error).splitlines()[2]
        if not was_out:
            return 0, f"{handle.name} stays: {cause.removeprefix('It is ').rstrip('.')}"
    if was_out and not freed:
        return 0, f"{handle.name} was out already"
    left = handle.device_bytes
    why = f"see: %vram why {_quoted(handle.name)}"
    return freed, f"{handle.name} keeps {format_size(left)} on the device; {why}" if left else ""


def _pin(arguments: Arguments) -> None:
    for handle in _named(arguments)[1]:
        handle.pin()


def _unpin(arguments: Arguments) -> None:
    for handle in _named(arguments)[1]:
        handle.unpin()


def _forget(arguments: Arguments) -> None:
    for handle in _named(arguments)[1]:
        handle.forget()


def _tier(arguments: Arguments) -> None:
    name, tier = arguments.exactly("NAME", "TIER")
    manager = vram_magic.manager()
    manager[name].tier = arguments.tier(tier, manager.tiers)


def _residency(arguments: Arguments) -> None:
    name, residency = arguments.exactly("NAME", "the residency")
    arguments.choice("a residency", residency, RESIDENCIES)
    vram_magic.manager()[name].residency = residency


def _plan(arguments: Arguments) -> None:
    tier = arguments.option("--tier")
    size = parse_size(arguments.size())
    manager = vram_magic.manager()
    print(manager.plan(size, tier=None if tier is None else arguments.tier(tier, manager.tiers)))


def _log(arguments: Arguments) -> None:
    count = arguments.whole_number("-n")
    arguments.exactly()
    if count is not None and count < 1:
        raise arguments.wrong("-n takes a whole number from 1 on")
    lines = log_lines(vram_magic.manager().journal, stories_of(get_ipython()), count or _LOGGED)
    print(without_times("\n".join(lines)) or "nothing had to be decided yet")


def _why(arguments: Arguments) -> None:
    (name,) = arguments.exactly("NAME")
    print(without_times(vram_magic.manager()[name].why()))


def _save(arguments: Arguments) -> None:
    (path,) = arguments.exactly("FILE")
    print(save(vram_magic.manager(), os.path.expanduser(path)))


def _restore(arguments: Arguments) -> None:
    (path,) = arguments.exactly("FILE")
    shell = get_ipython()
    assert shell is not None  # noqa: S101  a magic runs in one
    print(restore(shell, vram_magic.manager(), os.path.expanduser(path)))


def _doctor(arguments: Arguments) -> None:
    wants_free = arguments.flag("--free")
    arguments.exactly()
    from vram_magic.notebook.doctor import examine, let_go_of_what_is_safe  # here: it needs torch

    shell, manager = get_ipython(), vram_magic.manager()
    assert shell is not None  # noqa: S101  a magic runs in one
    print(let_go_of_what_is_safe(shell, manager) if wants_free else examine(shell, manager))


def _panel(arguments: Arguments) -> None:
    wants_close = arguments.flag("--close")
    arguments.exactly()
    if wants_close:
        close_panel()
    else:
        display(open_panel(vram_magic.manager()))  # type: ignore[no-untyped-call]


COMMANDS = {
    "": Command("", "the report: the device, one row per model, everything else", _report),
    "budget": Command("budget SIZE | auto", "how much this notebook may use, e.g. 12GiB", _budget),
    "load": Command("load NAME...", "bring models to the device", _load),
    "evict": Command("evict NAME... | --all", "make models leave the device; they return when used", _evict),
    "pin": Command("pin NAME...", "never take these", _pin),
    "unpin": Command("unpin NAME...", "they may be taken again", _unpin),
    "forget": Command("forget NAME...", "stop managing; the variable stays, whole and usable", _forget),
    "tier": Command("tier NAME TIER", "who leaves first: llm, tts, asr, your own, or a number", _tier),
    "residency": Command(
        "residency NAME R", "where it goes when it must leave: auto, device, host or disk", _residency
    ),
    "plan": Command("plan SIZE [--tier T]", "what would leave for that much room; moves nothing", _plan),
    "log": Command("log [-n N]", "what happened in the last cells: use, who left, who came, and why", _log),
    "why": Command("why NAME", "why this model is where it is", _why),
    "doctor": Command(
        "doctor [--free]", "what holds memory that no model owns; --free lets go of what is safe", _doctor
    ),
    "save": Command("save FILE", "write down which models there are, without their weights", _save),
    "restore": Command("restore FILE", "bring them back in another kernel, each loaded at its first use", _restore),
    "panel": Command("panel [--close]", "a live report", _panel),
    "help": Command("help", "this list", _help),
}

# --------------------------------------------------------------------------------------------------------- the words


def _named(arguments: Arguments) -> tuple[VRAMManager, list[Handle]]:
    """All models that are named, before anything is done to one. Raises `UnknownModelError`."""
    names = arguments.names()
    manager = vram_magic.manager()
    return manager, [manager[name] for name in names]


def _quoted(name: str) -> str:
    return name if name.isidentifier() else repr(name)
