"""A model's body: its weights in blocks, what backs each of them, and the moves between device and file.

Words:

* a *record* remembers about one span what the tensors cannot tell: where its true bytes lie outside the device (its
  *backing*), their hash, and the private mapping that stands in while it is out
* a *block* is a run of spans in module order, up to ``block_bytes``; it leaves and returns whole
* an *origin* is the place in a weight file that a tensor is believed to come from; it becomes a backing when the bytes
  have been proven equal

A move never loses a byte: the new memory is made first, the old is kept until the new has been proven, and a block that
could not move whole is put back. All sizes are bytes.

Lock: none of its own. The manager lets one thread at a time look at or move a body. It refuses to know tiers, leases
and who asked.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Iterable, Mapping, MutableMapping

import torch

from vram_magic.devices.base import Device
from vram_magic.devices.meter import Reservation
from vram_magic.errors import BackingLostError
from vram_magic.residency.checkpoint import TensorRange, WeightFile, torch_dtype_name
from vram_magic.residency.digest import digest, digest_file, read_digested
from vram_magic.residency.mapping import bury, map_range, memory_at, was_written
from vram_magic.residency.parts import Block, Figures, Kept, Key, Record
from vram_magic.residency.spans import Span, survey
from vram_magic.residency.spill import SpillStore
from vram_magic.residency.swap import SHARED, busy, harmless, replace

__all__ = ["Body"]

_LOAD_PATIENCE_S = 0.25  # how long a load waits, in all, for operations that read evicted weights directly


class Body:
    """The weights of some modules on one device."""

    def __init__(
        self,
        modules: Iterable[tuple[str, torch.nn.Module]],
        device: Device,
        store: SpillStore,
        block_bytes: int,
        origins: Mapping[str, TensorRange] | None = None,
        shared: MutableMapping[Key, Record] | None = None,
    ) -> None:
        self._modules = [(prefix, weakref.ref(module)) for prefix, module in modules]
        self._device = device
        self._store = store
        self._block_bytes = block_bytes
        self._origins = dict(origins or {})
        # Bodies that share weights share their records: one that moves them tells the others.
        self._shared = weakref.WeakValueDictionary[Key, Record]() if shared is None else shared
        self._records: dict[Key, Record] = {}
        self.figures = Figures()
        self.staying = ""
        """Why some block could not leave when it was last asked to."""
        self.wants_copies = False
        """Leave as a copy of our own, even where a file holds the weights (residency "host")."""
        self.complete = False
        """Every weight that can be on the device is there: nothing to load."""

    # ---------------------------------------------------------------------------------------------------- looking

    def look(self) -> list[Block]:
        """The blocks as they are now; refreshes `figures`."""
        spans = survey(self._roots(), self._device, self._stands_in)
        self._match(spans)
        blocks = self._grouped([span for span in spans if not span.fixed])
        self._measure(spans, blocks)
        return blocks

    def look_for_idle(self, *, may_rest: bool = False) -> list[Block]:
        """`look`, with ``kept`` filled in for resident blocks that are in use.

        ``may_rest``: the asker is in no operation, so its frames that refer to a weight do not use it.
        """
        blocks = self.look()
        for block in blocks:
            spans = [span for span in block.spans if span.owned]
            reasons = map(busy, spans, harmless(spans, may_rest=may_rest))
            block.kept = next(filter(None, reasons), "")
        self.staying = next((block.kept for block in blocks if block.kept), "")
        return blocks

    def proven(self, block: Block) -> bool:
        """Whether every resident weight of the block is unmodified and safe in its own readable, unchanged file."""
        return all(self._back(span) and not self._records[span.key].spilled for span in block.spans if span.owned)

    def _roots(self) -> list[tuple[str, torch.nn.Module]]:
        return [(prefix, module) for prefix, ref in self._modules if (module := ref()) is not None]

    def _stands_in(self, storage: torch.UntypedStorage) -> bool:
        record = self._shared.get((storage._cdata, 0))
        return record is not None and record.mapping is not None

    def _match(self, spans: list[Span]) -> None:
        """Keeps the records of spans that are still there, starts new ones, lets go of the rest."""
        known, self._records = self._records, {}
        for span in spans:
            record = self._shared.get(span.key)
            if record is None or record.nbytes != span.nbytes:
                record = Record(span.nbytes, origin=self._origin_of(span))
            self._remember(span.key, record)
            if span.nbytes and not record.counted and span.owned:
                self._device.adopt(span.tensors[0])
                record.counted = True
        self._uncount(record for key, record in known.items() if self._records.get(key) is not record)

    def _remember(self, key: Key, record: Record, before: Key | None = None) -> None:
        """Lists a record under its span's key, and no longer under the one before: addresses are used again."""
        if before is not None:
            self._records.pop(before, None)
            self._shared.pop(before, None)
        self._records[key] = self._shared[key] = record

    def _uncount(self, gone: Iterable[Record]) -> None:
        for record in gone:
            if record.counted:
                record.counted = False  # who shares it and still has it counts it again
                self._device.freed(record.nbytes)

    @property
    def keys(self) -> set[Key]:
        """The spans seen by the last look, to tell which bodies share memory."""
        return set(self._records)

    def forget(self) -> None:
        """Lets go of all records: spill files that nobody else needs are removed."""
        self._uncount(self._records.values())
        self._records.clear()

    def _origin_of(self, span: Span) -> TensorRange | None:
        dtype = None if span.fixed else span.contiguous_dtype()
        for name in span.names if dtype is not None else ():
            found = self._origins.get(name)
            if found and _fits(found, span, dtype):
                return found
        return None

    def _grouped(self, spans: list[Span]) -> list[Block]:
        blocks: list[Block] = []
        for span in spans:
            if not blocks or blocks[-1].total_bytes + span.nbytes > self._block_bytes:
                blocks.append(Block())
            blocks[-1].spans.append(span)
            blocks[-1].total_bytes += span.nbytes
            blocks[-1].resident_bytes += span.nbytes if span.owned else 0
        return blocks

    def _measure(self, spans: list[Span], blocks: list[Block]) -> None:
        sums = {"device": 0, "host": 0, "disk": 0}
        for span in spans:
            sums[self._home(span)] += span.nbytes
        self.figures = Figures(
            total_bytes=sum(span.nbytes for span in spans),
            device_bytes=sums["device"],
            host_bytes=sums["host"],
            disk_bytes=sums["disk"],
            blocks=tuple((block.total_bytes, block.resident_bytes) for block in blocks),
            kept=tuple(Kept(span.names[0], span.nbytes, span.fixed) for span in spans if span.fixed),
            copied=tuple(span.names[0] for span in spans if self._records[span.key].edited and span.names),
        )
        self.complete = all(block.resident_bytes == block.total_bytes for block in blocks)

    def _home(self, span: Span) -> str:
        if span.nbytes == 0 or span.owned:
            return "device"
        if self._records[span.key].spilled:
            return "host"
        return "disk" if span.pages else "device"

    # ---------------------------------------------------------------------------------------------------- leaving

    def evict(self, blocks: list[Block], *, only_proven: bool = False, may_rest: bool = False) -> tuple[int, list[str]]:
        """Moves the blocks out; returns the bytes that left and why others stayed.

        Each block is whole on one side afterwards. An OSError (a full disk) is a reason to stay, not an error.
        ``only_proven``: leave only what is safe in its own file, and copy nothing.
        """
        freed, stayed = 0, []
        for block in reversed(blocks):
            try:
                left, reason = self._evict_block(block, only_proven=only_proven, may_rest=may_rest)
            except OSError as error:
                left, reason = 0, error.strerror or str(error)
            freed += left
            if reason:
                stayed.append(reason)
        self.look()
        self.staying = stayed[0] if stayed else self.staying
        return freed, stayed

    def _evict_block(self, block: Block, *, only_proven: bool, may_rest: bool) -> tuple[int, str]:
        spans = [span for span in block.spans if span.owned]
        before = [self._back(span) for span in spans]
        if self.wants_copies and not only_proven:
            before = [safe and self._records[span.key].spilled for span, safe in zip(spans, before, strict=True)]
        unsafe = [span for span, safe in zip(spans, before, strict=True) if not safe]
        if unsafe and only_proven:
            return 0, "it was edited, or its file does not hold it"
        if unsafe:
            self._spill(unsafe)
            if any(digest(span.bytes) != self._records[span.key].digest for span in unsafe):
                return 0, "it was edited while it was leaving"
        return self._leave(spans, may_rest=may_rest)

    def _back(self, span: Span) -> bool:
        """Whether the record's backing holds (or is about to be proven to hold) the span's bytes."""
        record, now = self._records[span.key], digest(span.bytes)
        if record.file is None or (record.spilled and not self.wants_copies):
            self._prove_origin(record, now)
        return record.file is not None and record.file.unchanged() and record.digest == now

    def _prove_origin(self, record: Record, now: int) -> None:
        """Makes the origin the backing if it holds these very bytes."""
        origin = record.origin
        if origin is None or record.edited or not origin.file.unchanged():
            return
        if digest_file(origin.file, origin.offset, record.nbytes) == now:
            record.file, record.offset, record.digest = origin.file, origin.offset, now
        else:
            record.edited = True

    def _spill(self, spans: list[Span]) -> None:
        views = [span.bytes for span in spans]
        # Hashed before they are written: an edit in between shows as a difference, and the block stays.
        digests = list(map(digest, views))
        file, offsets = self._store.write(views)
        for span, offset, found in zip(spans, offsets, digests, strict=True):
            record = self._records[span.key]
            record.file, record.offset, record.digest = file, offset, found
            record.edited |= record.origin is not None and not self.wants_copies

    def _leave(self, spans: list[Span], *, may_rest: bool) -> tuple[int, str]:
        """All spans become mappings of their backings, or none does."""
        moved: list[tuple[Span, Record]] = []
        reason = ""
        for span, references in zip(spans, harmless(spans, may_rest=may_rest), strict=True):
            record = self._records[span.key]
            assert record.file is not None  # noqa: S101  `_back` or `_spill` has seen to it
            record.mapping = map_range(record.file.fd, record.offset, record.nbytes)
            if not replace(span, span.retarget(record.mapping), references):
                record.mapping = None
                reason = busy(span, references) or "it was in use at that moment"
                break
            moved.append((span, record))
        if not reason and any(digest(span.bytes) != record.digest for span, record in moved):
            # Nobody but us can reach the old memory any more, so what it holds is the last word.
            reason = "it was edited while it was leaving"
        if reason:
            _undo(moved)
            return 0, reason
        return sum(self._let_go(span, record) for span, record in moved), ""

    def _let_go(self, span: Span, record: Record) -> int:
        assert record.mapping is not None  # noqa: S101
        before = span.key
        span.moved_to(record.mapping, owned=False)
        self._remember(span.key, record, before)
        self._uncount([record])
        return record.nbytes

    # ---------------------------------------------------------------------------------------------------- coming back

    def missing_bytes(self) -> int:
        """Bytes that a load would bring to the device."""
        return sum(block.total_bytes - block.resident_bytes for block in self.look())

    def load(self, reservation: Reservation) -> int:
        """Brings every block back, into memory that the reservation pays for; returns the bytes.

        First everything is read, then everything is put in place: a failure leaves the body as it was. Raises
        `BackingLostError` when a file no longer holds what left.
        """
        fetched: list[tuple[Span, torch.Tensor, int | None]] = []
        arrived = 0
        try:
            for span in self._absent():
                memory = self._device.allocate(span.nbytes, reservation)
                fetched.append((span, memory, None))
                fetched[-1] = (span, memory, self._fetch(span, memory))
            deadline = time.monotonic() + _LOAD_PATIENCE_S
            while fetched:
                arrived += self._arrive(*fetched.pop(), deadline)
        finally:
            for span, memory, _ in fetched:  # what was fetched for nothing goes at once, whoever keeps the traceback
                memory.untyped_storage().resize_(0)
                self._device.freed(span.nbytes)
            fetched.clear()
        self.look()
        return arrived

    def _absent(self) -> list[Span]:
        """What a load brings; a mapping that others share too (a ``state_dict()`` that is held) stays for them."""
        absent: list[Span] = []
        shared: list[Span] = []
        for span in (span for block in self.look() for span in block.spans if not span.owned):
            holders = int(self._records[span.key].mapping is not None)
            (shared if busy(span, holders=holders) == SHARED else absent).append(span)
        if shared:
            self.staying = f"{len(shared)} weights are computed from their file, since {SHARED}"
        return absent

    def _fetch(self, span: Span, memory: torch.Tensor) -> int | None:
        """Fills device memory with the span's true bytes; returns their hash when they come from its backing."""
        record, room = self._records[span.key], memory_at(memory.data_ptr(), span.nbytes)
        self._adopt_mapped_file(span, record)
        self._check_file(span, record)
        # A record may be of memory that was here before and is gone. What is mapped here is certain: only if it is the
        # very place that the record names is the file read instead of it.
        here = record.file is not None and span.file_place == record.place
        if record.file is None or not here or not self._untouched(span, record):
            record.file, record.edited = None, record.edited or (here and record.origin is not None)
            room[:] = span.bytes
            return None
        found = read_digested(record.file, record.offset, room)
        if record.digest is not None and found != record.digest:
            raise _lost(span, record.file)
        return found

    def _check_file(self, span: Span, record: Record) -> None:
        """A mapped file that was cut kills whoever reads beyond its end; one that was rewritten shows other weights.

        Where the hash is known it decides; a weight that a loader mapped has none yet, so any change is a loss.
        """
        origin = record.origin
        mapped = span.file_place is not None and origin is not None
        file = record.file or (origin.file if mapped and origin is not None else None)
        if file is None or span.file_place is None:
            return
        if span.file_place[:2] != (file.identity.device, file.identity.inode) or file.unchanged():
            return
        if record.digest is None or os.fstat(file.fd).st_size < file.identity.size:
            raise _lost(span, file)

    def _adopt_mapped_file(self, span: Span, record: Record) -> None:
        """A weight that a loader mapped straight from its origin needs no other proof than the place."""
        origin = record.origin
        if record.file is None and origin is not None and origin.file.unchanged():
            identity = origin.file.identity
            if span.file_place == (identity.device, identity.inode, origin.offset):
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
        return digest(span.bytes) == known

    def _arrive(self, span: Span, memory: torch.Tensor, found: int | None, deadline: float = 0) -> int:
        record = self._records[span.key]
        if not self._replaced(span, span.retarget(memory), int(record.mapping is not None), deadline):
            self._device.freed(span.nbytes)
            return 0
        found = self._with_late_edits(span, memory, found)
        record.file = None if found is None else record.file
        record.edited |= found is None and record.origin is not None and record.digest is not None
        record.mapping = None
        record.digest, record.counted = found, True
        before = span.key
        span.moved_to(memory, owned=True)
        self._remember(span.key, record, before)
        return span.nbytes

    def _replaced(self, span: Span, fresh: list[torch.Tensor], holders: int, deadline: float) -> bool:
        while not replace(span, fresh, *harmless([span], may_rest=True), holders=holders):
            if time.monotonic() > deadline:
                return False  # someone computes with the mapping; it gives the right values where it is
            time.sleep(0.001)
        return True

    def _with_late_edits(self, span: Span, memory: torch.Tensor, found: int | None) -> int | None:
        """What was written to the mapping after it was read comes along: nobody reaches it now, so it is the last word.

        Returns the hash of the backing, or None when the weights differ from it.
        """
        if found is not None and was_written(span.address, span.nbytes) is False:
            return found
        room = memory_at(memory.data_ptr(), span.nbytes)
        if digest(span.bytes) == (digest(room) if found is None else found):
            return found
        room[:] = span.bytes
        return None

    def read_back_spilled(self, reservation: Reservation | None) -> None:
        """Copies spilled weights into memory that the reservation pays for; then forgets all records.

        Without a reservation they stay mappings: the mapping keeps its file's bytes, also once the file has no name.
        """
        if reservation is not None:
            for span in [span for block in self.look() for span in block.spans]:
                if self._records[span.key].spilled and not span.owned:
                    memory = self._device.allocate(span.nbytes, reservation)
                    memory_at(memory.data_ptr(), span.nbytes)[:] = span.bytes
                    self._arrive(span, memory, None)
        self.forget()


def _lost(span: Span, file: WeightFile) -> BackingLostError:
    return BackingLostError(
        f"The weights of {span.names[0]!r} cannot be loaded again.\n"
        f"Their {span.nbytes} bytes in {file.path} are not those that were there.\n"
        "The file was written to, or cut short, after the model was loaded from it.\n"
        "Restore the file, or load the model anew: %load_model NAME SOURCE"
    )


def _undo(moved: list[tuple[Span, Record]]) -> None:
    for span, record in moved:
        for tensor, before in zip(span.tensors, span.original(), strict=True):
            tensor.data = before
        if record.mapping is not None:
            bury(record.mapping.untyped_storage())
        record.mapping = None


def _fits(origin: TensorRange, span: Span, dtype: torch.dtype | None) -> bool:
    """Whether mapping the range would give the very bytes: same type and size, and aligned for the type."""
    same = getattr(torch, torch_dtype_name(origin.dtype)) is dtype and origin.nbytes == span.nbytes
    return same and origin.offset % span.tensors[0].element_size() == 0
