"""Spans: the memory behind a model's tensors, found anew each time by walking its modules.

A *span* is one storage with all the model's tensors over it, so ties and views are one span and are counted once. Where
a file is mapped as one big storage for many tensors (as some loaders do), a span is one range of it.

Nothing is remembered here: a parameter that was replaced, an adapter that was added, are simply found. The walk reads
``__dict__`` directly and runs no code of the user's; what a quantized tensor consists of is asked of its class
(`leaves`). A tensor that has no storage, or none that can be asked, is a span of no bytes that stays. It takes no lock;
sizes are bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import ModuleType

import torch

from vram_magic.devices.base import Device
from vram_magic.devices.host import memory_at
from vram_magic.residency.leaves import PLAIN_TYPES, has_own_memory, leaves_of
from vram_magic.residency.mapping import FilePages, file_pages

__all__ = ["Span", "survey"]

_OWN = {"_parameters", "_buffers", "_modules"}
_NO_MEMORY = torch.UntypedStorage(0)  # type: ignore[no-untyped-call]

# A subclass may answer for itself when an attribute is read: code of the user's, which the survey must not run.
_plainly = torch._C.DisableTorchFunctionSubclass
_in_transform = torch._C._functorch.is_functorch_wrapped_tensor  # noqa: SLF001  no public name tells
_has_storage = torch._C._has_storage  # noqa: SLF001
_is_zero = torch.Tensor._is_zerotensor  # noqa: SLF001  autograd's zeros, which are stored nowhere


@dataclass(slots=True, eq=False)
class Span:
    """One piece of memory and the tensors over it.

    ``memory`` is the storage, held so that it cannot go while it is looked at; the span is one range of it.
    ``tensors`` are all the tensors the model has there; ``slots[i]`` counts the places in the model that refer to
    ``tensors[i]``, ``scripts[i]`` those in TorchScript's C++ objects; ``uses[i]`` is its use count while idle.
    ``names`` are those of parameters and buffers, as in ``state_dict()``. ``fixed`` says why the memory can never be
    moved, and is empty when it can. ``alone``: no other span lies over the same storage. ``owned``: the device's
    allocator owns the memory, so freeing it gives room. ``transient``: only buffers that are not saved lie there, so no
    file can hold them. ``stands_in``: the memory is what we have put in place of the device's.
    """

    memory: torch.UntypedStorage
    start: int
    end: int
    tensors: list[torch.Tensor] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    scripts: list[int] = field(default_factory=list)
    uses: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    fixed: str = ""
    alone: bool = True
    owned: bool = True
    transient: bool = True
    stands_in: bool = False
    pages: FilePages | None = None

    @property
    def key(self) -> tuple[int, int]:
        """Tells spans apart while their memory lives: the storage's address and the first byte."""
        return self.memory._cdata, self.start

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    @property
    def address(self) -> int:
        return self.memory.data_ptr() + self.start

    @property
    def bytes(self) -> memoryview:
        """The span's memory, writable; valid while the span lives. Only where the processor can reach it."""
        return memory_at(self.address, self.nbytes)

    def raw(self) -> torch.Tensor:
        """The span's memory as a tensor (uint8, `nbytes` long): one more user of the storage while it lives."""
        empty = torch.empty(0, dtype=torch.uint8, device=self.memory.device)
        return empty.set_(self.memory, self.start, (self.nbytes,), (1,))

    @property
    def file_place(self) -> tuple[int, int, int] | None:
        """(device, inode, offset) when the memory is a private mapping of a file, of a loader's making."""
        return self.pages.place_of(self.address) if self.pages else None

    def contiguous_dtype(self) -> torch.dtype | None:
        """The dtype when a plain contiguous tensor covers all there is: only then a file can hold the same bytes."""
        first = self.tensors[0]
        same = all(tensor.dtype == first.dtype for tensor in self.tensors)
        whole = first.numel() * first.element_size() == self.nbytes and _first_byte(first) == self.start
        return first.dtype if same and whole and first.is_contiguous() else None

    def retarget(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """The span's tensors anew over ``memory`` (uint8, `nbytes` long), with their own offsets and strides."""
        storage = memory.untyped_storage()
        return [_over(storage, tensor, self.start) for tensor in self.tensors]

    def original(self) -> list[torch.Tensor]:
        """The span's tensors anew over its own memory: undoes a replacement (only of a whole storage)."""
        return [_over(self.memory, tensor, 0) for tensor in self.tensors]

    def moved_to(self, memory: torch.Tensor, *, owned: bool) -> None:
        """Told after the tensors lie over ``memory``: lets go of the old."""
        self.memory, self.start, self.end = memory.untyped_storage(), 0, self.nbytes
        self.owned, self.stands_in = owned, not owned


def survey(
    modules: Iterable[tuple[str, torch.nn.Module]], device: Device, stands_in: Callable[[torch.UntypedStorage], bool]
) -> list[Span]:
    """The spans of all modules below ``modules`` (name prefix, root), in module order.

    Tensors without bytes are left out, lazy parameters that have none yet too. ``stands_in`` tells a mapping of our
    own, which is one span whatever lies over it.
    """
    spans: dict[int, list[Span]] = {}
    plain: list[torch.Tensor] = []
    seen: set[int] = set()
    for module_name, module in _walk(modules):
        passing = module.__dict__.get("_non_persistent_buffers_set", ())
        scripted = isinstance(module, torch.jit.ScriptModule)
        for name, tensor in _named(module):
            for leaf_name, leaf in leaves_of(f"{module_name}{name}", tensor, device.torch_device, seen):
                with _plainly():
                    _place(spans, leaf, leaf_name, device, stands_in, transient=name in passing, scripted=scripted)
        plain += _attributes(module, seen)
    with _plainly():
        for tensor in plain:
            _place_alias(spans, tensor)
        for group in spans.values():
            for span in group:
                span.alone = len(group) == 1
                _add_bases(span, device)
    found = [span for group in spans.values() for span in group]
    _find_pages(found, device)
    return found


def _walk(roots: Iterable[tuple[str, torch.nn.Module]]) -> Iterator[tuple[str, torch.nn.Module]]:
    seen: set[int] = set()
    stack = [(prefix, root) for prefix, root in reversed(list(roots))]
    while stack:
        prefix, module = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield prefix, module
        if isinstance(module, torch.jit.ScriptModule):
            continue  # its named_parameters() covers the children
        children = module.__dict__.get("_modules", {})
        stack += [(f"{prefix}{name}.", child) for name, child in reversed(children.items()) if child is not None]


def _named(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(module, torch.jit.ScriptModule):
        yield from module.named_parameters(remove_duplicate=False)
        yield from module.named_buffers(remove_duplicate=False)
        return
    for kind in ("_parameters", "_buffers"):
        for name, tensor in list(module.__dict__.get(kind, {}).items()):
            if isinstance(tensor, torch.Tensor) and not torch.nn.parameter.is_lazy(tensor):
                yield name, tensor


def _attributes(module: torch.nn.Module, seen: set[int]) -> list[torch.Tensor]:
    """Tensors in plain attributes, and one level inside those: an LSTM's flat weights, a quantized layer's state."""
    found = []
    for name, value in list(module.__dict__.items()):  # another thread may be registering the module anew
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif name not in _OWN:
            found += [item for item in _contents(value, seen) if isinstance(item, torch.Tensor)]
    return found


def _contents(value: object, seen: set[int]) -> list[object]:
    """What a list, tuple, dict, or an object of no library's base type holds; a shared object's only once."""
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple):
        return list(value)
    plain = isinstance(value, torch.nn.Module | type | ModuleType) or callable(value)
    if plain or id(value) in seen or not hasattr(value, "__dict__"):
        return []
    seen.add(id(value))
    return list(vars(value).values())


def _place(
    spans: dict[int, list[Span]],
    tensor: torch.Tensor,
    name: str,
    device: Device,
    stands_in: Callable[[torch.UntypedStorage], bool],
    *,
    transient: bool,
    scripted: bool,
) -> None:
    fixed = _fixed(tensor, device)
    storage = _storage_of(tensor)
    if storage is None:
        spans.setdefault(-id(tensor), []).append(Span(_NO_MEMORY, 0, 0, [tensor], [1], [0], names=[name], fixed=fixed))
        return
    if not storage.nbytes():
        return
    owned = device.owns(storage)
    # Elsewhere only a file that is mapped as one piece for many tensors, which cannot grow, is taken range by range.
    ours = stands_in(storage)
    whole = owned or ours or (not device.is_host and storage.resizable())
    span = _span_for(spans, tensor, storage, whole=whole)
    span.owned, span.stands_in = owned, ours
    span.fixed = span.fixed or fixed
    span.names.append(name)
    span.transient = span.transient and transient
    _add(span, tensor, scripted=scripted)


def _place_alias(spans: dict[int, list[Span]], tensor: torch.Tensor) -> None:
    """A plain attribute matters only where it lies over memory that a parameter or buffer owns."""
    # Uncounted, a nested one keeps what it lies over: its data cannot be replaced.
    if type(tensor) not in PLAIN_TYPES or tensor.is_nested or (storage := _storage_of(tensor)) is None:
        return
    for span in spans.get(storage._cdata, ()):
        if span.owned or (_first_byte(tensor) < span.end and span.start < _last_byte(tensor)):
            _add(span, tensor)


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The tensor's storage; None where it has none, or one without memory."""
    if tensor.layout != torch.strided or _in_transform(tensor) or not _has_storage(tensor) or _is_zero(tensor):
        return None
    return tensor.untyped_storage()


def _span_for(
    spans: dict[int, list[Span]], tensor: torch.Tensor, storage: torch.UntypedStorage, *, whole: bool
) -> Span:
    group = spans.setdefault(storage._cdata, [])
    if whole:
        if not group:
            group.append(Span(storage, 0, storage.nbytes()))
        return group[0]
    start, end = _range_of(tensor, storage)
    touching = [span for span in group if start < span.end and span.start < end]
    span = touching[0] if touching else Span(storage, start, end)
    if not touching:
        group.append(span)
    for other in touching:
        if (start, end) != (other.start, other.end):
            other.fixed = "overlapping views of one mapped file"
    return span


def _add_bases(span: Span, device: Device) -> None:
    """The hidden tensors that views are views of: they hold the memory too, and move along."""
    for base in [view._base for view in span.tensors if view._is_view()]:
        if base is not None and _lies_in(base, span) and all(base is not known for known in span.tensors):
            span.fixed = span.fixed or _fixed(base, device)
            span.tensors.append(base)
            span.slots.append(0)
            span.scripts.append(0)
    bases = [id(view._base) for view in span.tensors if view._is_view()]
    span.uses = [
        1 + bases.count(id(tensor)) + scripts for tensor, scripts in zip(span.tensors, span.scripts, strict=True)
    ]


def _lies_in(base: torch.Tensor, span: Span) -> bool:
    """A view that was given other memory keeps its base, which then is elsewhere and none of the model's."""
    storage = _storage_of(base)
    if storage is None or storage._cdata != span.memory._cdata:
        return False
    start, end = _range_of(base, storage)
    return span.start <= start and end <= span.end


def _add(span: Span, tensor: torch.Tensor, *, scripted: bool = False) -> None:
    for index, known in enumerate(span.tensors):
        if known is tensor:
            span.slots[index] += not scripted
            span.scripts[index] += scripted
            return
    span.tensors.append(tensor)
    span.slots.append(int(not scripted))
    span.scripts.append(int(scripted))


def _fixed(tensor: torch.Tensor, device: Device) -> str:
    """Why the memory of the tensor cannot be moved, or an empty string."""
    reasons = {
        f"a tensor of type {type(tensor).__name__}{_elsewhere(tensor, device)}": not has_own_memory(tensor),
        "inside a transform of torch.func": _in_transform(tensor),
        f"a {str(tensor.layout).removeprefix('torch.')} tensor": tensor.layout != torch.strided,
        "a nested tensor": tensor.is_nested,
        f"on the device {tensor.device}": tensor.device.type != "cpu" and tensor.device != device.torch_device,
        "made under inference_mode, so its data cannot be replaced": tensor.is_inference(),
        "a quantized tensor with side state": tensor.is_quantized,
        "a lazily conjugated or negated tensor": tensor.is_conj() or tensor.is_neg(),
        "a tensor without memory": not _has_storage(tensor) or _is_zero(tensor),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _elsewhere(tensor: torch.Tensor, device: Device) -> str:
    place = device.torch_device
    return "" if tensor.device == place else f" on {tensor.device}: move it there first, with model.to({str(place)!r})"


def _find_pages(spans: list[Span], device: Device) -> None:
    # The table of a process's mappings is long: it is read only where a mapping is not ours.
    mapped = [span for span in spans if not (span.owned or span.fixed or span.stands_in)]
    pages = file_pages() if mapped else []  # in the order of addresses
    starts = [page.start for page in pages]
    for span in mapped:
        address = span.address
        page = pages[max(bisect_right(starts, address) - 1, 0)] if pages else None
        span.pages = page if page and page.start <= address and address + span.nbytes <= page.end else None
        if span.pages is None and device.is_host:
            span.fixed = "in memory that torch does not own (numpy's, or shared)"


def _range_of(tensor: torch.Tensor, storage: torch.UntypedStorage) -> tuple[int, int]:
    """The first byte of the storage that the tensor touches, and one past the last."""
    if tensor.is_nested or not has_own_memory(tensor):  # tells no sizes, or would run a class's own code for them
        return 0, storage.nbytes()
    return _first_byte(tensor), _last_byte(tensor)


def _first_byte(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset() * tensor.element_size())


def _last_byte(tensor: torch.Tensor) -> int:
    """One past the last byte that the tensor touches."""
    if not tensor.numel():
        return _first_byte(tensor)
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int((tensor.storage_offset() + reach + 1) * tensor.element_size())


def _over(storage: torch.UntypedStorage, tensor: torch.Tensor, start: int) -> torch.Tensor:
    offset = tensor.storage_offset() - start // tensor.element_size()
    fresh = torch.empty(0, dtype=tensor.dtype, device=storage.device)
    return fresh.set_(storage, offset, tensor.shape, tensor.stride())
