"""A model's body: its weights in blocks, looked at anew each time, and the moves between device, host and file.

Words:

* a *record* remembers about one span what the tensors cannot tell: where its true bytes lie outside the device (its
  *backing*), their hash, and what stands in while it is out
* a *block* is a run of spans in module order, up to ``block_bytes``; it leaves and returns whole
* an *origin* is the place in a weight file that a tensor is believed to come from; it becomes a backing when the bytes
  have been proven equal

A move never loses a byte: the new memory is made first, the old is kept until the new has been proven, and a block that
could not move whole is put back. All sizes are bytes.

Lock: none of its own. The manager lets one thread at a time look at or move a body. It refuses to know tiers, leases
and who asked. Going out is `Leaving`'s, coming back `Arriving`'s, remembering `Records`'.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Mapping, MutableMapping

import torch

from vram_magic.devices.base import Device
from vram_magic.devices.host import HostMemory
from vram_magic.devices.meter import Reservation
from vram_magic.residency.arriving import Arriving
from vram_magic.residency.checkpoint import TensorRange
from vram_magic.residency.graphs import kept_for_backward
from vram_magic.residency.leaving import Leaving
from vram_magic.residency.parts import Block, Figures, Kept, Key, Record
from vram_magic.residency.records import Records
from vram_magic.residency.spans import Span, survey
from vram_magic.residency.spill import SpillStore
from vram_magic.residency.swap import SHARED, busy, harmless

__all__ = ["Body"]


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
        host: HostMemory | None = None,
    ) -> None:
        self._modules = [(prefix, weakref.ref(module)) for prefix, module in modules]
        self._device = device
        self._block_bytes = block_bytes
        self._records = Records(device, origins or {}, shared)
        self._leaving = Leaving(self._records, device, store, host or HostMemory(0))
        self._arriving = Arriving(self._records, device)
        self.figures = Figures()
        self.homes: tuple[str, ...] = ()
        """Where each block of ``figures`` is: ``"device"``, ``"host"`` or ``"disk"``; the larger part decides."""
        self.staying = ""
        """Why some block could not leave when it was last asked to."""
        self.complete = False
        """Every weight that can be on the device is there: nothing to load."""

    # ---------------------------------------------------------------------------------------------------- looking

    def look(self) -> list[Block]:
        """The blocks as they are now; refreshes `figures`."""
        spans = survey(self._roots(), self._device, self._records.stands_in)
        self._records.match(spans)
        blocks = self._grouped([span for span in spans if not span.fixed])
        self._measure(spans, blocks)
        return blocks

    def look_for_idle(self, *, may_rest: bool = False) -> list[Block]:
        """`look`, with ``kept`` filled in for resident blocks that are in use.

        ``may_rest``: the asker is in no operation, so its frames that refer to a weight do not use it.
        """
        blocks = self.look()
        spans = [span for block in blocks for span in block.spans if span.owned]
        kept = set() if self._device.is_host else kept_for_backward(spans)
        counts = dict(zip(spans, harmless(spans, may_rest=may_rest), strict=True))  # one look for all: it may wait
        for block in blocks:
            spans = [span for span in block.spans if span.owned]
            objections = [self._objection(span, kept) for span in spans]
            reasons = [*objections, *(busy(span, counts[span]) for span in spans)]
            block.kept = next(filter(None, reasons), "")
        self.staying = next((block.kept for block in blocks if block.kept), "")
        return blocks

    def _objection(self, span: Span, kept_for_backward: set[int]) -> str:
        """A gradient lies on the weight's device: an optimizer's step while the weight is out would fail."""
        if kept_for_backward and not kept_for_backward.isdisjoint(map(id, span.tensors)):
            return "an operation or an autograd graph uses it"
        if self._device.is_host or all(tensor.grad is None for tensor in span.tensors if tensor.is_leaf):
            return ""
        return "it has a gradient; free it with optimizer.zero_grad()"

    def doubtful(self, block: Block) -> str:
        """Why not every resident weight of the block is unmodified and safe in its own readable, unchanged file."""
        return self._leaving.doubtful([span for span in block.spans if span.owned])

    def demoted(self, block: Block) -> bool:
        """Whether all that is resident of the block has left before although it asked to stay."""
        return all(self._records[span].demoted for span in block.spans if span.owned)

    def demote(self, blocks: list[Block]) -> None:
        """Flags the blocks, so that they may leave."""
        for span in (span for block in blocks for span in block.spans):
            self._records[span].demoted = True

    def promote(self, blocks: list[Block] | None = None) -> None:
        """Takes the flag back: of what has not left of the blocks after all, or of everything."""
        if blocks is None:
            spans = [span for block in self.look() for span in block.spans]
        else:
            spans = [span for block in blocks for span in block.spans if span.owned]
        for span in spans:
            self._records[span].demoted = False
        self.look()

    @property
    def keys(self) -> set[Key]:
        """The spans seen by the last look, to tell which bodies share memory."""
        return self._records.keys

    @property
    def surely_complete(self) -> bool:
        """`complete`, and no weight that is out can come back into the modules by itself."""
        return self.complete and not self._records.put_aside

    def _roots(self) -> list[tuple[str, torch.nn.Module]]:
        return [(prefix, module) for prefix, ref in self._modules if (module := ref()) is not None]

    def _grouped(self, spans: list[Span]) -> list[Block]:
        blocks: list[Block] = []
        before = None
        for span in spans:
            # About a shared weight others have a say: it must not keep its neighbours.
            shared = self._records.shared(span)
            if shared != before or blocks[-1].total_bytes + span.nbytes > self._block_bytes:
                blocks.append(Block())
            before = shared
            blocks[-1].spans.append(span)
            blocks[-1].total_bytes += span.nbytes
            blocks[-1].resident_bytes += span.nbytes if span.owned else 0
        return blocks

    def _measure(self, spans: list[Span], blocks: list[Block]) -> None:
        homes = {id(span): self._home(span) for span in spans}
        sums = _by_home(spans, homes)
        self.figures = Figures(
            total_bytes=sum(span.nbytes for span in spans),
            device_bytes=sums["device"],
            host_bytes=sums["host"],
            spilled_bytes=sum(span.nbytes for span in spans if not span.owned and self._records[span].spilled),
            disk_bytes=sums["disk"],
            demoted_bytes=sum(span.nbytes for span in spans if self._records[span].demoted),
            blocks=tuple((block.total_bytes, block.resident_bytes) for block in blocks),
            kept=tuple(Kept(span.names[0], span.nbytes, span.fixed) for span in spans if span.fixed),
            copied=tuple(span.names[0] for span in spans if self._records[span].edited and span.names),
        )
        by_block = (_by_home(block.spans, homes) for block in blocks)
        self.homes = tuple(max(sums, key=sums.__getitem__) for sums in by_block)
        self.complete = all(block.resident_bytes == block.total_bytes for block in blocks)

    def _home(self, span: Span) -> str:
        if span.nbytes == 0 or span.owned:
            return "device"
        if self._records[span].spilled:
            return "host"
        if self._records.place_of(span):
            return "disk"
        return "device" if self._device.is_host else "host"

    # ---------------------------------------------------------------------------------------------------- moving

    def evict(
        self, blocks: list[Block], *, only_proven: bool = False, may_rest: bool = False, residency: str = "auto"
    ) -> tuple[int, list[str]]:
        """Moves the blocks out, from the tail; returns the bytes that left and why others stayed.

        Each block is whole on one side afterwards. An OSError (a full disk) is a reason to stay, not an error.
        ``only_proven``: leave only what is safe in its own file, and copy nothing.
        """
        self._leaving.residency = residency
        freed, stayed = 0, []
        for block in reversed(blocks):
            spans = [span for span in block.spans if span.owned]
            try:
                left, reason = self._leaving.leave(spans, only_proven=only_proven, may_rest=may_rest)
            except OSError as error:
                left, reason = 0, error.strerror or str(error)
            freed += left
            if reason:
                stayed.append(reason)
        self.look()
        self.staying = stayed[0] if stayed else self.staying
        return freed, stayed

    def missing_bytes(self) -> int:
        """Bytes that a load would take on the device."""
        missing = [span for block in self.look() for span in block.spans if not span.owned]
        return sum(self._device.footprint(span.nbytes) for span in missing)

    def load(self, reservation: Reservation) -> int:
        """Brings every block back, into memory that the reservation pays for; returns the bytes.

        A failure leaves the body as it was. Raises `BackingLostError` when a file no longer holds what left.
        """
        spans, stay = self._arriving.absent([span for block in self.look() for span in block.spans])
        if stay:
            self.staying = f"{stay} weights are computed from their file, since {SHARED}"
        try:
            arrived = self._arriving.load(spans, reservation)
        except BaseException:
            self._make_whole()
            raise
        self.look()
        return arrived

    def _make_whole(self) -> None:
        """After a load that failed half way: a block that is partly there leaves again."""
        torn = [block for block in self.look() if 0 < block.resident_bytes < block.total_bytes]
        if torn:
            self.evict(torn, may_rest=True)

    # ------------------------------------------------------------------------------------------------ handing back

    def hand_back_bytes(self) -> int:
        """Room on the device that handing the body back takes, as of the last look."""
        figures = self.figures
        if self._device.is_host:
            return figures.host_bytes
        return 0 if figures.device_bytes in (0, figures.total_bytes) else self.missing_bytes()

    def hand_back(self, reservation: Reservation | None) -> None:
        """Leaves the weights as the user can do with them by himself; then forgets all records.

        What was spilled is read back. On an accelerator a body that is partly there is brought in whole; without a
        reservation it is moved out whole. A mapping keeps its file's bytes, also once the file has no name.
        """
        try:
            if not self._device.is_host:
                self._to_one_side(reservation)
                self._leaving.read_back(self._spilled())
            elif reservation is not None:
                self._read_back(reservation)
        finally:
            self._records.forget()

    def _to_one_side(self, reservation: Reservation | None) -> None:
        blocks = self.look()
        if not self.figures.device_bytes or self.complete:
            return
        if reservation is not None:
            with contextlib.suppress(torch.OutOfMemoryError):  # the device refuses what the books allow
                self.load(reservation)
                return
        self.evict(blocks, may_rest=True)

    def _read_back(self, reservation: Reservation) -> None:
        self._arriving.load(self._spilled(), reservation)

    def _spilled(self) -> list[Span]:
        spans = [span for block in self.look() for span in block.spans]
        return [span for span in spans if self._records[span].spilled and not span.owned]


def _by_home(spans: Iterable[Span], homes: Mapping[int, str]) -> dict[str, int]:
    sums = {"device": 0, "host": 0, "disk": 0}
    for span in spans:
        sums[homes[id(span)]] += span.nbytes
    return sums
