"""The libraries that build models: transformers, sentence-transformers, diffusers, and the hub's download.

A library's loader is never trusted to have filled every weight: what the files lack is a `SourceError`, since
a parameter that keeps its initial value computes nonsense without a word. Whatever else a library raises
becomes a `SourceError` too. Pickles are only read with ``weights_only``, and remote code is never run.

No locks. Refuses to know eviction, devices (everything is built on the CPU) and what else can be a source.
A library is imported only when a source asks for it.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
from collections.abc import Callable, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vram_magic.errors import SourceError, VRAMError, closest
from vram_magic.models.filling import dtype_in_file, ties
from vram_magic.models.origin import checkpoints_in, state_entries
from vram_magic.residency.checkpoint import Checkpoint, some_of

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["NOWHERE", "Loader", "downloaded", "loaders", "processor_of", "reading", "refused", "unfound"]

NOWHERE = "is no file or folder here"
"""So begins the cause where nothing has the name."""
_LISTED = 10_000  # entries of a folder

_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
_HUB_PICKLES = ["*pytorch_model*.bin"]
_HUB_OTHER_RUNTIMES = ["onnx/*", "openvino/*", "original/*", "*.fp16.*"]
_PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
_PROCESSOR_CLASSES = ("AutoProcessor", "AutoTokenizer", "AutoFeatureExtractor", "AutoImageProcessor")

Loader = Callable[[Path, torch.dtype | None], object]
"""Builds what a folder holds, in a dtype or in the checkpoint's own; raises `SourceError`, or what the library does."""


def loaders(folder: Path) -> dict[str, tuple[str, Loader]]:
    """Marker file -> kind and loader; the first marker that is there decides."""
    is_part = "_class_name" in _config_of(folder)  # one component of a pipeline, saved by itself
    return {
        "modules.json": ("sentence-transformers", _load_sentence_transformer),
        "model_index.json": ("diffusers", _load_pipeline),
        "config.json": ("diffusers", _load_component) if is_part else ("transformers", _load_transformer),
    }


def downloaded(repo_id: str) -> Path:
    """The hub repository's snapshot in the local cache: pickled weights only where there are no others."""
    hub = _library("huggingface_hub")
    try:
        folder = Path(hub.snapshot_download(repo_id, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_OTHER_RUNTIMES))
        if not any(folder.rglob("*.safetensors")):
            hub.snapshot_download(repo_id, allow_patterns=_HUB_PICKLES, ignore_patterns=_HUB_OTHER_RUNTIMES)
    except Exception as error:
        owner, slash, _ = repo_id.partition("/")
        download = f"!hf download {repo_id}   (while online)" if slash and not Path(owner).is_dir() else ""
        raise unfound(repo_id, f"The hub gave nothing: {_first_line(error)}", download) from error
    return folder


def unfound(name: str, hub: str, download: str = "") -> SourceError:
    """The error for what is no path; ``hub``: why it is no hub id either, ``download``: what would fetch it."""
    here, alike = "", ""
    with suppress(OSError, ValueError):  # there may be no such folder, or no current one
        here = f" ({os.getcwd()})"
        path = Path(name).expanduser()
        with os.scandir(path.parent) as entries:
            known = [entry.name for entry in itertools.islice(entries, _LISTED)]
        if meant := closest(path.name, known):
            alike = str(path.with_name(meant))
    guess = f"Did you mean {alike!r}? %load_model NAME {alike}" if alike else ""
    remedies = [text for text in (guess, download) if text]
    cause = f"{name!r} {NOWHERE}{here}. {hub}"
    return refused(name, cause, "   or ".join(remedies)) if remedies else refused(name, cause)


def _load_transformer(folder: Path, dtype: torch.dtype | None) -> object:
    transformers = _library("transformers")
    named = getattr(transformers, str((_config_of(folder).get("architectures") or [""])[0]), None)
    known = isinstance(named, type) and issubclass(named, transformers.PreTrainedModel)
    loader: Any = named if known else transformers.AutoModel
    model, info = loader.from_pretrained(
        str(folder),
        dtype=dtype or "auto",
        local_files_only=True,
        trust_remote_code=False,
        weights_only=True,
        output_loading_info=True,
    )
    _refuse_unfilled(folder, info)
    return model


def _load_sentence_transformer(folder: Path, dtype: torch.dtype | None) -> object:
    library = _library("sentence_transformers")
    model = library.SentenceTransformer(
        str(folder),
        device="cpu",
        local_files_only=True,
        trust_remote_code=False,
        model_kwargs={"dtype": dtype or "auto", "weights_only": True},
    )
    _refuse_unfilled(folder, {"missing_keys": _unmarked(model)})
    return model


def _unmarked(model: nn.Module) -> set[str]:
    """Parameters of inner transformers that `from_pretrained` did not mark as read from the file.

    sentence-transformers drops the loading info, so the mark is all there is. A pooler is left out of
    many of its checkpoints, and not used by it.
    """
    marks = {
        f"{prefix}.{name}": getattr(parameter, "_is_hf_initialized", False)
        for prefix, part in model.named_modules()
        if hasattr(part, "base_model_prefix")
        for name, parameter in part.named_parameters()
        if "pooler." not in name
    }
    return {name for name, marked in marks.items() if not marked} if any(marks.values()) else set()


