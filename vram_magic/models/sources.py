"""A source: what a user gives as a model, and how it becomes an object.

`resolve` looks at the source, validates every weight file behind it and builds nothing; `Source.build`
then builds. Its ``key`` makes the same source given twice the same one, also where a cell is run again.

No locks. Refuses to know eviction, devices, notebooks, and how a library builds a model or a file fills one.
"""

from __future__ import annotations

import inspect
import os
import re
import types
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from vram_magic.models.filling import fill
from vram_magic.models.holding import holds_modules, modules_of
from vram_magic.models.libraries import Loader, downloaded, loaders, processor_of, reading, refused, unfound
from vram_magic.models.origin import checkpoints_in
from vram_magic.residency.checkpoint import INDEX_SUFFIX, Checkpoint, FileIdentity, odd_kind

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Source", "resolve"]

_PICKLES = (".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth")
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


@dataclass(frozen=True)
class Source:
    """A source that was looked at: ``key`` tells two apart, ``folder`` backs the weights.

    ``build`` of an object holds that object: whoever keeps objects weakly keeps the key, not the source.
    """

    kind: str  # "object" | "builder" | "transformers" | "sentence-transformers" | "diffusers" | "safetensors"
    key: object
    build: Callable[[], object]
    folder: Path | None = None
    processor: Callable[[], object] | None = None


def resolve(source: object, *, dtype: str | None = None, into: object | None = None) -> Source:
    """Look at a source and validate the files behind it; what cannot become a model is a `SourceError`."""
    wanted = _dtype_named(dtype)
    if isinstance(source, str | os.PathLike):
        return _from_name(source, wanted, into)
    if into is not None:
        raise refused(source, "--into goes with a .safetensors file or an index of shards.")
    if holds_modules(source):
        return Source("object", ("object", _Same(source), wanted), lambda: _converted(source, wanted))
    if callable(source):
        return _from_builder(source, wanted)
    raise refused(source, "It is no nn.Module, holds none as an attribute, and cannot be called.")


# --- objects and builders ----------------------------------------------------------------------------------


def _from_builder(builder: Callable[..., object], dtype: torch.dtype | None) -> Source:
    if not _takes_no_arguments(builder):
        raise refused(builder, "A builder is called without arguments, and this one needs some.")

    def build() -> object:
        built = builder()  # its errors are the user's own, so they pass as they are
        if not holds_modules(built):
            raise refused(built, "The builder gave it, and it neither is nor holds an nn.Module.")
        return _converted(built, dtype)

    return Source("builder", ("builder", _identity(builder), dtype), build)


def _takes_no_arguments(builder: Callable[..., object]) -> bool:
    try:
        inspect.signature(builder).bind()
    except TypeError:
        return False
    except ValueError:  # built in C, without a signature
        return True
    return True


def _converted(obj: object, dtype: torch.dtype | None) -> object:
    if dtype is not None:
        for _, module in modules_of(obj):
            module.to(dtype)
    return obj


class _Same:
    """Equal to another only while both stand for the same living object, which it does not keep alive."""

    def __init__(self, obj: object) -> None:
        self._hash = id(obj)
        try:
            self._ref: Callable[[], object] = weakref.ref(obj)
        except TypeError:  # no weak references to it: keeping it is better than mistaking it
            self._ref = lambda: obj

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._ref() is not None and self._ref() is other._ref()

    def __hash__(self) -> int:
        return self._hash


def _identity(builder: object) -> object:
    """Makes a cell that is run again with the same lambda the same source, and the same method too."""
    if isinstance(builder, types.MethodType):
        return _Same(builder.__self__), builder.__func__
    if isinstance(builder, types.FunctionType):
        captures = (builder.__closure__, builder.__defaults__, builder.__kwdefaults__)
        if not any(captures):
            return builder.__module__, builder.__qualname__, builder.__code__
    return _Same(builder)


# --- names of files, folders and hub repositories ----------------------------------------------------------


