"""The report: what is where on the device, as numbers, plain text and HTML.

A `Report` is a frozen snapshot of numbers and names, so keeping one (IPython keeps what a cell shows) keeps no model.
Sizes are bytes. The same state gives the same text: rows go by rank, then name, without times or addresses. Names are
the user's, so they are escaped in HTML, and shortened in text. Takes no lock itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from vram_magic.notebook.current import managed_models
from vram_magic.sizes import format_size

if TYPE_CHECKING:
    from vram_magic.devices.base import Outside
    from vram_magic.models.managed import ManagedModel
    from vram_magic.vram_manager import VRAMManager

__all__ = ["Report", "Row", "shortened"]

_NAME_WIDTH = 40
_HEADINGS = ("model", "tier", "state", "on the device", "blocks", "")


@dataclass(frozen=True, slots=True)
class Row:
    """One model."""

    name: str
    tier: str
    state: str
    device_bytes: int
    total_bytes: int
    blocks: tuple[int, int]  # on the device whole, and all
    marks: tuple[str, ...]

    @property
    def size(self) -> str:
        return f"{format_size(self.device_bytes)} of {format_size(self.total_bytes)}"

    @property
    def cells(self) -> tuple[str, ...]:
        return self.tier, self.state, self.size, "{} of {}".format(*self.blocks), ", ".join(self.marks)


@dataclass(frozen=True, slots=True, repr=False)
class Report:
    """The device and its models at one moment."""

    device: str
    guard: str
    budget_bytes: int
    used_bytes: int
    free_bytes: int
    peak_bytes: int
    rows: tuple[Row, ...]
    outside: Outside | None = None
    spilled_bytes: int = 0
    """Disk that spill files take."""

    @classmethod
    def of(cls, manager: VRAMManager, *, fresh: bool = False) -> Report:
        """The manager's state. ``fresh`` looks at every weight first, in the deciding thread; else as cached."""
        for handle in manager.models.values() if fresh else ():
            _ = handle.state  # asking is looking
        rows = tuple(_row_of(model) for model in managed_models(manager))
        used, budget = manager.used_bytes, manager.budget_bytes
        return cls(
            device=manager.device,
            guard=manager.guard,
            budget_bytes=budget,
            used_bytes=used,
            free_bytes=budget - used,
            peak_bytes=manager.peak_bytes,
            rows=rows,
            outside=manager.outside(processes=fresh),
            spilled_bytes=manager.spilled_bytes,
        )

    @property
    def other_bytes(self) -> int:
        """What is on the device and belongs to no model."""
        return max(self.used_bytes - sum(row.device_bytes for row in self.rows), 0)

    @property
    def _headline(self) -> str:
        used, budget = format_size(self.used_bytes), format_size(self.budget_bytes)
        free, peak = format_size(self.free_bytes), format_size(self.peak_bytes)
        return f"{self.device}: {used} of {budget} used, {free} free, peak {peak} (guard: {self.guard})"

    @property
    def _footer(self) -> str:
        none = "" if self.rows else "no models yet; load one with: %load_model NAME SOURCE\n"
        spilled = f"\nspill files: {format_size(self.spilled_bytes)} of disk" if self.spilled_bytes else ""
        return f"{none}other tensors: {format_size(self.other_bytes)}{self._foreign}{spilled}"

    @property
    def _foreign(self) -> str:
        """A line about the rest of the device, where the driver tells."""
        if self.outside is None:
            return ""
        names = f" ({', '.join(self.outside.processes)})" if self.outside.processes else ""
        foreign, free = format_size(self.outside.foreign_bytes), format_size(self.outside.free_bytes)
        total = format_size(self.outside.total_bytes)
        return f"\nother processes and the driver: {foreign}{names}; {free} of {total} free on the device"

    def __repr__(self) -> str:
        table = [_HEADINGS, *((shortened(row.name), *row.cells) for row in self.rows)] if self.rows else []
        return "\n".join([self._headline, *_aligned(table), self._footer])

    def _repr_html_(self) -> str:
        head = "".join(f"<th style='{_CELL}'>{heading}</th>" for heading in _HEADINGS)
        body = "".join(_html_row(row) for row in self.rows)
        table = f"<table style='{_TABLE}'><tr>{head}</tr>{body}</table>" if self.rows else ""
        lines = "".join(f"<div>{escape(line)}</div>" for line in self._footer.splitlines())
        fill = _bar(self.used_bytes, self.budget_bytes, "of the budget used", "100%")
        return f"<div style='{_BOX}'><div>{escape(self._headline)}</div>{fill}{table}{lines}</div>"


