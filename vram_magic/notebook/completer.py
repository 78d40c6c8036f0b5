"""Completion inside ``%vram`` and ``%load_model``: sub-commands, model names, tiers, options and their values.

One matcher of IPython's second kind, which serves every form in which a line magic can be written. It reads cached
names only, makes no manager, and is silent where it has nothing to say, so that Python and files are still completed.
Takes no lock but the registry's, for a list of names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from IPython.core.completer import CompletionContext, SimpleCompletion, SimpleMatcherResult, context_matcher

from vram_magic.notebook.commands import COMMANDS
from vram_magic.notebook.current import managed_models, open_manager
from vram_magic.policy import DEFAULT_TIERS, RESIDENCIES

__all__ = ["complete", "make_matcher"]

# `%vram ...`, `x = %vram ...`, and `vram ...` as automagic has it; but not `vram = 3`
_LINE = re.compile(r"\s*(?:[\w.]+\s*=\s*%|%|)(vram|load_model)\s+(?![=.(])(.*)", re.DOTALL)
_OF_MODELS = ("load", "evict", "pin", "unpin", "forget", "tier", "residency", "why")
_OPTIONS = {
    "doctor": ["--free"],
    "evict": ["--all"],
    "log": ["-n"],
    "panel": ["--close"],
    "plan": ["--tier"],
    "load_model": ["--device", "--dtype", "--into", "--lazy", "--pin", "--priority", "--residency", "--tier"],
}
_DTYPES = ("bfloat16", "float16", "float32")


def make_matcher() -> Callable[[CompletionContext], SimpleMatcherResult]:
    """A matcher of its own for each shell, so that taking it out cannot take another's."""

    @context_matcher(identifier="vram_magic")  # type: ignore[untyped-decorator]
    def matcher(context: CompletionContext) -> SimpleMatcherResult:
        found = complete(context.text_until_cursor)
        return {"completions": [SimpleCompletion(text, type="magic") for text in found], "suppress": bool(found)}

    return matcher  # type: ignore[no-any-return]


def complete(text: str) -> list[str]:
    """What the last word of the line may become; empty when the line is not ours."""
    line = _LINE.fullmatch(text)
    if line is None:
        return []
    *before, begun = line[2].split() if line[2] and not line[2][-1].isspace() else [*line[2].split(), ""]
    if line[1] == "load_model":
        choices = _for_option(before) or (_OPTIONS["load_model"] if begun.startswith("-") else ())
    else:
        choices = _for_option(before) or _for_command(before, begun)
    return sorted(choice for choice in choices if choice.startswith(begun) and choice not in before)


def _for_option(before: list[str]) -> Iterable[str]:
    """The values of the option that the word before is."""
    option = before[-1] if before else ""
    if option == "--tier":
        return _tiers()
    return {"--residency": RESIDENCIES, "--dtype": _DTYPES}.get(option, ())


def _for_command(before: list[str], begun: str) -> Iterable[str]:
    if not before:
        return [name for name in COMMANDS if name]
    command, count = before[0], len(before)
    if begun.startswith("-"):
        return _OPTIONS.get(command, ())
    if command in ("tier", "residency") and count > 1:
        return (_tiers() if command == "tier" else RESIDENCIES) if count == 2 else ()
    if command == "budget":
        return ["auto"]
    return _models() if command in _OF_MODELS else ()


def _models() -> list[str]:
    manager = open_manager()
    # a name with blanks or quotes is more than one token to the completer
    return [m.name for m in managed_models(manager) if m.name.isidentifier()] if manager else []


def _tiers() -> list[str]:
    manager = open_manager()
    return list(manager.tiers if manager else DEFAULT_TIERS)
