"""Who holds memory in a notebook: failed frames, the cache of results, the names; and how to make each let go.

A holder is told as text and numbers, so keeping one keeps nothing alive. Reads the shell's own tables; runs no code of
the user's. Takes no lock. Refuses to know sizes, and who is managed apart from what it is told.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from types import FrameType
from typing import TYPE_CHECKING

import torch

from vram_magic.notebook.debris import failed_frames
from vram_magic.notebook.report import shortened
from vram_magic.notebook.walk import is_a

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["FREE", "Holder", "Kind", "command_of", "holders_in", "label_of", "stops_of", "to_blame"]

FREE = "%vram doctor --free"

_SHOWN = 3
_RESULT = re.compile(r"_{1,3}|_\d+")  # the names that IPython gives to results
_MACHINERY = {"In", "Out", "_ih", "_oh", "_dh"}


class Kind(IntEnum):
    """What holds, in the order in which it is blamed."""

    FRAME = 1
    RESULT = 2
    NAME = 3
    GRADIENT = 4


@dataclass(frozen=True, slots=True)
class Holder:
    """One of those who keep something alive."""

    kind: Kind
    label: str
    command: str
    """What makes it let go."""
    thing: int = field(default=0, compare=False)
    """Which object it refers to, as a number."""
    gradients: str = field(default="", compare=False)
    """What frees the gradients of what it leads to."""
    hint: str = field(default="", compare=False)
    """What else may be done about it."""
    rank: int = field(default=5, compare=False)
    """Of several that could free gradients, the lowest is named."""

    def of_gradients(self) -> Holder:
        """The holder of the gradients of what this one leads to: it can free them without letting go of the rest."""
        name = self.command if self.kind is Kind.NAME else self.label
        command = self.gradients or (f"del {self.command}" if self.kind is Kind.NAME else self.command)
        return Holder(Kind.GRADIENT, f"gradients of {shortened(name)}", command, rank=self.rank)


def holders_in(shell: InteractiveShell, managed: Collection[int]) -> Iterator[tuple[Holder, object]]:
    """All holders, each with the object that it leads to. ``managed``: the ids of managed models' objects."""
    yield from _frames(shell)
    yield from _results(shell)
    yield from _names(shell, managed)


def stops_of(shell: InteractiveShell) -> list[object]:
    """The tables through which everything leads to everything."""
    return [shell, shell.user_ns, shell.user_ns_hidden, shell.user_ns.get("_oh"), shell.user_module]


def to_blame(holders: list[Holder]) -> tuple[Holder, ...]:
    """Those of all holders of one piece of memory who have to let go, in the order in which they are named.

    A value is handed from frame to frame, and all frames go together: the outermost stands for them. A gradient needs
    one owner to free it.
    """
    frames = [holder for holder in holders if holder.kind is Kind.FRAME][:1]
    owners = sorted((h for h in holders if h.kind is Kind.GRADIENT), key=lambda h: (h.rank, h.label))[:1]
    others = [holder for holder in holders if holder.kind in (Kind.RESULT, Kind.NAME)]
    return (*frames, *others, *owners)


