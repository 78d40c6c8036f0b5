"""What a body remembers and tells: records, blocks, figures. Plain data; sizes are bytes."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vram_magic.devices.host import HostShare
from vram_magic.residency.checkpoint import TensorRange, WeightFile
from vram_magic.residency.spans import Span

if TYPE_CHECKING:
    import torch

__all__ = ["Block", "Figures", "Kept", "Key", "Record"]

Key = tuple[int, int]
"""Of a span: its storage and first byte."""


@dataclass(eq=False)  # no slots: it is referred to weakly
class Record:
    """What is known of one span besides its tensors."""

    nbytes: int
    origin: TensorRange | None = None
    origin_digest: int | None = None
    """The hash of what the origin holds: its file is refused once it has changed, so it is read for this once."""
    file: WeightFile | None = None
    offset: int = 0
    digest: int | None = None
    stand_in: torch.Tensor | None = None
    """What the tensors lie over while they are out: a private mapping of ``file``, or a copy in RAM."""
    share: HostShare | None = None
    """The RAM that the copy takes; with it ``stand_in`` is a copy, and is itself the true bytes."""
    edited: bool = False
    counted: bool = False
    owners: weakref.WeakSet[object] = field(default_factory=weakref.WeakSet)
    """The bodies' records that list it: more than one where models share the weight."""
    demoted: bool = False
    """A weight that asked to stay and had to leave all the same: from then on it is like any other."""

    @property
    def place(self) -> tuple[int, int, int] | None:
        """(device, inode, offset) of the backing."""
        if self.file is None:
            return None
        return self.file.identity.device, self.file.identity.inode, self.offset

    @property
    def spilled(self) -> bool:
        return self.file is not None and (self.origin is None or self.file is not self.origin.file)


@dataclass(frozen=True, slots=True)
class Kept:
    """Weights that cannot leave, and why."""

    name: str
    nbytes: int
    reason: str


@dataclass(slots=True, eq=False)
class Block:
    """Spans that leave and return together. ``kept`` says why the block cannot leave now."""

    spans: list[Span] = field(default_factory=list)
    total_bytes: int = 0
    resident_bytes: int = 0
    kept: str = ""


@dataclass(frozen=True, slots=True)
class Figures:
    """What a body looked like when it was last looked at."""

    total_bytes: int = 0
    device_bytes: int = 0
    host_bytes: int = 0
    """In copies of our own, in RAM or in spill files, and in RAM of the user's."""
    spilled_bytes: int = 0
    """What of them is in spill files."""
    disk_bytes: int = 0
    demoted_bytes: int = 0
    blocks: tuple[tuple[int, int], ...] = ()
    kept: tuple[Kept, ...] = ()
    copied: tuple[str, ...] = ()
