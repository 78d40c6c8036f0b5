"""A source: what a user gives as a model, and how it becomes an object.

`resolve` looks at the source, validates every weight file behind it and builds nothing; `Source.build`
then builds. A library's loader is never trusted to have filled every weight: what the files lack is a
`SourceError`, since a parameter that keeps its initial value computes nonsense without a word.
Pickles are only read with ``weights_only``, and remote code is never run.

No locks. Refuses to know eviction, devices (everything is built on the CPU) and notebooks. torch is
imported at once; transformers, sentence-transformers, diffusers and the hub only when a source asks.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import types
import weakref
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vram_magic.errors import SourceError, VRAMError
from vram_magic.models.origin import checkpoints_in, state_entries
from vram_magic.residency.checkpoint import (
    INDEX_SUFFIX,
    Checkpoint,
    FileIdentity,
    TensorRange,
    some_of,
    torch_dtype_name,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Loader = Callable[[Path, torch.dtype | None], object]

__all__ = ["Source", "holds_modules", "modules_of", "resolve"]

_PICKLES = (".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth")
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
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
        raise _refused(source, "--into goes with a .safetensors file or an index of shards.")
    if holds_modules(source):
        return Source("object", ("object", _Same(source), wanted), lambda: _converted(source, wanted))
    if callable(source):
        return _from_builder(source, wanted)
    raise _refused(source, "It is no nn.Module, holds none as an attribute, and cannot be called.")


# --- objects -----------------------------------------------------------------------------------------------


def holds_modules(obj: object) -> bool:
    """Tell whether it is an `nn.Module`, or holds one where `modules_of` looks."""
    return bool(modules_of(obj))


def modules_of(obj: object) -> list[tuple[str, nn.Module]]:
    """The distinct root modules of an object with the names it holds them under; "" for a module itself."""
    if isinstance(obj, nn.Module):
        return [("", obj)]
    found: dict[int, tuple[str, nn.Module]] = {}
    for name, value in _leaves(obj):
        if isinstance(value, nn.Module):
            found.setdefault(id(value), (name, value))
    inner = {id(part) for _, root in found.values() for part in root.modules() if part is not root}
    return [pair for key, pair in found.items() if key not in inner]


def _leaves(obj: object) -> Iterator[tuple[str, object]]:
    """An object's attributes, and what lies one level inside those that are lists, tuples or dicts."""
    for name, value in _attributes(obj):
        if isinstance(value, dict):
            yield from ((f"{name}.{key}", item) for key, item in list(value.items()))
        elif isinstance(value, list | tuple):
            yield from ((f"{name}.{index}", item) for index, item in enumerate(value))
        else:
            yield name, value


def _attributes(obj: object) -> Iterator[tuple[str, object]]:
    if isinstance(obj, type | types.ModuleType) or inspect.isroutine(obj):
        return  # their attributes belong to everyone
    yield from list(getattr(obj, "__dict__", {}).items())
    for kind in type(obj).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            yield slot, getattr(obj, slot, None)
    yield from _components(obj)


def _components(obj: object) -> list[tuple[str, object]]:
    """What a diffusers pipeline lists, where it is a property (a plain attribute was seen already)."""
    if not isinstance(inspect.getattr_static(obj, "components", None), property):
        return []
    try:
        components = obj.components  # type: ignore[attr-defined]
    except Exception:  # noqa: BLE001 - a half-built pipeline's property may raise anything
        return []
    return list(components.items()) if isinstance(components, Mapping) else []


def _from_builder(builder: Callable[..., object], dtype: torch.dtype | None) -> Source:
    if not _takes_no_arguments(builder):
        raise _refused(builder, "A builder is called without arguments, and this one needs some.")

    def build() -> object:
        built = builder()  # its errors are the user's own, so they pass as they are
        if not holds_modules(built):
            raise _refused(built, "The builder gave it, and it neither is nor holds an nn.Module.")
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
    with _reading(source):
        is_folder, is_file = path.is_dir() and source != "", path.is_file()
    if is_folder:
        return _from_folder(path, dtype, into)
    if is_file or path.suffix in (*_PICKLES, ".safetensors") or path.name.endswith(INDEX_SUFFIX):
        return _from_file(path, dtype, into)
    if isinstance(source, str) and _HUB_ID.fullmatch(source):
        return _from_folder(_downloaded(source), dtype, into)
    raise _refused(source, "There is no such file or folder, and it is not the form of a hub id.")


