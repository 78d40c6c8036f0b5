"""Coming back to the device: every missing weight from its backing, checked on the way.

First everything is read into new memory, then every weight's tensors are replaced, so a failure leaves the body as it
was. Whatever was written to a weight while it was out comes along. Sizes are bytes.

Lock: none of its own; the manager lets one thread at a time look at or move a body. Refuses to know who asked.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from vram_magic.devices.base import Device
from vram_magic.devices.meter import Reservation
from vram_magic.errors import BackingLostError, ModelInUseError
from vram_magic.residency.checkpoint import WeightFile
from vram_magic.residency.digest import Digesting, digest, digest_file
from vram_magic.residency.mapping import was_written
from vram_magic.residency.parts import Record
from vram_magic.residency.records import Records, booked
from vram_magic.residency.spans import Span
from vram_magic.residency.swap import SHARED, busy, frames_rest, harmless, replace, versions

if TYPE_CHECKING:
    import torch

__all__ = ["Arriving"]

# How long a load waits, in all, for operations that read evicted weights directly. On the host they compute with them
# where they are, and so does the model, at no harm; elsewhere the model cannot.
_PATIENCE_S, _PATIENCE_ELSEWHERE_S = 0.25, 10.0
_RESTS = 200  # looks, a millisecond apart: a thread that computes now and then rests in between


class _Fetched:
    """New memory with the bytes of a span: their hash, and whether they are those of its backing."""

    def __init__(self, span: Span, memory: torch.Tensor) -> None:
        self.span = span
        self.memory = memory
        self.versions: list[int] = []
        self.digest: int | None = None
        self.from_backing = False
        self.late = False


class Arriving:
    """Brings the spans of one body in."""

    def __init__(self, records: Records, device: Device) -> None:
        self._records = records
        self._device = device

    def load(self, spans: list[Span], reservation: Reservation) -> int:
        """Brings the spans to the device, into memory that the reservation pays for; returns the bytes.

        Raises `BackingLostError` when a file no longer holds what left, and then nothing has moved.
        """
        fetched: list[_Fetched] = []
        arrived = 0
        try:
            for span in sorted(spans, key=self._place_in_file):
                fetched.append(_Fetched(span, self._device.allocate(span.nbytes, reservation)))
                self._fetch(fetched[-1])
            deadline = time.monotonic() + (_PATIENCE_S if self._device.is_host else _PATIENCE_ELSEWHERE_S)
            while fetched:
                arrived += self._arrive(fetched.pop(), deadline)
        finally:
            for item in fetched:  # what was fetched for nothing goes at once, whoever keeps the traceback
                item.memory.untyped_storage().resize_(0)
                self._device.freed(item.span.nbytes)
            fetched.clear()
        return arrived

    def _place_in_file(self, span: Span) -> tuple[int, int, int]:
        """By it files are read from their begin to their end: a disk, or a network, gives that fastest."""
        return self._records.place_of(span) or (0, 0, 0)

    def absent(self, spans: list[Span]) -> tuple[list[Span], int]:
        """What of the spans a load brings, and how many weights stay where they are.

        On the host's own memory a mapping that others share too (a ``state_dict()`` that is held) stays for them: the
        model computes from it. On an accelerator it cannot, so the others keep it alone.
        """
        missing = [span for span in spans if not span.owned]
        if not self._device.is_host:
            return missing, 0
        absent = [span for span in missing if busy(span, holders=self._holders(span)) != SHARED]
        return absent, len(missing) - len(absent)

    def _holders(self, span: Span) -> int:
        return int(self._records[span].stand_in is not None)

    # ----------------------------------------------------------------------------------------------- reading

    def _fetch(self, item: _Fetched) -> None:
        """Fills device memory with the span's true bytes."""
        span, record, seen = item.span, self._records[item.span], Digesting()
        item.versions, item.from_backing = versions(span), False
        self._adopt_mapped_file(span, record)
        self._check_file(span, record)
        # A record may be of memory that was here before and is gone. What is mapped here is certain: only if it is the
        # very place that the record names is the file read instead of it.
        here = record.file is not None and self._records.place_of(span) == record.place
        if record.file is None or not here or not self._untouched(span, record):
            record.file, record.edited = None, record.edited or (here and record.origin is not None)
            self._device.write(item.memory, seen.from_ram(span.bytes))
            item.digest = seen.value
            return
        self._device.write(item.memory, seen.from_file(record.file, record.offset))
        item.digest, item.from_backing = seen.value, True
        if record.digest is not None and item.digest != record.digest:
            raise _lost(span, record.file)

    def _check_file(self, span: Span, record: Record) -> None:
        """A mapped file that was cut kills whoever reads beyond its end; one that was rewritten shows other weights.

        Where the hash is known it decides; a weight that a loader mapped has none yet, so any change is a loss.
        """
        origin = record.origin
        place = self._records.place_of(span)
        mapped = place is not None and origin is not None
        file = record.file or (origin.file if mapped and origin is not None else None)
        if file is None or place is None:
            return
        if place[:2] != (file.identity.device, file.identity.inode) or file.unchanged():
            return
        if record.digest is None or os.fstat(file.fd).st_size < file.identity.size:
            raise _lost(span, file)

    def _adopt_mapped_file(self, span: Span, record: Record) -> None:
        """A weight that a loader mapped straight from its origin needs no other proof than the place."""
        origin = record.origin
        if record.file is None and origin is not None and origin.file.unchanged():
            identity = origin.file.identity
            if self._records.place_of(span) == (identity.device, identity.inode, origin.offset):
                record.file, record.offset = origin.file, origin.offset

    def _untouched(self, span: Span, record: Record) -> bool:
        """Whether the mapping that stands in for the weights was not written to while they were out."""
        written = was_written(span.address, span.nbytes)
        if written is False:
            return True
        # Unknown, or a neighbour's page: the bytes decide.
        assert record.file is not None  # noqa: S101
        known = record.digest
        if known is None:
            known = digest_file(record.file, record.offset, record.nbytes)
        return digest([span.bytes]) == known

    # ----------------------------------------------------------------------------------------------- arriving

    def _arrive(self, item: _Fetched, deadline: float) -> int:
        span = item.span
        if not self._replaced(item, deadline):
            self._device.freed(span.nbytes)
            if self._device.is_host:
                return 0  # someone computes with the mapping; it gives the right values where it is
            raise _in_use(span)
        try:
            booked(lambda: self._settle(item))
        finally:
            del item.memory  # whoever keeps the traceback would share the weight's memory
        return span.nbytes

    def _settle(self, item: _Fetched) -> None:
        """Writes down that the span lies over its new memory."""
        span, record = item.span, self._records[item.span]
        if not span.owned:  # else begun once before
            self._take_late_edits(item)
        self._records.moved(span, item.memory, owned=True)
        if not item.from_backing:
            changed = record.digest is not None and record.digest != item.digest
            record.edited |= changed and record.origin is not None
            record.file = None
        record.digest = item.digest if item.from_backing else None
        record.stand_in = record.share = None

    def _replaced(self, item: _Fetched, deadline: float) -> bool:
        span, fresh = item.span, item.span.retarget(item.memory)
        # On an accelerator somebody may keep the old memory, and lose nothing by it (`absent`).
        holders = self._holders(span) if self._device.is_host else None
        rests = 0
        while not replace(span, fresh, harmless([span], may_rest=True, again=0)[0], item.versions, holders=holders):
            rests = rests + 1 if frames_rest() else 0
            if rests > _RESTS or time.monotonic() > deadline:
                return False  # where nobody runs, look after look, it is no operation that uses it
            if versions(span) == item.versions:
                time.sleep(0.001)
            else:
                self._fetch(item)  # it was written to since
        return True

    def _take_late_edits(self, item: _Fetched) -> None:
        """What was written through ``.data`` after it was read comes along, unless more was written to the new memory.

        Nobody reaches the old memory any more, so what it holds is the last word of it.
        """
        span = item.span
        if item.from_backing and was_written(span.address, span.nbytes) is False:
            return
        if digest([span.bytes]) == item.digest:
            return
        if item.late or digest(self._device.read(item.memory)) == item.digest:
            item.late = True  # a write that failed half way must not look like somebody else's
            self._device.write(item.memory, Digesting().from_ram(span.bytes))
        item.digest, item.from_backing = None, False


def _in_use(span: Span) -> ModelInUseError:
    if frames_rest():
        why = (
            "Something that was computed from the evicted weights, outside any call of the model, still refers to them:"
            " an autograd graph, a trace or a frozen script.\nDelete it, or compute it under torch.no_grad() or: "
            "with mgr[NAME].lease() as model:"
        )
    else:
        why = (
            "Another thread has been computing with the evicted weights directly, outside any call of the model.\n"
            "Wait for it, or let it use: with mgr[NAME].lease() as model:"
        )
    return ModelInUseError(
        f"The weights of {span.names[0]!r} cannot be brought to the device.\nTheir {span.nbytes} bytes are in use.\n"
        f"{why}"
    )


def _lost(span: Span, file: WeightFile) -> BackingLostError:
    return BackingLostError(
        f"The weights of {span.names[0]!r} cannot be loaded again.\n"
        f"Their {span.nbytes} bytes in {file.path} are not those that were there.\n"
        "The file was written to, or cut short, after the model was loaded from it.\n"
        "Restore the file, or load the model anew: %load_model NAME SOURCE"
    )
