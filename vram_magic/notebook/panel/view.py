"""What the panel shows, as a compact dict: pure functions from a manager's cached figures to what JSON can carry.

A refresh is sent as one message, so every character counts: rows are lists, marks are letters, blocks are run-length
coded. panel.js reads this; the two change together. Sizes are bytes, but the driver's figures and working memory are
MiB: the first tremble, and would be sent for nothing; the other is an estimate. Times are whole seconds, counted from
``about["since"]``, so that an age is no change. Takes no lock; refuses to survey weights.

A row is ``[name, tier, marks, total, device, blocks, used, working, asked]``; zeros and empty texts at its end are
left out. Marks begin with the state's letter. Blocks are runs of a letter and a count: ``"d30h20"``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vram_magic.models.managed import ManagedModel
    from vram_magic.vram_manager import VRAMManager

__all__ = ["CLOSED", "MOST_RUNS", "about_of", "blocks_of", "row_of", "state_of"]

CLOSED = {"closed": 1}
"""The state once the manager is gone."""
MOST_RUNS = 60
"""The browser draws no more cells than this for a model, so there need not be more runs."""

_STATES = {"device": "d", "partial": "p", "host": "h", "disk": "k"}
_HOMES = {"device": "d", "host": "h", "disk": "k"}
_IN_TRANSIT = "t"
_MOVES = {"loading": "l", "leaving": "v"}
_RESIDENCIES = {"device": "D", "host": "H", "disk": "K"}
_MIB = 2**20


def about_of(manager: VRAMManager, since: int) -> dict[str, Any]:
    """What hardly ever changes. ``since``: Unix seconds from which other times are counted."""
    return {"device": manager.device, "guard": manager.guard, "tiers": dict(manager.tiers), "since": since}


def state_of(
    manager: VRAMManager, models: Iterable[ManagedModel], since: int, asked: Mapping[str, str]
) -> dict[str, Any]:
    """The figures, whole. ``asked``: by model, what was clicked and is not done yet."""
    state: dict[str, Any] = {
        "budget": manager.budget_bytes,
        "used": manager.used_bytes,
        "peak": manager.peak_bytes,
        "models": [row_of(model, since, asked.get(model.name, "")) for model in models],
    }
    if (outside := manager.outside()) is not None:
        figures = outside.total_bytes, outside.free_bytes, outside.foreign_bytes
        state["outside"] = [size // _MIB for size in figures]
    return state


def row_of(model: ManagedModel, since: int, asked: str = "") -> list[str | int]:
    """One model."""
    row: list[str | int] = [
        model.name,
        str(model.rank if model.tier is None else model.tier),
        _marks(model),
        model.total_bytes,
        model.device_bytes,
        blocks_of(model),
        int(model.used_at) - since,
        -(-model.working.bytes // _MIB),
        asked,
    ]
    while not row[-1]:
        row.pop()
    return row


def _marks(model: ManagedModel) -> str:
    marks = [_STATES[model.state]]
    marks += "u" if model.leases else ""
    marks += "p" if model.pinned else ""
    marks += _MOVES.get(model.moving, "")
    marks += _RESIDENCIES.get(model.residency, "")
    marks += "x" if model.demoted else ""
    return "".join(marks)


def blocks_of(model: ManagedModel) -> str:
    """Where each block is, in module order, in at most `MOST_RUNS` runs that add up to all blocks."""
    letters = [_HOMES[home] for home in model.block_homes]
    if model.moving == "loading":  # a load brings all that is out
        letters = [letter if letter == "d" else _IN_TRANSIT for letter in letters]
    leaving = model.leaving_blocks  # the tail leaves first
    for place in reversed(range(len(letters))):
        if leaving and letters[place] == "d":
            letters[place] = _IN_TRANSIT
            leaving -= 1
    runs = _runs(letters)
    return runs if len(letters) <= MOST_RUNS or _count(runs) <= MOST_RUNS else _runs(_merged(letters))


def _runs(letters: Sequence[str]) -> str:
    return "".join(f"{letter}{sum(1 for _ in run)}" for letter, run in groupby(letters))


def _count(runs: str) -> int:
    return sum(map(str.isalpha, runs))


def _merged(letters: Sequence[str]) -> list[str]:
    """As many letters, in `MOST_RUNS` stretches, each of the letter that was most frequent in it."""
    count, merged = len(letters), []
    for n in range(MOST_RUNS):
        stretch = letters[n * count // MOST_RUNS : (n + 1) * count // MOST_RUNS]
        merged += [max(sorted(set(stretch)), key=stretch.count)] * len(stretch)
    return merged
