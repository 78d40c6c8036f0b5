"""The records of a body: what is remembered of each span from one look to the next, and shared between bodies.

A record is listed under its span's *key*, the storage's address and first byte. Addresses are used again, so a key is
given up whenever its memory is. Bodies that share weights share their records: one that moves them tells the others.
Sizes are bytes. Lock: none of its own; the manager lets one thread at a time look at or move a body.
"""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping

import torch

from vram_magic.devices.base import Device
from vram_magic.residency.checkpoint import TensorRange, torch_dtype_name
from vram_magic.residency.parts import Key, Record
from vram_magic.residency.spans import Span
from vram_magic.residency.swap import storage_use_count

__all__ = ["Records", "booked"]

_OUR_USES = 2  # of the storage of what stands in: the record's tensor, and the object by which it is asked


def booked(step: Callable[[], None]) -> None:
    """Runs a step that only writes down what has happened, so that a fault in it does not leave that untold.

    It is done once more then, and the fault is raised all the same. The step must bear being begun twice.
    """
    try:
        step()
    except BaseException as fault:
        traceback.clear_frames(fault.__traceback__)  # they hold memory, which would look like its being used
        step()
        raise


class Records:
    """The records of one body, some of them shared with others."""

    def __init__(
        self, device: Device, origins: Mapping[str, TensorRange], shared: MutableMapping[Key, Record] | None
    ) -> None:
        self._device = device
        self._origins = dict(origins)
        self._shared = weakref.WeakValueDictionary[Key, Record]() if shared is None else shared
        self._own: dict[Key, Record] = {}
        self.put_aside: list[Record] = []
        """Those of weights that are out and not in the modules, while somebody still has them: `functional_call` puts
        others in their place for the time of a call."""

    def __getitem__(self, span: Span) -> Record:
        return self._own[span.key]

    @property
    def keys(self) -> set[Key]:
        """The spans seen by the last look, to tell which bodies share memory."""
        return set(self._own)

    def stands_in(self, storage: torch.UntypedStorage) -> bool:
        """Whether the storage is what weights that are out lie over."""
        record = self._shared.get((storage._cdata, 0))
        if record is None or record.stand_in is None:
            return False
        return bool(record.stand_in.untyped_storage()._cdata == storage._cdata)

    def place_of(self, span: Span) -> tuple[int, int, int] | None:
        """(device, inode, offset) of the file that the span's memory maps; None where it maps none."""
        if not span.stands_in:
            return span.file_place
        record = self[span]
        return None if record.share is not None else record.place

    def match(self, spans: list[Span]) -> None:
        """Keeps the records of spans that are still there, starts new ones, lets go of the rest."""
        known, self._own = self._own, {}
        for span in spans:
            record = self._shared.get(span.key)
            if record is None or record.nbytes != span.nbytes:
                record = Record(span.nbytes, origin=self._origin_of(span))
            self._remember(span.key, record)
            if span.nbytes and not record.counted and span.owned:
                self._device.adopt(span.tensors[0])
                record.counted = True
        mine = set(map(id, self._own.values()))
        missed = [record for record in (*known.values(), *self.put_aside) if id(record) not in mine]
        self.put_aside = [record for record in missed if _held_elsewhere(record)]
        kept = set(map(id, self.put_aside))
        self._let_go(record for record in missed if id(record) not in kept)

    def moved(self, span: Span, memory: torch.Tensor, *, owned: bool) -> None:
        """Told after a span's tensors lie over ``memory``: lists its record under the new key."""
        record, before = self._own[span.key], span.key
        self._remember((memory.untyped_storage()._cdata, 0), record)
        span.moved_to(memory, owned=owned)
        if before != span.key:  # else begun once before (`booked`)
            self._own.pop(before, None)
            self._shared.pop(before, None)
        if owned:
            record.counted = True  # `allocate` has counted it
        else:
            self._uncount([record])

    def forget(self) -> None:
        """Lets go of all records: spill files and copies that nobody else needs go."""
        self._let_go([*self._own.values(), *self.put_aside])
        self._own.clear()
        self.put_aside.clear()

    def shared(self, span: Span) -> bool:
        """Whether another model has the weight too."""
        return len(self._own[span.key].owners) > 1

    def _remember(self, key: Key, record: Record) -> None:
        self._own[key] = self._shared[key] = record
        record.owners.add(self)

    def _let_go(self, gone: Iterable[Record]) -> None:
        for record in gone:
            record.owners.discard(self)
            self._uncount([record])

    def _uncount(self, gone: Iterable[Record]) -> None:
        for record in gone:
            if record.counted:
                record.counted = False  # who shares it and still has it counts it again
                self._device.freed(record.nbytes)

    def _origin_of(self, span: Span) -> TensorRange | None:
        dtype = None if span.fixed else span.contiguous_dtype()
        for name in span.names if dtype is not None else ():
            found = self._origins.get(name)
            if found and _fits(found, span, dtype):
                return found
        return None


def _held_elsewhere(record: Record) -> bool:
    """Whether tensors that are not ours lie over what stands in for the weight."""
    if record.stand_in is None:
        return False
    storage = record.stand_in.untyped_storage()
    return storage_use_count(storage._cdata) > _OUR_USES


def _fits(origin: TensorRange, span: Span, dtype: torch.dtype | None) -> bool:
    """Whether mapping the range would give the very bytes: same type and size, and aligned for the type."""
    same = getattr(torch, torch_dtype_name(origin.dtype)) is dtype and origin.nbytes == span.nbytes
    return same and origin.offset % span.tensors[0].element_size() == 0