def shortened(name: str, width: int = _NAME_WIDTH) -> str:
    """The name, cut in the middle when it is long: both ends tell names apart."""
    if len(name) <= width:
        return name
    half = (width - 1) // 2
    return f"{name[:half]}…{name[-half:]}"


def _row_of(model: ManagedModel) -> Row:
    return Row(
        name=model.name,
        tier=str(model.rank if model.tier is None else model.tier),
        state=model.state,
        device_bytes=model.device_bytes,
        total_bytes=model.total_bytes,
        blocks=model.blocks,
        marks=tuple(_marks(model)),
    )


def _marks(model: ManagedModel) -> Iterator[str]:
    if model.leases:
        yield "in use"
    if model.pinned:
        yield "pinned"
    if model.moving:
        yield model.moving
    if model.residency != "auto":
        yield f"residency {model.residency}"
    if model.demoted:
        yield "demoted"
    body = getattr(model, "body", None)  # an outside engine has none
    if body is not None and body.figures.spilled_bytes:
        yield f"{format_size(body.figures.spilled_bytes)} spilled"


def _aligned(table: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)) for row in table)
    return [f"  {line}".rstrip() for line in lines]


# ------------------------------------------------------------------------------------------------------------- HTML

# Styles stand inline: front ends strip <style> from notebooks that they do not trust. JupyterLab's variables follow its
# theme; elsewhere the page's own colours are inherited.
_BOX = (
    "display: inline-block; max-width: 100%; color: var(--jp-ui-font-color1, inherit); "
    "font-family: var(--jp-ui-font-family, sans-serif); font-size: var(--jp-ui-font-size1, 13px); line-height: 1.4; "
    "font-variant-numeric: tabular-nums"
)
_TABLE = "border-collapse: collapse; font-size: inherit; margin: 6px 0; color: inherit; table-layout: auto; width: 100%"
_CELL = "text-align: left; padding: 3px 14px 3px 0; vertical-align: top; line-height: 1.4; white-space: nowrap"
_NAME = f"{_CELL}; min-width: 8em; max-width: 24em; overflow-wrap: anywhere; white-space: normal"
_MARKS = f"{_CELL}; min-width: 6em; white-space: normal"
_WIDTH = "12em"  # of a model's bar
_TRACK = "margin: 2px 0; height: 5px; border-radius: 2px; background: var(--jp-border-color2, rgba(128, 128, 128, 0.4))"
_FILL = "height: 100%; border-radius: 2px; background: var(--jp-brand-color1, #1976d2)"


def _html_row(row: Row) -> str:
    tier, state, size, blocks, marks = map(escape, row.cells)
    sized = f"{size}{_bar(row.device_bytes, row.total_bytes, 'on the device', _WIDTH)}"
    cells = "".join(f"<td style='{_CELL}'>{cell}</td>" for cell in (tier, state, sized, blocks))
    return f"<tr><td style='{_NAME}'>{escape(row.name)}</td>{cells}<td style='{_MARKS}'>{marks}</td></tr>"


def _bar(part: int, whole: int, what: str, width: str) -> str:
    share = f"{min(part / whole, 1):.0%}" if whole else "0%"
    fill = f"<div style='{_FILL}; width: {share}'></div>"
    return f"<div style='{_TRACK}; width: {width}' role='img' aria-label='{share} {what}'>{fill}</div>"
