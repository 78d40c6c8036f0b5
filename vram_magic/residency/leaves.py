"""What a parameter or buffer consists of: the plain tensors whose memory is to be moved.

Most are one plain tensor. A quantized one may be a *wrapper*, a tensor without memory around others (torchao), or carry
*side state*, tensors in its attributes (bitsandbytes). These are found, and moved with it; the object itself stays, so
its class, attributes and identity do. What cannot be taken apart is given back as it is.

A wrapper is asked of its parts by ``__tensor_flatten__``, the protocol of torch's traceable subclasses. Takes no lock.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["PLAIN_TYPES", "has_own_memory", "has_wrappers", "leaves_of"]

PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)

_DEPTH = 3  # of objects in objects: a parameter's quantization state, its second state, their tables


def has_own_memory(tensor: torch.Tensor) -> bool:
    """Whether the tensor's data can be replaced, and nothing else comes with it."""
    kind = type(tensor)
    if kind in PLAIN_TYPES:
        return True
    return kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def has_wrappers(thing: object, device: torch.device | None) -> bool:
    """Whether a module has weights that cannot be read while their parts are elsewhere: made for an accelerator."""
    if device is None or device.type == "cpu" or not isinstance(thing, torch.nn.Module):
        return False
    return any(_is_wrapper(tensor) for tensor in chain(thing.parameters(), thing.buffers()))


def _is_wrapper(tensor: torch.Tensor) -> bool:
    return not has_own_memory(tensor) and is_traceable_wrapper_subclass(tensor)


def leaves_of(
    name: str, tensor: torch.Tensor, device: torch.device, seen: set[int]
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of each plain tensor in it. ``seen`` keeps a tied one from being taken apart twice.

    A wrapper keeps the device that it was made for, wherever its parts are; one made for another than ``device`` would
    compute on the wrong side, so it is left whole.
    """
    if type(tensor) in PLAIN_TYPES and not tensor.__dict__:
        yield name, tensor
        return
    first = id(tensor) not in seen
    seen.add(id(tensor))
    if _is_wrapper(tensor) and tensor.device == device:
        for attribute in tensor.__tensor_flatten__()[0] if first else ():  # type: ignore[attr-defined]
            yield from leaves_of(f"{name}.{attribute}", getattr(tensor, attribute), device, seen)
        return
    yield name, tensor
    if first and has_own_memory(tensor):
        yield from _inside(tensor.__dict__, name, _DEPTH)


def _inside(holder: dict[str, object], name: str, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    for key, value in list(holder.items()):
        place = f"{name}.{key}"
        if isinstance(value, torch.Tensor):
            if type(value) in PLAIN_TYPES:
                yield place, value
        elif isinstance(value, torch.nn.Module) or not depth:
            continue
        elif isinstance(value, dict):
            yield from _inside(value, place, depth - 1)
        elif isinstance(value, list | tuple):
            yield from _inside({str(index): item for index, item in enumerate(value)}, place, depth - 1)
        elif type(value).__module__ != "builtins" and hasattr(value, "__dict__") and not isinstance(value, type):
            yield from _inside(vars(value), place, depth - 1)
