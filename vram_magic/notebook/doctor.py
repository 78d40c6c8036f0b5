"""``%vram doctor``: the bytes on the device that no managed model owns, by who holds them, and what frees them.

Each storage is counted once. Python's collector knows all tensors that Python has seen; the holders in the notebook are
asked what they lead to; what is left of the device's own count is memory that only C++ refers to. A `Diagnosis` is
numbers and text, so keeping one keeps nothing alive. Sizes are bytes, as the device's allocator counts them. Takes no
lock but the registry's, for a list. Refuses to delete what has a name, and to know how anything is moved.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vram_magic.models.managed import TorchModel
from vram_magic.notebook.current import device_of, managed_models
from vram_magic.notebook.debris import let_go
from vram_magic.notebook.holders import FREE, Holder, Kind, command_of, holders_in, label_of, stops_of, to_blame
from vram_magic.notebook.report import shortened
from vram_magic.notebook.walk import Gauge, Piece, Walk, gradient_of, is_a
from vram_magic.residency.living import instances
from vram_magic.sizes import format_size

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from vram_magic.devices.base import Device
    from vram_magic.vram_manager import VRAMManager

__all__ = ["Diagnosis", "Finding", "examine", "let_go_of_what_is_safe"]

_SHOWN = 20
_HOLDER_WIDTH = 60


@dataclass(frozen=True, slots=True)
class Finding:
    """Memory of one holder."""

    size_bytes: int
    holder: str
    command: str
    """What frees it; empty where nobody can say."""


@dataclass(frozen=True, slots=True, repr=False)
class Diagnosis:
    """What holds the device's memory at one moment."""

    device: str
    findings: tuple[Finding, ...]
    """Parts of `used_bytes` that no managed model owns, the largest first."""
    besides: tuple[Finding, ...]
    """What holds the device's memory, but is not used by this kernel's tensors."""
    managed_bytes: int
    used_bytes: int

    @property
    def explained_bytes(self) -> int:
        """Managed and found. Tensors that are older than the manager are found, but were never counted as used."""
        return self.managed_bytes + sum(finding.size_bytes for finding in self.findings)

    def __repr__(self) -> str:
        if not self.findings and not self.besides:
            return f"{self.device}: nothing but managed models holds memory"
        lines = _lines([*_shortlist(self.findings), *self.besides])
        return "\n".join([f"{self.device}: memory that no managed model owns", *lines, self._sum])

    @property
    def _sum(self) -> str:
        managed, all_ = format_size(self.managed_bytes), format_size(self.explained_bytes)
        older = self.explained_bytes - self.used_bytes
        note = f" ({format_size(older)} is older than the manager, and does not count)" if older > 0 else ""
        return f"managed models: {managed}, all: {all_} of {format_size(self.used_bytes)} used{note}"


def examine(shell: InteractiveShell, manager: VRAMManager) -> Diagnosis:
    """Looks for everything that holds memory of the device; moves and frees nothing."""
    device = device_of(manager)
    return _Examination(shell, manager, Gauge(device)).diagnosis(_besides(manager, device))


def let_go_of_what_is_safe(shell: InteractiveShell, manager: VRAMManager) -> str:
    """Frees the last failure's frames, what only cycles hold, and torch's cache; tells the bytes, measured."""
    device = device_of(manager)
    used, cached = manager.used_bytes, _cached_bytes(device)
    let_go(shell)
    gc.collect()
    released = max(used - manager.used_bytes, 0)
    cached = max(cached, _cached_bytes(device))  # what was released went there first
    if cached and not device.capturing():
        torch.accelerator.empty_cache()
    returned = max(cached - _cached_bytes(device), 0)
    tail = f", {format_size(returned)} of torch's cache returned to the device" if returned else ""
    return f"freed {format_size(released)}{tail}"


