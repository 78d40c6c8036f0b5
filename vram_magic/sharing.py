"""Weights that several models share: who may decide about them.

A shared block leaves only when every owner allows it, and it has the rank and the latest use of its highest owner: it
is counted there, once. Knows blocks and their spans; moves nothing, takes no lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from vram_magic.models.managed import Candidates, ManagedModel, TorchModel
from vram_magic.residency.parts import Key

__all__ = ["Owners"]


@dataclass(frozen=True, slots=True)
class Owners:
    """The models that may have a say, and why some of them allow nothing (an empty string: they allow it)."""

    models: Iterable[ManagedModel]
    spared: Callable[[ManagedModel], str]

    def allowed(self, model: ManagedModel, found: Candidates, *, asked: bool = False) -> Candidates:
        """What of ``found`` the model may give away; ``asked``: by the user, whatever the rank."""
        if not isinstance(model, TorchModel):
            return found
        against: dict[Key, str] = {}
        for other in self.models:
            if isinstance(other, TorchModel) and other is not model:
                reason = self._objection(model, other, asked=asked)
                against |= dict.fromkeys(model.body.keys & other.body.keys if reason else (), reason)
        if not against:
            return found
        reasons = {
            id(block): next((against[span.key] for span in block.spans if span.key in against), "")
            for block, _ in found.parts + found.demotable
        }
        return Candidates(
            [part for part in found.parts if not reasons[id(part[0])]],
            [part for part in found.demotable if not reasons[id(part[0])]],
            found.kept or next(filter(None, reasons.values()), ""),
        )

    def _objection(self, model: ManagedModel, other: ManagedModel, *, asked: bool) -> str:
        spared = self.spared(other)
        if spared:
            return f"shared with {other.name}, which is {spared}"
        outranked = (other.rank, other.last_used) > (model.rank, model.last_used)
        return f"shared with {other.name}, which leaves later" if outranked and not asked else ""