def _from_file(path: Path, dtype: torch.dtype | None, into: object) -> Source:
    if path.name.endswith((".safetensors", INDEX_SUFFIX)):
        if into is None:
            raise _refused(path, "It holds weights but no module.", f"%load_model NAME {path} --into MODULE")
        return _from_weights(path, dtype, into)
    if path.suffix in _PICKLES:
        raise _refused(path, "It is a pickle, which can run any code when read.", _conversion(path))
    raise _refused(path, "It is neither a .safetensors file nor an index of shards.")


def _conversion(path: Path) -> str:
    return (
        "import torch, safetensors.torch as st; weights = torch.load("
        f"{str(path)!r}, weights_only=True); st.save_file("
        f"{{name: t.clone() for name, t in weights.items()}}, {str(path.with_suffix('.safetensors'))!r})"
    )


def _from_folder(folder: Path, dtype: torch.dtype | None, into: object) -> Source:
    if into is not None:
        return _from_weights(folder, dtype, into)
    for marker, (kind, load) in _loaders(folder).items():
        if (folder / marker).is_file():
            processor = _processor_of(folder) if kind == "transformers" else None
            return _from_library(kind, folder, dtype, load, processor)
    markers = ", ".join(_loaders(folder))
    raise _refused(folder, f"It has none of {markers}, so no library's save_pretrained made it.")


def _loaders(folder: Path) -> dict[str, tuple[str, Loader]]:
    """Marker file -> kind and loader; the first marker that is there decides."""
    is_part = "_class_name" in _config_of(folder)  # one component of a pipeline, saved by itself
    return {
        "modules.json": ("sentence-transformers", _load_sentence_transformer),
        "model_index.json": ("diffusers", _load_pipeline),
        "config.json": ("diffusers", _load_component) if is_part else ("transformers", _load_transformer),
    }


def _from_library(
    kind: str,
    folder: Path,
    dtype: torch.dtype | None,
    load: Loader,
    processor: Callable[[], object] | None,
) -> Source:
    def build() -> object:
        _weight_files(folder)  # once more: a lazy model is built long after it was named
        with _reading(folder):
            return load(folder, dtype)

    files = _weight_files(folder)
    key = (kind, str(folder.resolve()), dtype, files)
    return Source(kind, key, build, folder if files else None, processor)


def _weight_files(folder: Path) -> tuple[FileIdentity, ...]:
    """What the folder's safetensors files are now, all validated; empty where there are only pickles."""
    return tuple(file.identity for _, checkpoint in checkpoints_in(folder) for file in checkpoint.files)


def _downloaded(repo_id: str) -> Path:
    hub = _library("huggingface_hub")
    try:
        folder = Path(hub.snapshot_download(repo_id, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_OTHER_RUNTIMES))
        if not any(folder.rglob("*.safetensors")):
            hub.snapshot_download(repo_id, allow_patterns=_HUB_PICKLES, ignore_patterns=_HUB_OTHER_RUNTIMES)
    except Exception as error:
        cause = f"No folder has that name, and the hub gave nothing: {_first_line(error)}"
        remedy = f"!hf download {repo_id}   (while online)"
        raise _refused(repo_id, cause, remedy) from error
    return folder


# --- the libraries -----------------------------------------------------------------------------------------


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
    absent = {names[0] for names in _ties(entries).values() if held.isdisjoint(names)}
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
        dtype = _dtype_in_file(tensor)
        if dtype.is_floating_point:
            sizes[dtype] = sizes.get(dtype, 0) + tensor.nbytes
    return max(sizes, key=sizes.__getitem__, default=torch.float32)


def _dtype_in_file(tensor: TensorRange) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, torch_dtype_name(tensor.dtype))
    return dtype


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


def _processor_of(folder: Path) -> Callable[[], object] | None:
    has_files = any((folder / name).is_file() for name in _PROCESSOR_FILES)
    return (lambda: _load_processor(folder)) if has_files else None


