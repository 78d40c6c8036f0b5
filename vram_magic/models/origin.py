"""The origin of a living model's weights: which range of which file is believed to hold each of them.

Believed only: name, shape and dtype agree here; that the bytes agree is proven elsewhere, before anyone
relies on it. Names are those of ``state_dict()``. Sizes are bytes. No locks, no network, and no user
code beyond plain attributes. Refuses to know devices, blocks and what the belief is good for.

A *home* is a module that a checkpoint may be relative to: the model itself, or a sub-module that was loaded
or can be saved by itself (the encoder inside a SentenceTransformer).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vram_magic.errors import SourceError
from vram_magic.residency.checkpoint import Checkpoint, TensorRange, torch_dtype_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch
    from torch import nn

__all__ = ["checkpoints_in", "find_origin", "state_entries"]

_CACHED_NAMES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "diffusion_pytorch_model.safetensors",
    "diffusion_pytorch_model.safetensors.index.json",
)


def find_origin(obj_module: nn.Module, source: str | Path | None = None) -> dict[str, TensorRange]:
    """The range believed to hold each parameter and persistent buffer of the module, by state-dict name.

    With a source, one that cannot be read or shares no name is a `SourceError`. Without, the module and its
    sub-modules are asked where they came from, and what cannot be read is passed over.
    """
    return _told(obj_module, Path(source)) if source is not None else _remembered(obj_module)


def state_entries(module: nn.Module) -> dict[str, torch.Tensor]:
    """What ``state_dict(keep_vars=True)`` would hold, ties under each name, without calling its overrides."""
    entries: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    for prefix, owner in module.named_modules(remove_duplicate=False):
        passing = owner._non_persistent_buffers_set
        for name, buffer in owner.named_buffers(recurse=False, remove_duplicate=False):
            if name not in passing:
                entries[f"{prefix}.{name}" if prefix else name] = buffer
    return entries


def checkpoints_in(source: Path) -> Iterator[tuple[str, Checkpoint]]:
    """The checkpoints of a file, index or folder, each with the name of the sub-module it is for, or "".

    A sentence-transformers or diffusers folder has one for each part, in sub-folders; a part that has no
    safetensors file has none.
    """
    if not source.is_dir():
        yield "", Checkpoint.open(source)
        return
    for name, folder in _parts_of(source):
        if any(folder.glob("*.safetensors*")):
            yield name, Checkpoint.open(folder)


def _parts_of(folder: Path) -> list[tuple[str, Path]]:
    if (folder / "modules.json").is_file():
        parts = _json_at(folder / "modules.json")
        return [(str(part["name"]), folder / str(part.get("path", ""))) for part in parts]
    if (folder / "model_index.json").is_file():
        parts = [name for name in _json_at(folder / "model_index.json") if (folder / name).is_dir()]
        return [(name, folder / name) for name in parts]
    return [("", folder)]


def _json_at(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise SourceError(
            f"The folder {path.parent} cannot be read.\n0 weights found.\n{path.name} is damaged ({error}).\n"
            "Fetch or save the folder again, then: %load_model NAME FOLDER"
        ) from error


def _told(module: nn.Module, source: Path) -> dict[str, TensorRange]:
    homes, found = dict(_homes(module)), dict[str, TensorRange]()
    shared = 0
    for part, checkpoint in checkpoints_in(source.expanduser()):
        # A file fits any home; what belongs to a part of a pipeline fits only homes inside that part.
        for prefix, home in _homes_of_part(module, homes, part).items():
            names, ranges = _match(home, checkpoint)
            shared += names
            found = {prefix + name: belief for name, belief in ranges.items()} | found
    if not shared:
        raise SourceError(
            f"{source} is not where {type(module).__name__} came from.\n"
            f"0 of {len(state_entries(module))} names are shared.\n"
            "Either its safetensors files are of another model, or it has none.\n"
            "Give the file or folder it was loaded from: source=FOLDER, or leave source out"
        )
    return found


def _homes_of_part(module: nn.Module, homes: Mapping[str, nn.Module], part: str) -> dict[str, nn.Module]:
    child = dict(module.named_children()).get(part) if part else None
    if child is None:
        return dict(homes)
    inner = {prefix: home for prefix, home in homes.items() if prefix.startswith(f"{part}.")}
    return {f"{part}.": child, **inner}


def _remembered(module: nn.Module) -> dict[str, TensorRange]:
    found: dict[str, TensorRange] = {}
    opened: dict[str, list[Checkpoint]] = {}  # a model and the base model inside it come from the same place
    for prefix, home in _homes(module):
        name = _name_or_path(home)
        if name and name not in opened:
            opened[name] = _recalled(home, name)
        for checkpoint in opened.get(name, ()):
            _, ranges = _match(home, checkpoint)
            found = {prefix + name: belief for name, belief in ranges.items()} | found
    return found


def _homes(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The module, then each sub-module that may have a checkpoint of its own, outermost first."""
    yield "", module
    for name, child in module.named_modules():
        # Not by its config: the layers of a transformers model all carry the model's.
        if name and (hasattr(type(child), "save_pretrained") or _attribute(child, "name_or_path")):
            yield f"{name}.", child


