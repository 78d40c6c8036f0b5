"""The arguments of a magic: a line cut into chunks, and options taken out of them.

A chunk ends at a blank outside quotes and brackets, so ``lambda: build(2, 3)`` is two chunks and ``f(a, b)`` is one.
Whatever is wrong becomes IPython's own `UsageError` with the usage line: the shell knows it by its exact class, and
shows a subclass with a traceback. Takes no lock; refuses to know managers and models.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Collection, Mapping

from IPython.core.error import UsageError

from vram_magic.errors import closest
from vram_magic.sizes import parse_size

__all__ = ["Arguments", "unquoted"]

_PIECE = re.compile(
    r"""(?P<text>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')|(?P<open>[(\[{])|(?P<close>[)\]}])|(?P<blank>\s+)|(?P<other>.)""",
    re.DOTALL,
)
_ASSIGNED = re.compile(r"(--[a-z]+)=(.*)", re.DOTALL)
_OPTION = re.compile(r"--?[A-Za-z].*|--", re.DOTALL)


class Arguments:
    """What is left of a line while options are taken out of it.

    ``read``: what a word stands for, where the shell has not expanded the line already; default: itself, unquoted.
    """

    def __init__(self, line: str, usage: str, read: Callable[[str], str] | None = None) -> None:
        self.usage = usage
        self._read = read or unquoted
        self._options: list[str] = []
        """What was asked for, so that a mistyped one can be told from them."""
        self._chunks: list[str] = []
        for chunk in self._split(line.strip().rstrip(";")):
            assigned = _ASSIGNED.fullmatch(chunk)
            self._chunks += assigned.groups() if assigned else [chunk]

    def wrong(self, message: str) -> UsageError:
        """The error to raise: what is wrong, and how it goes."""
        return UsageError(f"{message}\nusage: {self.usage}")

    def _split(self, line: str) -> list[str]:
        chunks, depth = [""], 0
        for piece in _PIECE.finditer(line):
            depth += (piece.lastgroup == "open") - (piece.lastgroup == "close")
            if piece["other"] in ("'", '"'):
                raise self.wrong(f"a quote is not closed: {line[piece.start() :]}")
            if piece["other"] == "#" and not chunks[-1]:
                break
            if piece["blank"] and depth <= 0:
                chunks.append("")
            else:
                chunks[-1] += piece[0]
        if depth > 0:
            raise self.wrong(f"a bracket is not closed: {line}")
        return [chunk for chunk in chunks if chunk]

    # ------------------------------------------------------------------------------------------------- options

    def flag(self, *names: str) -> bool:
        """Whether one of the spellings is there; takes it out."""
        self._options += names
        found = any(chunk in names for chunk in self._chunks)
        self._chunks = [chunk for chunk in self._chunks if chunk not in names]
        return found

    def option(self, name: str, choices: Collection[str] = ()) -> str | None:
        """The option's value, or None; takes both out."""
        text = self._value(name, lambda start: start + 1)
        return None if text is None else self.choice(name, self._read(text), choices)

    def whole_number(self, name: str) -> int | None:
        """The option's value, or None; takes both out."""
        text = self.option(name)
        try:
            return None if text is None else int(text)
        except ValueError:
            raise self.wrong(f"{name} takes a whole number, not {text!r}") from None

    def expression(self, name: str) -> str | None:
        """The option's value where it may hold blanks: behind the positional chunks it goes on to the next option."""
        return self._value(name, lambda start: self._end_of_words(start) if start > 2 else start + 1)

    def _value(self, name: str, end_of: Callable[[int], int]) -> str | None:
        self._options.append(name)
        if name not in self._chunks:
            return None
        start = self._chunks.index(name) + 1
        end = end_of(start)
        if end > len(self._chunks) or _OPTION.fullmatch(self._chunks[start]):
            raise self.wrong(f"{name} needs a value")
        value = " ".join(self._chunks[start:end])
        del self._chunks[start - 1 : end]
        if name in self._chunks:
            raise self.wrong(f"{name} is given twice")
        return value

    def _end_of_words(self, start: int) -> int:
        options = (i for i in range(start + 1, len(self._chunks)) if _OPTION.fullmatch(self._chunks[i]))
        return next(options, max(len(self._chunks), start + 1))

    # ------------------------------------------------------------------------------------- what is left of it

    def rest(self) -> list[str]:
        """The chunks that are no option, as they were written; call it when all options are taken out."""
        unknown = next((chunk for chunk in self._chunks if _OPTION.fullmatch(chunk)), None)
        if unknown is not None:
            meant = closest(unknown, self._options)
            raise self.wrong(f"there is no option {unknown}" + (f"; did you mean {meant}?" if meant else ""))
        return self._chunks

    def names(self, what: str = "NAME") -> list[str]:
        """At least one word."""
        words = [self._read(chunk) for chunk in self.rest()]
        if not words:
            raise self.wrong(f"{what} is missing")
        return words

    def exactly(self, *what: str) -> list[str]:
        """As many words as are asked for."""
        words = [self._read(chunk) for chunk in self.rest()]
        if len(words) < len(what):
            raise self.wrong(f"{what[len(words)]} is missing")
        if len(words) > len(what):
            raise self.wrong(f"{words[len(what)]!r} is too much")
        return words

    # ---------------------------------------------------------------------------------------- what words may be

    def choice(self, what: str, text: str, choices: Collection[str]) -> str:
        """The text, if it is one of the choices, or there are none."""
        if choices and text not in choices:
            raise self.wrong(f"{what} is one of {', '.join(choices)}, not {text!r}")
        return text

    def identifier(self, chunk: str) -> str:
        """What can be a variable's name."""
        name = self._read(chunk)
        if not name.isidentifier() or keyword.iskeyword(name):
            raise self.wrong(f"NAME becomes a variable, and {name!r} cannot be one")
        return name

    def tier(self, text: str, tiers: Mapping[str, int]) -> str | int:
        """A tier's name, or a bare rank."""
        if text.removeprefix("-").isdecimal():
            return int(text)
        if text not in tiers:
            known = ", ".join(sorted(tiers, key=tiers.__getitem__))
            raise self.wrong(
                f"a tier is one of {known}, or a whole number, not {text!r}\n"
                f"add it with: import vram_magic as vm; vm.manager().tiers[{text!r}] = RANK"
            )
        return text

    def size(self) -> str:
        """What is left, as a size; ``64 MiB`` may be two words."""
        text = " ".join(self.names("SIZE"))
        try:
            parse_size(text)
        except ValueError as error:
            raise self.wrong(str(error)) from None
        return text


def unquoted(text: str) -> str:
    """The text without the one pair of quotes around it, if there is one."""
    quote = text[:1]
    is_quoted = len(text) > 1 and quote in ("'", '"') and text.find(quote, 1) == len(text) - 1
    return text[1:-1] if is_quoted else text
