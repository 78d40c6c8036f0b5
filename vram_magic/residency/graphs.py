"""Weights that a custom autograd function keeps for its backward, as a plain attribute of its context.

What is saved with ``ctx.save_for_backward`` shows in a tensor's use count. What a function keeps as ``ctx.weight`` or
``ctx.tensors`` does not (bitsandbytes' 4-bit product does so, for one): it is a name for the very parameter, which may
be given other memory. On the host that does not matter. On an accelerator the backward would then find the weight on
the other device. So a weight with more references than its module has is looked for in the living contexts.

Takes no lock, runs nobody's code, changes nothing. Refuses to know devices and models.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch

from vram_magic.residency.living import instances
from vram_magic.residency.spans import Span
from vram_magic.residency.swap import has_other_references

__all__ = ["kept_for_backward"]

_CONTEXT = torch._C._FunctionBase  # noqa: SLF001  the base of every `autograd.Function`'s context
_CONTAINERS = {dict, tuple, list}
_DEPTH = 3  # the context's attributes, a tuple among them, its items


def kept_for_backward(spans: Iterable[Span]) -> set[int]:
    """The ids of the spans' tensors that contexts of custom autograd functions refer to.

    At most two passes of the collector's lists (tens of milliseconds each), only where somebody names a weight.
    """
    named = [span for span in spans if has_other_references(span)]
    if not named:
        return set()
    wanted = {id(tensor) for span in named for tensor in span.tensors}
    level: Iterable[object] = instances(_CONTEXT)
    found: set[int] = set()
    for _ in range(_DEPTH):
        level = gc.get_referents(*level)
        found |= wanted.intersection(map(id, level))
        level = [thing for thing in level if type(thing) in _CONTAINERS]
    return found