def _load_pipeline(folder: Path, dtype: torch.dtype | None) -> object:
    """A pipeline in its own dtypes: diffusers' default would be float32 for all."""
    diffusers = _library("diffusers")
    checkpoints = dict(checkpoints_in(folder))
    own = {part: _dtype_of(checkpoint) for part, checkpoint in checkpoints.items()}
    wanted = dtype or (own if len(set(own.values())) > 1 else next(iter(own.values()), None))
    pipeline = diffusers.DiffusionPipeline.from_pretrained(
        str(folder), local_files_only=True, trust_remote_code=False, **_diffusers_dtype(diffusers, wanted)
    )
    parts = {name: getattr(pipeline, name, None) for name in checkpoints}
    modules = {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
    unfilled = {f"{n}.{key}" for n, part in modules.items() for key in _unfilled(part, checkpoints[n])}
    _refuse_unfilled(folder, {"missing_keys": unfilled})
    return pipeline


def _unfilled(part: nn.Module, checkpoint: Checkpoint) -> set[str]:
    """What a pipeline's part did not get from its file: pipelines drop the loading info too.

    A file that also has names without a place is of an older form, whose names diffusers translates.
    """
    if hasattr(part, "base_model_prefix"):
        return _unmarked(part)
    entries, held = state_entries(part), checkpoint.tensors.keys()
    absent = {names[0] for names in ties(entries).values() if held.isdisjoint(names)}
    return absent if held <= entries.keys() else set()


def _load_component(folder: Path, dtype: torch.dtype | None) -> object:
    diffusers = _library("diffusers")
    own = next((_dtype_of(checkpoint) for _, checkpoint in checkpoints_in(folder)), None)
    model, info = getattr(diffusers, str(_config_of(folder)["_class_name"])).from_pretrained(
        str(folder),
        local_files_only=True,
        output_loading_info=True,
        **_diffusers_dtype(diffusers, dtype or own),
    )
    _refuse_unfilled(folder, info)
    return model


def _diffusers_dtype(diffusers: Any, wanted: object) -> dict[str, object]:
    """The argument was renamed in 0.40; the old name warns, the new one was ignored before."""
    is_renamed = tuple(int(number) for number in diffusers.__version__.split(".")[:2]) >= (0, 40)
    return {"dtype" if is_renamed else "torch_dtype": wanted}


def _dtype_of(checkpoint: Checkpoint) -> torch.dtype:
    """The dtype of most of its floating-point bytes."""
    sizes: dict[torch.dtype, int] = {}
    for tensor in checkpoint.tensors.values():
        dtype = dtype_in_file(tensor)
        if dtype.is_floating_point:
            sizes[dtype] = sizes.get(dtype, 0) + tensor.nbytes
    return max(sizes, key=sizes.__getitem__, default=torch.float32)


def _refuse_unfilled(folder: Path, info: Mapping[str, Any]) -> None:
    mismatched = {entry[0] for entry in info.get("mismatched_keys", ())}
    unfilled = {*info.get("missing_keys", ()), *mismatched}
    if unfilled or info.get("error_msgs"):
        raise SourceError(
            f"The checkpoint {folder} does not fill the model.\n"
            f"{len(unfilled)} weights would keep random values: {some_of(unfilled)}.\n"
            "Its files lack them, or have other shapes: another model's shard, or an incomplete save.\n"
            "Fetch or save the folder again, then: %load_model NAME FOLDER"
        )


def processor_of(folder: Path) -> Callable[[], object] | None:
    """What reads the folder's processor or tokenizer, or None where it has no file of one."""
    has_files = any((folder / name).is_file() for name in _PROCESSOR_FILES)
    return (lambda: _load_processor(folder)) if has_files else None


def _load_processor(folder: Path) -> object:
    transformers, causes = _library("transformers"), []
    for name in _PROCESSOR_CLASSES:
        try:
            return getattr(transformers, name).from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # noqa: BLE001 - each class refuses the others' files in its own way
            causes.append(f"{name}: {_first_line(error)}")
    raise refused(folder, "No processor could be read from it. " + "; ".join(causes))


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.replace("_", "-") if name != "huggingface_hub" else name
        raise SourceError(
            f"This source needs the library {name}.\n0 models were loaded.\n"
            f"It cannot be imported: {_first_line(error)}\n%pip install {package}"
        ) from error


def _config_of(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    with reading(folder):
        config = json.loads(path.read_bytes()) if path.is_file() else {}
    return config if isinstance(config, dict) else {}


# --- words --------------------------------------------------------------------------------------------------


@contextmanager
def reading(source: object) -> Iterator[None]:
    """Turn whatever a library raises into a `SourceError`, except what is not the source's fault."""
    try:
        yield
    except (VRAMError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        raise refused(source, f"{type(error).__name__}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def refused(source: object, cause: str, remedy: str = "%load_model NAME MODEL_OR_BUILDER_OR_FOLDER") -> SourceError:
    """The four-part error for what cannot become a model, to be raised."""
    shown = str(source) if isinstance(source, str | os.PathLike) else f"an object of type {type(source).__name__}"
    return SourceError(f"No model can be made of {shown}.\n0 weights were loaded.\n{cause}\n{remedy}")