def _recalled(home: nn.Module, name: str) -> list[Checkpoint]:
    """What the home says it was loaded from, as far as that can be read here and now."""
    try:
        path = Path(name).expanduser()
        places = [path] if path.exists() else _cached(name, getattr(_config(home), "_commit_hash", None))
        return [checkpoint for place in places for _, checkpoint in checkpoints_in(place)]
    except (SourceError, OSError, KeyError, TypeError, AttributeError, ValueError, RuntimeError):
        return []


def _cached(repo_id: str, revision: str | None) -> list[Path]:
    """The weights of a hub id in the local cache; asks nobody else."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return []
    for name in _CACHED_NAMES:
        path = try_to_load_from_cache(repo_id, name, revision=revision)
        if isinstance(path, str):
            return [Path(path)]
    return []


def _name_or_path(module: nn.Module) -> str:
    own = _attribute(module, "name_or_path") or getattr(_config(module), "_name_or_path", None)
    return str(own) if isinstance(own, str | os.PathLike) else ""


def _base_prefix(module: nn.Module) -> str:
    prefix = _attribute(module, "base_model_prefix")
    return prefix if isinstance(prefix, str) else ""


def _config(module: nn.Module) -> object:
    return _attribute(module, "config")


def _attribute(module: nn.Module, name: str) -> object:
    try:
        return getattr(module, name, None)
    except Exception:  # noqa: BLE001 - a user's property may raise anything, and then it tells nothing
        return None


def _match(home: nn.Module, checkpoint: Checkpoint) -> tuple[int, dict[str, TensorRange]]:
    """How many names the two share, and the ranges among them that also agree in shape and dtype."""
    entries, prefix = state_entries(home), _base_prefix(home)
    shared = {name: twin for name in entries if (twin := _name_in(checkpoint, name, prefix))}
    ranges = {name: checkpoint.tensors[twin] for name, twin in shared.items()}
    return len(shared), {name: belief for name, belief in ranges.items() if _agrees(entries[name], belief)}


def _name_in(checkpoint: Checkpoint, name: str, prefix: str) -> str | None:
    """The checkpoint's name for a tensor: its own, or with or without the base model's prefix."""
    variants = [name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")] if prefix else [name]
    return next((variant for variant in variants if variant in checkpoint.tensors), None)


def _agrees(tensor: torch.Tensor, belief: TensorRange) -> bool:
    try:
        dtype = torch_dtype_name(belief.dtype)
    except SourceError:  # a dtype that torch has no name for agrees with nothing
        return False
    return tuple(tensor.shape) == belief.shape and str(tensor.dtype) == f"torch.{dtype}"
