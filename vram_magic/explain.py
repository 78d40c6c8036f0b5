"""Why a model is where it is, in a few plain lines. Reads figures and the journal; moves nothing."""

from __future__ import annotations

from vram_magic.journal import Journal
from vram_magic.models.managed import ManagedModel, TorchModel
from vram_magic.oom import cure
from vram_magic.residency.parts import Figures
from vram_magic.sizes import format_size

__all__ = ["why"]

_SHOWN = 5
_STATES = {
    "device": "is on the device",
    "partial": "is partly on the device",
    "host": "is out, kept in a copy of its own",
    "disk": "is out, backed by its weight file",
}


def why(model: ManagedModel, journal: Journal) -> str:
    """One screen of text."""
    lines = [_where(model), _marks(model), _working(model)]
    if isinstance(model, TorchModel):
        lines += _weights(model)
    lines += _history(model.name, journal)
    return "\n".join(line for line in lines if line)


def _where(model: ManagedModel) -> str:
    size = f"{format_size(model.device_bytes)} of {format_size(model.total_bytes)} on the device"
    return f"{model.name} {_STATES[model.state]}: {size}."


def _marks(model: ManagedModel) -> str:
    tier = f"tier {model.tier} (rank {model.rank})" if model.tier else f"priority {model.rank}"
    marks = [f"It has {tier}, residency {model.residency}"]
    if model.leases:
        marks.append(
            f"it is in use by {len(model.leases)} calls" if len(model.leases) > 1 else "it is in use by a call"
        )
    if model.pinned:
        marks.append("it is pinned")
    if model.residency == "device":
        marks.append("it asks to stay, and leaves only as the last resort")
    if model.demoted:
        marks.append("that resort was needed: what left of it is now like any other model's")
    return "; ".join(marks) + "."


def _working(model: ManagedModel) -> str:
    return f"Its calls took up to {format_size(model.working.bytes)} beside the weights." if model.working.bytes else ""


def _weights(model: TorchModel) -> list[str]:
    figures = model.body.figures
    if not figures.total_bytes:
        return ["It shows no weights. A frozen TorchScript module has some all the same, of a size that is unknown."]
    present, count = model.blocks
    lines = [f"Blocks on the device: {present} of {count}.", _elsewhere(figures)]
    lines += [
        f"{kept.name} ({format_size(kept.nbytes)}) cannot leave: {kept.reason}." for kept in figures.kept[:_SHOWN]
    ]
    if more := len(figures.kept) - _SHOWN:
        lines += [f"... and {more} more that cannot leave."] if more > 0 else []
    if figures.copied:
        lines.append(
            f"{len(figures.copied)} weights differ from the file and are backed by a copy: {_some(figures.copied)}."
        )
    if model.body.staying:
        lines.append(f"When last moved, not everything went along: {model.body.staying}.")
        lines += [f"{text}." for text in [cure(model.body.staying)] if text]
    return lines


def _elsewhere(figures: Figures) -> str:
    homes = {
        "in RAM": figures.host_bytes - figures.spilled_bytes,
        "in spill files": figures.spilled_bytes,
        "in weight files": figures.disk_bytes,
    }
    out = [f"{format_size(size)} {home}" for home, size in homes.items() if size]
    return f"Elsewhere: {', '.join(out)}." if out else ""


def _some(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _history(name: str, journal: Journal) -> list[str]:
    about = [r for r in journal if name in r.asked_by or any(step.model == name for step in r.left)]
    return [f"Lately: {record}" for record in about[-2:]]