def _load_processor(folder: Path) -> object:
    transformers, causes = _library("transformers"), []
    for name in _PROCESSOR_CLASSES:
        try:
            return getattr(transformers, name).from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # noqa: BLE001 - each class refuses the others' files in its own way
            causes.append(f"{name}: {_first_line(error)}")
    raise _refused(folder, "No processor could be read from it. " + "; ".join(causes))


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
    with _reading(folder):
        config = json.loads(path.read_bytes()) if path.is_file() else {}
    return config if isinstance(config, dict) else {}


# --- a file of weights for the user's own module -----------------------------------------------------------


def _from_weights(path: Path, dtype: torch.dtype | None, into: object) -> Source:
    if not (isinstance(into, nn.Module) or callable(into)):
        raise _refused(into, "--into takes an nn.Module or a callable that builds one.")

    def build() -> object:
        module = into if isinstance(into, nn.Module) else into()
        if not isinstance(module, nn.Module):
            raise _refused(module, "The --into callable gave it, and it is no nn.Module.")
        return _fill(module, Checkpoint.open(path), dtype)

    files = tuple(file.identity for file in Checkpoint.open(path).files)
    return Source("safetensors", ("safetensors", str(path.resolve()), dtype, files, _identity(into)), build, path)


def _fill(module: nn.Module, checkpoint: Checkpoint, dtype: torch.dtype | None) -> nn.Module:
    """Give every entry of the state dict its value from the file; checks all of it before it changes any."""
    _check_fit(module, checkpoint)
    if dtype is not None:
        module.to(dtype)
    entries = state_entries(module)
    assigned: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for names in _ties(entries).values():
            value = _read(checkpoint.tensors[next(name for name in names if name in checkpoint.tensors)])
            if entries[names[0]].is_meta:
                assigned |= dict.fromkeys(names, _like(entries[names[0]], value, dtype))
            else:
                entries[names[0]].copy_(value)
    if assigned:
        module.load_state_dict(assigned, strict=False, assign=True)
    return module


def _like(entry: torch.Tensor, value: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """What takes a meta entry's place: of the file's dtype, unless one was asked for."""
    value = value if dtype is None else value.to(entry.dtype)
    return nn.Parameter(value, entry.requires_grad) if isinstance(entry, nn.Parameter) else value


def _check_fit(module: nn.Module, checkpoint: Checkpoint) -> None:
    entries, held = state_entries(module), checkpoint.tensors
    unfilled = [names[0] for names in _ties(entries).values() if not any(name in held for name in names)]
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


def _ties(entries: Mapping[str, torch.Tensor]) -> dict[object, list[str]]:
    """The names of each distinct tensor: one object under two names, or two views of the same bytes."""
    groups: dict[object, list[str]] = {}
    for name, tensor in entries.items():
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        is_real = not tensor.is_meta and tensor.numel() > 0
        groups.setdefault(place if is_real else id(tensor), []).append(name)
    return groups


def _read(tensor: TensorRange) -> torch.Tensor:
    raw = torch.empty(tensor.nbytes, dtype=torch.uint8, device="cpu")
    tensor.file.read_into(raw.numpy().data, tensor.offset)
    return raw.view(_dtype_in_file(tensor)).view(tensor.shape)


# --- words -------------------------------------------------------------------------------------------------


def _dtype_named(name: str | None) -> torch.dtype | None:
    text = str(name).removeprefix("torch.")
    if name is None or text == "auto":
        return None
    dtype = getattr(torch, _SHORT_DTYPES.get(text, text), None)
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        return dtype
    raise _refused(name, "It is no floating-point dtype of torch.", "%load_model NAME SOURCE --dtype bfloat16")


@contextmanager
def _reading(source: object) -> Iterator[None]:
    """Turn whatever a library raises into a `SourceError`, except what is not the source's fault."""
    try:
        yield
    except (VRAMError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        raise _refused(source, f"{type(error).__name__}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _refused(source: object, cause: str, remedy: str = "%load_model NAME MODEL_OR_BUILDER_OR_FOLDER") -> SourceError:
    shown = str(source) if isinstance(source, str | os.PathLike) else f"an object of type {type(source).__name__}"
    return SourceError(f"No model can be made of {shown}.\n0 weights were loaded.\n{cause}\n{remedy}")
