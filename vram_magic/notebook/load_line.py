"""The line after ``%load_model``: what was asked for, as text, before anything is evaluated or looked up.

SOURCE and ``--into`` are expressions and may hold blanks: SOURCE is all chunks behind NAME that are no option. Takes
no lock; refuses to know the notebook's names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vram_magic.policy import RESIDENCIES

if TYPE_CHECKING:
    from vram_magic.notebook.arguments import Arguments

__all__ = ["HELP", "USAGE", "LoadLine"]

USAGE = (
    "%load_model NAME SOURCE [--tier T | --priority N] [--residency auto|device|host|disk] [--pin]"
    " [--device D] [--dtype DT] [--lazy] [--into EXPR]"
)
HELP = """\
NAME    the variable that the model gets, and its name from then on
SOURCE  an expression that gives a model or a function that builds one, a folder made by save_pretrained,
        a hub id, or a .safetensors file together with --into MODULE
--tier T        llm, tts, asr or your own: who leaves first (default: NAME if it is a tier, else llm)
--priority N    a rank of its own, instead of a tier; the lower leaves the earlier
--residency R   where it goes when it must leave; "device" asks to stay
--pin           it never leaves
--device D      where models run; all of one notebook run on one device
--dtype DT      e.g. bfloat16 (default: the checkpoint's own)
--lazy          a folder, hub id or file is loaded at its first use; an expression or builder is evaluated at once
--into EXPR     the module that a .safetensors file is read into"""


@dataclass(frozen=True, slots=True)
class LoadLine:
    """One ``%load_model``."""

    name: str
    source: str
    into: str | None
    device: str | None
    dtype: str | None
    tier: str | None
    priority: int | None
    residency: str
    pin: bool
    lazy: bool

    @classmethod
    def read(cls, arguments: Arguments) -> LoadLine:
        """Takes the line apart. Raises `UsageError`."""
        options = {
            "into": arguments.expression("--into"),
            "device": arguments.option("--device"),
            "dtype": arguments.option("--dtype"),
            "tier": arguments.option("--tier"),
            "priority": arguments.whole_number("--priority"),
            "residency": arguments.option("--residency", RESIDENCIES) or "auto",
            "pin": arguments.flag("--pin"),
            "lazy": arguments.flag("--lazy"),
        }
        if options["tier"] is not None and options["priority"] is not None:
            raise arguments.wrong("--tier and --priority are two ways to say the same: give one")
        name, source = _name_and_source(arguments)
        return cls(name, source, **options)  # type: ignore[arg-type]


def _name_and_source(arguments: Arguments) -> tuple[str, str]:
    chunks = arguments.rest()
    if len(chunks) < 2:
        raise arguments.wrong("SOURCE is missing" if chunks else "NAME and SOURCE are missing")
    return arguments.identifier(chunks[0]), " ".join(chunks[1:])