def _from_name(source: str | os.PathLike[str], dtype: torch.dtype | None, into: object) -> Source:
    path = Path(source).expanduser()
    with reading(source):
        is_folder, is_file = path.is_dir() and source != "", path.is_file()
        odd = odd_kind(path) if path.exists() and not is_folder and source != "" else ""
    if odd:
        raise refused(
            source, f"It is {odd} and no regular file.", "Name a file or a folder: %load_model NAME FOLDER_OR_FILE"
        )
    if is_folder:
        return _from_folder(path, dtype, into)
    if is_file or path.suffix in (*_PICKLES, ".safetensors") or path.name.endswith(INDEX_SUFFIX):
        return _from_file(path, dtype, into)
    if isinstance(source, str) and _HUB_ID.fullmatch(source):
        return _from_folder(downloaded(source), dtype, into)
    raise unfound(str(source), "It has not the form of a hub id.")


def _from_file(path: Path, dtype: torch.dtype | None, into: object) -> Source:
    if path.name.endswith((".safetensors", INDEX_SUFFIX)):
        if into is None:
            raise refused(path, "It holds weights but no module.", f"%load_model NAME {path} --into MODULE")
        return _from_weights(path, dtype, into)
    if path.suffix in _PICKLES:
        raise refused(path, "It is a pickle, which can run any code when read.", _conversion(path))
    raise refused(path, "It is neither a .safetensors file nor an index of shards.")


def _conversion(path: Path) -> str:
    return (
        "import torch, safetensors.torch as st; weights = torch.load("
        f"{str(path)!r}, weights_only=True); st.save_file("
        f"{{name: t.clone() for name, t in weights.items()}}, {str(path.with_suffix('.safetensors'))!r})"
    )


def _from_folder(folder: Path, dtype: torch.dtype | None, into: object) -> Source:
    if into is not None:
        return _from_weights(folder, dtype, into)
    for marker, (kind, load) in loaders(folder).items():
        if (folder / marker).is_file():
            processor = processor_of(folder) if kind == "transformers" else None
            return _from_library(kind, folder, dtype, load, processor)
    markers = ", ".join(loaders(folder))
    raise refused(folder, f"It has none of {markers}, so no library's save_pretrained made it.")


def _from_library(
    kind: str,
    folder: Path,
    dtype: torch.dtype | None,
    load: Loader,
    processor: Callable[[], object] | None,
) -> Source:
    def build() -> object:
        _weight_files(folder)  # once more: a lazy model is built long after it was named
        with reading(folder):
            return load(folder, dtype)

    files = _weight_files(folder)
    key = (kind, str(folder.resolve()), dtype, files)
    return Source(kind, key, build, folder if files else None, processor)


def _weight_files(folder: Path) -> tuple[FileIdentity, ...]:
    """What the folder's safetensors files are now, all validated; empty where there are only pickles."""
    return tuple(file.identity for _, checkpoint in checkpoints_in(folder) for file in checkpoint.files)


# --- a file of weights for the user's own module -----------------------------------------------------------


def _from_weights(path: Path, dtype: torch.dtype | None, into: object) -> Source:
    if not (isinstance(into, nn.Module) or callable(into)):
        raise refused(into, "--into takes an nn.Module or a callable that builds one.")

    def build() -> object:
        module = into if isinstance(into, nn.Module) else into()
        if not isinstance(module, nn.Module):
            raise refused(module, "The --into callable gave it, and it is no nn.Module.")
        return fill(module, Checkpoint.open(path), dtype)

    files = tuple(file.identity for file in Checkpoint.open(path).files)
    return Source("safetensors", ("safetensors", str(path.resolve()), dtype, files, _identity(into)), build, path)


# --- words -------------------------------------------------------------------------------------------------


def _dtype_named(name: str | None) -> torch.dtype | None:
    text = str(name).removeprefix("torch.")
    if name is None or text == "auto":
        return None
    dtype = getattr(torch, _SHORT_DTYPES.get(text, text), None)
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        return dtype
    raise refused(name, "It is no floating-point dtype of torch.", "%load_model NAME SOURCE --dtype bfloat16")