def label_of(holders: tuple[Holder, ...]) -> str:
    """The holders of one piece of memory in words."""
    labels = [holder.label for holder in holders]
    more = len(labels) - _SHOWN
    return ", ".join(labels[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def command_of(holders: tuple[Holder, ...]) -> str:
    """What makes all of them let go."""
    if len(holders) == 1:
        (holder,) = holders
        return f"del {holder.command}{holder.hint}" if holder.kind is Kind.NAME else holder.command
    names = {holder.command: holder.thing for holder in holders if holder.kind is Kind.NAME}
    results = {holder.thing for holder in holders if holder.kind is Kind.RESULT}
    # %xdel takes all names of an object, and whatever IPython has of it
    everywhere = {thing: f"%xdel {name}" for name, thing in reversed(names.items()) if thing in results}
    plain = ", ".join(name for name, thing in names.items() if thing not in everywhere)
    others = [h.command for h in holders if h.kind is not Kind.NAME and h.thing not in everywhere]
    commands = [*others, *everywhere.values(), f"del {plain}" if plain else ""]
    return " and ".join(dict.fromkeys(filter(None, commands)))


def _frames(shell: InteractiveShell) -> Iterator[tuple[Holder, object]]:
    for frame in failed_frames(shell):
        if frame.f_locals is frame.f_globals or frame.f_locals is shell.user_ns:
            continue  # its variables are the notebook's
        if str(frame.f_globals.get("__name__")).startswith("IPython."):
            continue  # what it holds, the user's own frames hold
        for name, value in _variables(frame):
            label = f"the failed {shortened(frame.f_code.co_name)}(): {shortened(name)}"
            yield Holder(Kind.FRAME, label, FREE), value


def _variables(frame: FrameType) -> list[tuple[str, object]]:
    try:
        return list(frame.f_locals.items())
    except Exception:  # noqa: BLE001  a class body's may be any mapping
        return []


def _results(shell: InteractiveShell) -> Iterator[tuple[Holder, object]]:
    """Each object once, with the best of the ways to make IPython forget it: it keeps up to seven references."""
    found: dict[int, tuple[Holder, object]] = {}
    hook, last = shell.displayhook, shell.last_execution_result
    hidden = {name: value for name, value in shell.user_ns_hidden.items() if _is_result(name)}
    outputs = shell.user_ns.get("_oh")
    numbered = [item for item in outputs.items() if type(item[0]) is int] if type(outputs) is dict else []
    for number, value in sorted(numbered, key=operator.itemgetter(0)):
        name = f"_{number}"
        known = shell.user_ns.get(name) is value
        _add(found, f"Out[{number}]", f"%xdel {name}" if known else "%reset -f out", value)
    for name, value in sorted(hidden.items()):
        known = shell.user_ns.get(name) is value
        command = f"%xdel {name}" if known else f'del get_ipython().user_ns_hidden["{name}"]'
        _add(found, f"the last results ({name})", command, value)
    for value in (hook._, hook.__, hook.___, last and last.result):
        _add(found, "the last results", "get_ipython().displayhook.flush()", value)
    yield from found.values()


def _add(found: dict[int, tuple[Holder, object]], label: str, command: str, value: object) -> None:
    found.setdefault(id(value), (Holder(Kind.RESULT, label, command, id(value)), value))


def _names(shell: InteractiveShell, managed: Collection[int]) -> Iterator[tuple[Holder, object]]:
    names = [name for name in shell.user_ns if type(name) is str and name not in _MACHINERY]
    for name in sorted(names):
        value = shell.user_ns.get(name)
        if not (_is_result(name) and shell.user_ns_hidden.get(name) is value):
            yield _holder_of(name, value, is_managed=id(value) in managed), value


def _holder_of(name: str, value: object, *, is_managed: bool) -> Holder:
    short = shortened(name if name.isprintable() else repr(name))
    reached = name if name.isidentifier() else f"globals()[{name!r}]"
    zero_grad, hint, rank = f"{reached}.zero_grad()", "", 0
    if is_a(value, torch.nn.Module):
        hint = f", or manage it: %load_model {name} {name}" if name.isidentifier() and not is_managed else ""
    elif is_a(value, torch.optim.Optimizer):
        short, rank = f"optimizer {short}", 1
    elif is_a(value, torch.Tensor):
        zero_grad, rank = f"{reached}.grad = None", 2
    else:
        zero_grad, rank = "", 3
    if is_managed:
        short += ", besides its weights"
    return Holder(Kind.NAME, short, reached, id(value), zero_grad, hint, rank)


def _is_result(name: object) -> bool:
    return type(name) is str and _RESULT.fullmatch(name) is not None
