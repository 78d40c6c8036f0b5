"""Leaving the device: proof that the bytes are safe elsewhere, a copy where they are not, and the replacement.

A block goes in three steps: every weight gets a *backing* (its own weight file if the bytes agree, else a copy in RAM,
else a spill file); every weight's tensors are replaced by what stands in (a private mapping of the file, or the copy);
then the old memory, which nobody can reach any more, is looked at once more. If it is not what was backed, or a weight
was in use, all are put back. Sizes are bytes.

Lock: none of its own; the manager lets one thread at a time look at or move a body. Refuses to know who asked.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from vram_magic.devices.base import Device
from vram_magic.devices.host import HostMemory, available_ram_bytes, memory_at, ram_reserve_bytes, read_ram
from vram_magic.residency.digest import Digesting, digest, digest_file
from vram_magic.residency.mapping import bury, map_range
from vram_magic.residency.parts import Record
from vram_magic.residency.records import Records, booked
from vram_magic.residency.spans import Span
from vram_magic.residency.spill import SpillStore
from vram_magic.residency.swap import busy, harmless, put_back, replace, versions

__all__ = ["Leaving"]

_EDITED = "it was edited while it was leaving"


class Leaving:
    """Moves the spans of one body out, block by block."""

    def __init__(self, records: Records, device: Device, store: SpillStore, host: HostMemory) -> None:
        self._records = records
        self._device = device
        self._store = store
        self._host = host
        self.residency = "auto"
        """``"host"``: as a copy of our own, even where a file holds the weights; ``"disk"``: not as a copy in RAM."""

    def leave(self, spans: list[Span], *, only_proven: bool, may_rest: bool) -> tuple[int, str]:
        """All spans leave, or none; returns the bytes that left and why they stayed. Raises OSError (a full disk).

        ``only_proven``: leave only what is safe in its own file; nothing is copied but buffers that are never saved.
        """
        self._device.settle()  # what other streams still compute with the weights must end before their memory goes
        seen = [versions(span) for span in spans]
        unsafe = [span for span in spans if not self._safe(span, only_proven=only_proven)]
        if only_proven and (doubtful := self.doubtful(unsafe)):
            return 0, doubtful
        moved: list[tuple[Span, Record, torch.Tensor]] = []
        try:
            reason = self._swap(spans, seen, self._copied(unsafe), moved, may_rest=may_rest)
        except BaseException:
            self._undo(moved)
            self._drop_copies(spans)
            raise
        if reason:
            self._undo(moved)
            self._drop_copies(spans)
            return 0, reason
        freed = sum(span.nbytes for span, *_ in moved)
        booked(lambda: self._let_go(moved))
        return freed, ""

    def doubtful(self, spans: list[Span]) -> str:
        """Why not all of the spans are safe in their own file, naming the first; empty when they are.

        Buffers that are never saved (rotary frequencies, position ids) are in no file, and no reason.
        """
        doubts = (span for span in spans if not span.transient and not (self.backed(span) and self._in_its_file(span)))
        first = next(doubts, None)
        return "" if first is None else f"{first.names[0]} was edited, or its file does not hold it"

    def _in_its_file(self, span: Span) -> bool:
        return not self._records[span].spilled

    def backed(self, span: Span) -> bool:
        """Whether the record's backing holds (or is about to be proven to hold) the span's bytes."""
        record = self._records[span]
        if record.file is None and record.origin is None:
            return False
        now = self._digest(span)
        if record.file is None or (record.spilled and self.residency != "host"):
            self._prove_origin(record, now)
        return record.file is not None and record.file.unchanged() and record.digest == now

    def _safe(self, span: Span, *, only_proven: bool) -> bool:
        if self.residency == "host" and not only_proven and not self._records[span].spilled:
            return False
        return self.backed(span)

    def _digest(self, span: Span) -> int:
        return digest(self._device.read(span.raw()))

    def _prove_origin(self, record: Record, now: int) -> None:
        """Makes the origin the backing if it holds these very bytes, also once an edit was undone."""
        origin = record.origin
        if origin is None or not origin.file.unchanged():
            return
        if record.origin_digest is None:
            record.origin_digest = digest_file(origin.file, origin.offset, record.nbytes)
        record.edited = record.origin_digest != now
        if not record.edited:
            record.file, record.offset, record.digest = origin.file, origin.offset, now

    # ------------------------------------------------------------------------------------------------ copies

    def _copied(self, spans: list[Span]) -> dict[int, torch.Tensor]:
        """Backs the spans by copies: returned by id of the record are those in RAM; others are in a spill file."""
        in_ram: dict[int, torch.Tensor] = {}
        for span in spans if self.residency != "disk" else ():
            copy = self._copy_in_ram(span)
            if copy is not None:
                in_ram[id(self._records[span])] = copy
        self._spill([span for span in spans if id(self._records[span]) not in in_ram])
        return in_ram

    def _copy_in_ram(self, span: Span) -> torch.Tensor | None:
        """A copy in RAM, or None where there is no room for one."""
        record, share = self._records[span], self._host.take(span.nbytes)
        if share is None:
            return None
        try:
            copy = torch.empty(span.nbytes, dtype=torch.uint8, device="cpu")
        except RuntimeError:  # the machine's, or the budget of a manager of the CPU
            return None
        seen = Digesting()
        for piece, room in zip(seen.passing(self._device.read(span.raw())), read_ram(copy), strict=True):
            room[:] = piece
        self._note_copy(record, seen.value)
        record.file, record.share = None, share
        return copy

    def _spill(self, spans: list[Span]) -> None:
        if not spans:
            return
        # Hashed while they are written: an edit in between shows as a difference, and the block stays.
        hashes = [Digesting() for _ in spans]
        parts = [
            (span.nbytes, seen.passing(self._device.read(span.raw()))) for span, seen in zip(spans, hashes, strict=True)
        ]
        file, offsets = self._store.write(parts)
        for span, offset, seen in zip(spans, offsets, hashes, strict=True):
            record = self._records[span]
            self._note_copy(record, seen.value)
            record.file, record.offset = file, offset

    def _note_copy(self, record: Record, seen: int) -> None:
        record.digest = seen
        record.edited |= record.origin is not None and self.residency != "host"

    # ------------------------------------------------------------------------------------------- the replacement

    def _swap(
        self,
        spans: list[Span],
        seen: list[list[int]],
        copies: dict[int, torch.Tensor],
        moved: list[tuple[Span, Record, torch.Tensor]],
        *,
        may_rest: bool,
    ) -> str:
        """Replaces all spans' memory, noting each in ``moved``; returns why that is to be undone."""
        for span, before, references in zip(spans, seen, harmless(spans, may_rest=may_rest), strict=True):
            record = self._records[span]
            stand_in = copies.get(id(record))
            if stand_in is None:
                assert record.file is not None  # noqa: S101  `backed` or `_spill` has seen to it
                stand_in = map_range(record.file.fd, record.offset, record.nbytes)
            moved.append((span, record, stand_in))  # before it is: an exception on the way back must not forget it
            if not replace(span, span.retarget(stand_in), references, before):
                moved.pop()
                return busy(span, references) or _EDITED
        self._device.settle()
        # Nobody but us can reach the old memory any more, so what it holds is the last word.
        return _EDITED if any(self._digest(span) != record.digest for span, record, _ in moved) else ""

    def _let_go(self, moved: list[tuple[Span, Record, torch.Tensor]]) -> None:
        while moved:
            span, record, stand_in = moved[-1]
            record.stand_in = stand_in
            self._records.moved(span, stand_in, owned=False)
            moved.pop()

    def read_back(self, spans: Iterable[Span]) -> None:
        """Weights that are out get RAM of their own in place of a mapping of a spill file.

        Those in use keep that, and so do all where there is not enough RAM.
        """
        for span in spans:
            if span.nbytes > available_ram_bytes() - ram_reserve_bytes():
                return
            copy = torch.empty(span.nbytes, dtype=torch.uint8, device="cpu")
            room, before = memory_at(copy.data_ptr(), span.nbytes), versions(span)
            room[:] = span.bytes
            copied = digest([room])
            if not replace(span, span.retarget(copy), harmless([span], may_rest=True)[0], before, holders=1):
                continue
            # What was written through ``.data`` meanwhile comes along, unless more was written to the new memory.
            if digest([span.bytes]) != copied == digest([room]):
                room[:] = span.bytes
            self._records[span].stand_in = None
            self._records.moved(span, copy, owned=False)

    def _undo(self, moved: Iterable[tuple[Span, Record, torch.Tensor]]) -> None:
        """All is put back; what was written to a stand-in meanwhile comes along."""
        for span, record, stand_in in moved:
            before = versions(span)
            while True:
                written = memory_at(stand_in.data_ptr(), span.nbytes)
                if digest([written]) != record.digest:
                    self._device.write(span.raw(), Digesting().from_ram(written))
                if put_back(span, before):
                    break
                before = versions(span)
            bury(stand_in.untyped_storage())  # an operation may have begun to read it

    def _drop_copies(self, spans: list[Span]) -> None:
        """What was taken of the RAM for copies of weights that did not leave after all is free again."""
        for span in spans:
            self._records[span].share = None
