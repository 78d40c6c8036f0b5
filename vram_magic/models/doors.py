"""The doors of a module: which of its methods are entry points, by name.

Names only: it shadows nothing, and takes no lock. What it learns of a class is remembered weakly, since a class that
was replaced would keep all the globals of its module.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["CALL", "COMPILE", "HAND_ON", "READS", "STATE_DICT", "branches_of", "doors_of"]

# Saving reads the weights wherever they are: it needs no room. Only wrappers (torchao) that were made for an
# accelerator cannot be read while their parts lie elsewhere.
STATE_DICT = "state_dict"
READS = {"save_pretrained", "push_to_hub", STATE_DICT}

# Methods of torch's base class that hand their arguments on to `forward`.
CALL, _COMPILED_CALL, COMPILE = "_call_impl", "_compiled_call_impl", "compile"
HAND_ON = {CALL, _COMPILED_CALL, COMPILE}


def branches_of(roots: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """The roots' children that people call by themselves. Not torch's own single layers: it would cost too much."""
    callers = [root for root in roots if not isinstance(root, torch.nn.Sequential)]  # whose children are its layers
    children = [child for root in callers for child in root.children()]
    return [child for child in children if not _is_torchs(type(child)) or next(child.children(), None) is not None]


def doors_of(module: torch.nn.Module, *, out: bool) -> Iterator[str]:
    """What is shadowed of the module; ``out``: while some block is out, or about to leave."""
    if isinstance(module, torch.jit.ScriptModule):
        yield from (CALL, *_scripted_methods(module))
        return
    yield from _public_methods(type(module))
    yield COMPILE
    if out or module._forward_pre_hooks or module._forward_hooks:  # noqa: SLF001
        yield CALL
    if module.__dict__.get(_COMPILED_CALL) is not None:
        yield _COMPILED_CALL


def _scripted_methods(module: Any) -> list[str]:
    """Their names. They live in C++; Python keeps each in the instance once it was asked for."""
    return [name for name in module._c._method_names() if hasattr(module, name)]  # noqa: SLF001  has no public name


def _is_torchs(kind: type) -> bool:
    return kind.__module__.startswith("torch.nn.")


_by_class: weakref.WeakKeyDictionary[type, tuple[str, ...]] = weakref.WeakKeyDictionary()


def _public_methods(kind: type) -> tuple[str, ...]:
    """Names of the methods that compute: the class's own and inherited ones, without those of torch's base class."""
    known = _by_class.get(kind)
    if known is None:
        known = _by_class[kind] = _computing_methods(kind)
    return known


def _computing_methods(kind: type) -> tuple[str, ...]:
    names = {"forward"}
    for base in kind.__mro__:
        if _is_torchs(base) or base is object:
            continue
        names |= {name for name, value in vars(base).items() if isinstance(value, types.FunctionType)}
    inherited = set(dir(torch.nn.Module)) - {"forward"}
    return tuple(sorted(n for n in names - inherited if not n.startswith("_")))
