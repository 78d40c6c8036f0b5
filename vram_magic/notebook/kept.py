"""A kernel's set of models in a file: written by ``%vram save``, brought back lazily by ``%vram restore``.

The file is JSON: the budget (bytes or "auto"), tiers of the user's own, and for each model its name, where it was read
from, and its marks. No weights, and nothing that is run: a model that was built by code in the notebook is only named,
since bringing it back would mean running code from a file. Takes no lock. Refuses to know how models are loaded.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import keyword
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vram_magic.errors import SourceError, VRAMError
from vram_magic.notebook.current import managed_models
from vram_magic.notebook.report import shortened
from vram_magic.policy import DEFAULT_TIERS, RESIDENCIES
from vram_magic.sizes import parse_size

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from vram_magic.handle import Handle
    from vram_magic.vram_manager import VRAMManager

__all__ = ["restore", "save"]

_FAMILY = "vram_magic models"
_FORMAT = f"{_FAMILY} 1"
_LARGEST = 2**24  # bytes; no file of ours is larger, and weights are not read to find that out
_LARGEST_RANK = 10**6
_TEXT_OR_NONE = (str, type(None))
_FIELDS: dict[str, type | tuple[type, ...]] = {
    "name": str,
    "source": _TEXT_OR_NONE,
    "dtype": _TEXT_OR_NONE,
    "tier": _TEXT_OR_NONE,
    "rank": int,
    "residency": str,
    "pinned": bool,
}


def save(manager: VRAMManager, path: str) -> str:
    """Writes the set, whole or not at all; returns what to tell. Raises `VRAMError`, also for another's file."""
    if os.path.exists(path) and not _is_ours(path):
        raise VRAMError(
            f"The models cannot be written down.\n0 B were written to {path}.\n"
            "That is there already, and %vram save did not write it: it is not replaced.\n"
            "Name another file: %vram save FILE"
        )
    models = [
        {
            "name": model.name,
            "source": getattr(model, "source", None),
            "dtype": getattr(model, "dtype", None),
            "tier": model.tier,
            "rank": model.rank,
            "residency": model.residency,
            "pinned": model.pinned,
        }
        for model in managed_models(manager)
    ]
    tiers = {name: rank for name, rank in manager.tiers.items() if DEFAULT_TIERS.get(name) != rank}
    text = json.dumps({"format": _FORMAT, "budget": manager.budget_setting, "tiers": tiers, "models": models}, indent=1)
    _write(path, text + "\n")
    count = sum(model["source"] is not None for model in models)
    first = f"{count} of {_counted(models)} can be restored from {path}"
    return "\n".join([first, *_without_source(models, "will not come back")])


