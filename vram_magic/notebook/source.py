"""The text of a SOURCE: a Python expression over the notebook's names, a path, or a hub id.

In doubt: what is quoted is a path or an id; a name of the notebook's is what it stands for, even where a folder of that
name lies about; then a path that exists; then an expression whose names are all known; and the rest is left for the
library that reads sources, which says what it tried. An expression's own errors pass as they are. Takes no lock.
"""

from __future__ import annotations

import ast
import builtins
import os
import re
from typing import TYPE_CHECKING

from vram_magic.errors import SourceError, closest
from vram_magic.notebook.arguments import unquoted

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["evaluated", "read_source", "read_word", "with_variables"]

_PATH_OR_ID = re.compile(r"[\w.~/-]+")
_DOTTED = re.compile(r"[^\W\d][\w.]*")
_EXPANDED = re.compile(r"\$(\w+)|\{(.+)\}", re.DOTALL)


def read_source(shell: InteractiveShell, text: str) -> object:
    """What the text stands for: an object, or a path or hub id as text."""
    __tracebackhide__ = True
    if (plain := unquoted(text)) != text:
        return plain
    if (asked := _EXPANDED.fullmatch(text)) is not None:
        return evaluated(shell, asked[1] or asked[2])
    if text not in shell.user_ns and os.path.exists(os.path.expanduser(text)):
        return text
    return evaluated(shell, text) if _is_expression(shell, text) else text


def _is_expression(shell: InteractiveShell, text: str) -> bool:
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError):
        return False
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    # What could be no path shall fail as an expression does: with the name that is not defined.
    return names <= {*shell.user_ns, *vars(builtins)} or not _PATH_OR_ID.fullmatch(text)


def with_variables(shell: InteractiveShell, text: str, error: SourceError) -> SourceError:
    """The error of a SOURCE, as it was written, where it may have been meant as one of the notebook's variables."""
    from vram_magic.models.libraries import NOWHERE  # here: it needs torch, which an error of a source has

    lines = str(error).split("\n")
    if not _DOTTED.fullmatch(text) or len(lines) != 4 or f"{text!r} {NOWHERE}" not in lines[2]:
        return error
    lines[2] = lines[2].replace(NOWHERE, NOWHERE.replace("is no ", "is no variable of this notebook and no ", 1), 1)
    known = (name for name in shell.user_ns if not name.startswith("_"))
    if meant := closest(text.partition(".")[0], known):
        others = f"   or {lines[3]}" if "NAME MODEL_OR" not in lines[3] else ""  # that one says nothing new
        lines[3] = f"Did you mean the variable {meant!r}? %load_model NAME {meant}{others}"
    return SourceError("\n".join(lines))


def evaluated(shell: InteractiveShell, text: str) -> object:
    """The expression's value in the notebook."""
    __tracebackhide__ = True
    return shell.ev(text)  # type: ignore[no-untyped-call]


def read_word(shell: InteractiveShell, text: str) -> str:
    """A word without its quotes; ``$name`` and ``{expression}`` give their value, as IPython has it in other magics."""
    asked = _EXPANDED.fullmatch(text)
    return str(evaluated(shell, asked[1] or asked[2])) if asked else unquoted(text)