class _Examination:
    """One look around. It holds no tensor; ids of storages are good for as long as nobody frees them meanwhile."""

    def __init__(self, shell: InteractiveShell, manager: VRAMManager, gauge: Gauge) -> None:
        self._shell = shell
        self._manager = manager
        self._gauge = gauge
        self._managed: set[int] = set()
        self._pieces: dict[int, Piece] = {}
        self._holders: dict[int, list[Holder]] = {}
        self._cut_short = False

    def diagnosis(self, besides: tuple[Finding, ...]) -> Diagnosis:
        for handle in self._manager.models.values():
            _ = handle.state  # asking is looking
        models = managed_models(self._manager)
        torch_models = [model for model in models if isinstance(model, TorchModel)]
        self._managed = {key for model in torch_models for key, _ in model.body.keys}
        self._see_all(torch_models)
        declared = sum(model.device_bytes for model in models if model not in torch_models)
        managed = declared + sum(piece.size_bytes for key, piece in self._pieces.items() if key in self._managed)
        used = self._manager.used_bytes
        findings = [*self._held(), *self._nameless()]
        unseen = used - managed - sum(finding.size_bytes for finding in findings)
        if unseen > 0:
            findings.append(Finding(unseen, *_IN_CPP))
        return Diagnosis(self._manager.device, _sorted(findings), besides, managed, used)

    def _see_all(self, models: list[TorchModel]) -> None:
        for tensor in instances(torch.Tensor):
            self._see(tensor, None)
            self._see_gradient(tensor, _NOBODY)
        walk = Walk(stops_of(self._shell))
        for model in models:
            for tensor in walk.tensors_from(model.thing):
                self._see_gradient(tensor, _model_holder(model))
        for holder, thing in holders_in(self._shell, {id(model.thing) for model in models}):
            for tensor in walk.tensors_from(thing):
                self._see(tensor, holder)
                self._see_gradient(tensor, holder)
        self._cut_short = walk.cut_short

    def _see(self, tensor: torch.Tensor, holder: Holder | None) -> None:
        piece = self._gauge.piece_of(tensor)
        if piece is None:
            return
        known = self._pieces.get(piece.key)
        if known is None or piece.in_cpp:
            self._pieces[piece.key] = piece
        if piece.key in self._managed:
            return
        holders = self._holders.setdefault(piece.key, [])
        if holder is not None and holder not in holders:
            holders.append(holder)

    def _see_gradient(self, tensor: torch.Tensor, owner: Holder) -> None:
        if (gradient := gradient_of(tensor)) is not None:
            self._see(gradient, owner.of_gradients())

    # ------------------------------------------------------------------------------------------------ sums

    def _held(self) -> Iterator[Finding]:
        sums: dict[tuple[Holder, ...], int] = {}
        for key, holders in self._holders.items():
            if holders:
                blamed = to_blame(holders)
                sums[blamed] = sums.get(blamed, 0) + self._pieces[key].size_bytes
        for blamed, size in sums.items():
            yield Finding(size, label_of(blamed), command_of(blamed))

    def _nameless(self) -> Iterator[Finding]:
        """What Python knows of, and nothing in the notebook was found to lead to."""
        pieces = [p for key, h in self._holders.items() if not h and not (p := self._pieces[key]).in_cpp]
        if not pieces:
            return
        largest = max(pieces, key=lambda piece: (piece.size_bytes, piece.tensor)).tensor
        what = f"{len(pieces)} tensors, the largest {largest}" if len(pieces) > 1 else f"a tensor, {largest}"
        where = "that no name was seen to lead to" if self._cut_short else "that no name leads to"
        yield Finding(sum(piece.size_bytes for piece in pieces), f"{what}, {where}", f"{FREE}, if only cycles hold it")


_NOBODY = Holder(Kind.GRADIENT, "tensors that no name leads to", "", rank=9)
_IN_CPP = (
    "held inside C++, most often by the graph of a live output",
    "del the output or loss, or compute it under torch.no_grad()",
)


def _model_holder(model: TorchModel) -> Holder:
    command = f"vram_magic.manager()[{model.name!r}].model.zero_grad()"
    return Holder(Kind.GRADIENT, shortened(model.name), command if is_a(model.thing, torch.nn.Module) else "", rank=4)


def _besides(manager: VRAMManager, device: Device) -> tuple[Finding, ...]:
    found = []
    if cached := _cached_bytes(device):
        gaps, largest = _gap_bytes(device), _largest_piece_bytes(device)
        note = f", {format_size(gaps)} of it in gaps between tensors" if gaps else ""
        note += f", its largest piece {format_size(largest)}" if largest else ""
        found.append(Finding(cached, f"torch's cache{note}", FREE))
    outside = manager.outside(processes=True)
    if outside is not None and outside.foreign_bytes:
        names = f": {', '.join(outside.processes)}" if outside.processes else ""
        found.append(Finding(outside.foreign_bytes, f"other processes and the driver{names}", ""))
    return _sorted(found)


def _cached_bytes(device: Device) -> int:
    """What torch's allocator keeps of the device for reuse."""
    if device.is_host:
        return 0
    reserved = torch.accelerator.memory_reserved(device.torch_device)
    return max(reserved - torch.accelerator.memory_allocated(device.torch_device), 0)


def _gap_bytes(device: Device) -> int:
    """What of it lies between tensors in use, so that it cannot be given back."""
    try:
        return int(torch.accelerator.memory_stats(device.torch_device).get("inactive_split_bytes.all.current", 0))
    except RuntimeError:  # an allocator that keeps no such figures
        return 0


def _largest_piece_bytes(device: Device) -> int:
    """What can be had of it in one piece, where the allocator tells (CUDA's own does)."""
    index = device.torch_device.index
    try:
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        pieces = [block["size"] for one in segments if one["device"] == index for block in one["blocks"]
                  if block["state"] == "inactive"]  # fmt: skip
    except (AttributeError, KeyError, RuntimeError):
        return 0
    return max(pieces, default=0)


def _sorted(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(findings, key=lambda finding: (-finding.size_bytes, finding.holder, finding.command)))


def _shortlist(findings: tuple[Finding, ...]) -> list[Finding]:
    shown, rest = list(findings[:_SHOWN]), findings[_SHOWN:]
    if rest:
        shown.append(Finding(sum(finding.size_bytes for finding in rest), f"{len(rest)} smaller ones", ""))
    return shown


def _lines(findings: list[Finding]) -> list[str]:
    sizes = [format_size(finding.size_bytes) for finding in findings]
    wide, width = max(map(len, sizes)), min(max(len(finding.holder) for finding in findings), _HOLDER_WIDTH)
    rows = zip(sizes, findings, strict=True)
    return [f"  {size:>{wide}}  {finding.holder:{width}}  {finding.command}".rstrip() for size, finding in rows]
