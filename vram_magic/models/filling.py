"""Filling a module from a safetensors file: every entry of its state dict gets its value, or none does.

All that could be wrong is looked for before the first value changes. Entries keep their identity and their
ties; only one on the meta device is replaced.

No locks. Refuses to know who built the module, how the file was named and where the module will live:
everything is read into the CPU's memory, or mapped where an entry has none yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from vram_magic.errors import SourceError
from vram_magic.models.origin import state_entries
from vram_magic.residency.checkpoint import Checkpoint, TensorRange, some_of, torch_dtype_name
from vram_magic.residency.mapping import map_range

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["dtype_in_file", "fill", "ties"]


def fill(module: nn.Module, checkpoint: Checkpoint, dtype: torch.dtype | None) -> nn.Module:
    """Give every entry of the state dict its value from the file; checks all of it before it changes any."""
    _check_fit(module, checkpoint)
    if dtype is not None:
        module.to(dtype)
    entries = state_entries(module)
    assigned: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for names in ties(entries).values():
            place = checkpoint.tensors[next(name for name in names if name in checkpoint.tensors)]
            if entries[names[0]].is_meta:
                assigned |= dict.fromkeys(names, _like(entries[names[0]], _mapped(place), dtype))
            else:
                entries[names[0]].copy_(_read(place))
    if assigned:
        module.load_state_dict(assigned, strict=False, assign=True)
    return module


def _like(entry: torch.Tensor, value: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """What takes a meta entry's place: of the file's dtype, unless one was asked for."""
    value = value if dtype is None else value.to(entry.dtype)
    return nn.Parameter(value, entry.requires_grad) if isinstance(entry, nn.Parameter) else value


def _check_fit(module: nn.Module, checkpoint: Checkpoint) -> None:
    entries, held = state_entries(module), checkpoint.tensors
    unfilled = [names[0] for names in ties(entries).values() if not any(name in held for name in names)]
    misshapen = [n for n in entries.keys() & held.keys() if tuple(entries[n].shape) != held[n].shape]
    unborn = [name for name, buffer in module.named_buffers() if buffer.is_meta and name not in entries]
    faults = {
        "not in the file": unfilled,
        "without a place in the module": held.keys() - entries.keys(),
        "of another shape": misshapen,
        "on the meta device and in no checkpoint": unborn,
    }
    if any(faults.values()):
        numbers = "; ".join(f"{len(list(n))} {what}: {some_of(n)}" for what, n in faults.items() if n)
        raise SourceError(
            f"{checkpoint.path} does not fit {type(module).__name__}.\n{numbers}.\n"
            "Names must be those of state_dict() and shapes equal; nothing was changed.\n"
            "Give the module that was saved: %load_model NAME FILE --into MODULE"
        )


def ties(entries: Mapping[str, torch.Tensor]) -> dict[object, list[str]]:
    """The names of each distinct tensor: one object under two names, or two views of the same bytes."""
    groups: dict[object, list[str]] = {}
    for name, tensor in entries.items():
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        is_real = not tensor.is_meta and tensor.numel() > 0
        groups.setdefault(place if is_real else id(tensor), []).append(name)
    return groups


def _mapped(tensor: TensorRange) -> torch.Tensor:
    """The tensor as a private mapping of its file: it takes no memory until it is loaded as a whole."""
    dtype = dtype_in_file(tensor)
    if not tensor.nbytes or tensor.offset % dtype.itemsize:
        return _read(tensor)
    return map_range(tensor.file.fd, tensor.offset, tensor.nbytes).view(dtype).view(tensor.shape)


def _read(tensor: TensorRange) -> torch.Tensor:
    raw = torch.empty(tensor.nbytes, dtype=torch.uint8, device="cpu")
    tensor.file.read_into(raw.numpy().data, tensor.offset)
    return raw.view(dtype_in_file(tensor)).view(tensor.shape)


def dtype_in_file(tensor: TensorRange) -> torch.dtype:
    """The torch dtype of a tensor in a file. Raises `SourceError` where torch has none."""
    dtype: torch.dtype = getattr(torch, torch_dtype_name(tensor.dtype))
    return dtype