def _write(path: str, text: str) -> None:
    partial = Path(f"{path}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise VRAMError(
            f"The models cannot be written down.\n0 B were written to {path}.\nThe system says: {error.strerror}\n"
            "Name a file in a folder that can be written to: %vram save FILE"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def restore(shell: InteractiveShell, manager: VRAMManager, path: str) -> str:
    """Registers the models of the file, to be loaded at their first use, and binds them; returns what to tell.

    A model that cannot be brought back does not keep the others from it. Raises `SourceError` for a file that is none.
    """
    kept = _read(path)
    manager.set_budget(kept["budget"])
    for tier, rank in kept["tiers"].items():
        manager.tiers.setdefault(tier, rank)  # what stands here is not for a file to change
    back, lines = [], []
    for entry in kept["models"]:
        if entry["source"] is None:
            continue
        name = shortened(entry["name"])
        if not _can_be_bound(shell, manager, entry["name"]):
            lines.append(f"{name} did not come back: that name has another meaning here, or can be no variable's")
            continue
        try:
            handle = _bring(manager, entry)
        except Exception as error:  # noqa: BLE001  the library that reads a source may raise anything
            lines.append(f"{name} did not come back: {_first_line(error)}")
        else:
            shell.push({entry["name"]: handle.model})  # type: ignore[no-untyped-call]
            back.append(name)
    verb = "is back" if len(back) == 1 else "are back"
    first = f"{_counted(back)} {verb}, to be loaded at first use" + (f": {', '.join(back)}" if back else "")
    return "\n".join([first, *lines, *_without_source(kept["models"], "did not come back")])


def _can_be_bound(shell: InteractiveShell, manager: VRAMManager, name: str) -> bool:
    """Whether a variable of that name takes the place of nothing but the model itself."""
    if not name.isidentifier() or keyword.iskeyword(name):
        return False
    meaning = shell.user_ns.get(name, getattr(builtins, name, None))
    return meaning is None or (name in manager and manager[name].model is meaning)


def _first_line(error: BaseException) -> str:
    lines = "".join(char if char.isprintable() else "\n" for char in str(error)).splitlines()
    return next(filter(None, lines), type(error).__name__)


def _bring(manager: VRAMManager, entry: dict[str, Any]) -> Handle:
    priority = entry["rank"] if entry["tier"] is None else None
    return manager.load(
        entry["name"],
        entry["source"],
        entry["tier"] or "llm",
        priority,
        entry["residency"],
        entry["pinned"],
        lazy=True,
        dtype=entry["dtype"],
    )


def _counted(models: list[Any]) -> str:
    return "1 model" if len(models) == 1 else f"{len(models)} models"


def _without_source(models: list[dict[str, Any]], what: str) -> Iterator[str]:
    for entry in models:
        if entry["source"] is None:
            yield f"{shortened(entry['name'])} {what}: it was built by code of the notebook; run that again"


def _read(path: str) -> dict[str, Any]:
    """The file's content, checked."""
    try:
        kept = _parsed(path)
        _check(kept)
    except SourceError:
        raise
    except FileNotFoundError as error:
        raise _no_restoring(path, "There is no such file.") from error
    except OSError as error:
        raise _no_restoring(path, f"The system says: {error.strerror}") from error
    except KeyError as error:
        raise _no_restoring(path, f"It was changed since %vram save wrote it: {error} is missing") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise _no_restoring(path, f"It was changed since %vram save wrote it: {error}") from error
    return kept


def _no_restoring(path: str, cause: str) -> SourceError:
    return SourceError(
        f"No models can be restored from {path!r}.\n0 models were brought back.\n{cause}\n"
        "Name a file that was written in a kernel with models, by: %vram save FILE"
    )


def _is_ours(path: str) -> bool:
    try:
        _parsed(path)
    except (SourceError, OSError):
        return False
    return True


def _parsed(path: str) -> dict[str, Any]:
    """The content of a file that `save` wrote, of whatever version. Raises `SourceError` for another, and `OSError`."""
    with open(path, encoding="utf-8") as file:
        try:
            kept = json.loads(file.read(_LARGEST))
        except (ValueError, RecursionError):
            kept = None
    if not isinstance(kept, dict) or not str(kept.get("format")).startswith(_FAMILY):
        raise _no_restoring(path, "It is no file written by %vram save.")
    return kept


def _check(kept: dict[str, Any]) -> None:
    if kept["format"] != _FORMAT:
        raise ValueError(f"its format is {kept['format']!r}, not {_FORMAT!r}")
    if kept["budget"] != "auto":
        if type(kept["budget"]) is not int:
            raise TypeError(f"its budget is {kept['budget']!r}")
        parse_size(kept["budget"], what="its budget")
    for tier, rank in kept["tiers"].items():
        if not tier.isprintable() or not tier or type(rank) is not int or abs(rank) > _LARGEST_RANK:
            raise ValueError(f"its tier {tier!r} has the rank {rank!r:.80}")
    for entry in kept["models"]:
        _check_model(entry)


def _check_model(entry: dict[str, Any]) -> None:
    for field, kind in _FIELDS.items():
        if not isinstance(entry[field], kind):
            raise TypeError(f"{field} of a model is {entry[field]!r}")
        if not str(entry[field]).isprintable():
            raise ValueError(f"{field} of a model is {entry[field]!r}")
    if entry["residency"] not in RESIDENCIES:
        raise ValueError(f"{entry['name']!r} has residency {entry['residency']!r}")
