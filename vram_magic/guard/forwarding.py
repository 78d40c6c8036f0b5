"""What the guard of accelerators needs to know of torch's CUDA headers, read from the installed text.

For the first way (``accelerator.cpp``): whether there is a class of allocators with figures, and whether `raw_alloc`
may be replaced in the allocator's table of functions. For the second (``forwarding.cpp``): the C++ text of a subclass
that hands every call on to torch's allocator. That class has some fifty virtual functions, which differ with torch's
version; so they are written anew from the header. A declaration that is not understood fails to compile, and then there
is no guard; nothing is guessed. Takes no lock, counts nothing.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from vram_magic.guard.build import GuardUnavailable

__all__ = [
    "GENERATED",
    "cuda_includes",
    "has_device_allocator",
    "overrides",
    "raw_alloc_comes_first",
    "torch_includes",
]

GENERATED = "forwarding_overrides.h"
"""The name under which ``forwarding.cpp`` includes the overrides."""

_CLASSES = (  # from the root down: header and the opening of the class
    ("c10/core/Allocator.h", r"struct C10_API Allocator \{"),
    ("c10/core/CachingDeviceAllocator.h", r"struct C10_API DeviceAllocator : public (?:c10::)?Allocator \{"),
    (
        "c10/cuda/CUDACachingAllocator.h",
        r"class (?:C10_CUDA_API )?CUDAAllocator : public (?:c10::)?DeviceAllocator \{",
    ),
)
_GUARDED = ("allocate", "raw_alloc", "raw_alloc_with_stream")  # written by hand in forwarding.cpp
_RAW_ALLOC = re.compile(
    r"\s*public:\s*virtual void\* raw_alloc\(size_t \w+\) = 0;"
    r"\s*virtual void\* raw_alloc_with_stream\(size_t \w+, cudaStream_t \w+\) = 0;"
)
_SIGNATURE = re.compile(r"(?P<result>.+?)\b(?P<name>\w+) ?\((?P<parameters>.*)\)(?P<rest>[^()]*)", re.DOTALL)
_NAMED = re.compile(r".*[\s*&>]\w+", re.DOTALL)
_OPENING, _CLOSING = "(<{[", ")>}]"


def torch_includes() -> Path:
    """Where the installed torch keeps its C++ headers."""
    return Path(torch.__file__).parent / "include"


def has_device_allocator(includes: Path) -> bool:
    """Whether torch has a class of allocators that tell what is allocated (since 2.9)."""
    try:
        return bool(_body(includes, *_CLASSES[1]))
    except GuardUnavailable:
        return False


def raw_alloc_comes_first(includes: Path) -> bool:
    """Whether CUDA's allocator has `raw_alloc` and `raw_alloc_with_stream` as its first own virtual functions."""
    try:
        return bool(_RAW_ALLOC.match(_body(includes, *_CLASSES[-1])))
    except GuardUnavailable:  # a torch without CUDA's headers, or with others
        return False


def overrides(includes: Path) -> str:
    """The overrides that hand on, as C++ text. Raises `GuardUnavailable` where the headers are not as expected."""
    written: dict[str, str] = {}
    for header, opening in _CLASSES:
        for declaration in _virtuals(_body(includes, header, opening)):
            signature, text = _override(declaration)
            written.setdefault(signature, text)
    return "\n".join(filter(None, written.values())) + "\n"


def cuda_includes() -> Path:
    """A folder with the CUDA runtime's headers from the environment. Raises `GuardUnavailable` when there is none."""
    for package, pattern in (("triton", "backends/nvidia/include"), ("nvidia", "*/include")):
        spec = importlib.util.find_spec(package)
        for root in (spec and spec.submodule_search_locations) or ():
            for folder in sorted(Path(root).glob(pattern)):
                if (folder / "cuda_runtime_api.h").is_file() and (folder / "crt/host_defines.h").is_file():
                    return folder
    raise GuardUnavailable("no headers of the CUDA runtime (they come with triton)")


def _body(includes: Path, header: str, opening: str) -> str:
    """The text of a class without its comments; what a comment calls a nameless parameter becomes its name."""
    try:
        text = (includes / header).read_text()
    except OSError as error:
        raise GuardUnavailable(f"torch's header {header} cannot be read") from error
    start = re.search(opening, text)
    end = text.find("\n};", start.end()) if start else -1
    if start is None or end < 0:
        raise GuardUnavailable(f"torch's header {header} is not as expected")
    body = re.sub(r"/\*(\w+)\*/", r" \1", text[start.end() : end])
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", body, flags=re.DOTALL)


def _virtuals(body: str) -> Iterator[str]:
    """The declarations of virtual functions, up to their body or semicolon, each on one line."""
    for match in re.finditer(r"\bvirtual\s+(?!~)", body):
        depth = 0
        for end in range(match.end(), len(body)):
            if depth == 0 and body[end] in ";{":
                yield " ".join(body[match.end() : end].split())
                break
            depth += (body[end] in _OPENING) - (body[end] in _CLOSING)


def _override(declaration: str) -> tuple[str, str]:
    """What tells the function from its namesakes, and its override; no text for one that is written by hand."""
    parts = _SIGNATURE.fullmatch(declaration)
    if parts is None:
        raise GuardUnavailable(f"a declaration in torch's headers is not understood: {declaration}")
    name, parameters = parts["name"], [_named(*item) for item in enumerate(_split(parts["parameters"]))]
    qualifiers = " ".join(word for word in ("const", "noexcept") if word in parts["rest"].split())
    given = ", ".join(f"std::forward<decltype({each})>({each})" for each in map(_name_of, parameters))
    head = f"{parts['result']}{name}({', '.join(parameters)}) {qualifiers}"
    text = f"{head} override {{ return base->{name}({given}); }}"
    types = [re.sub(r"\bc10::|\s", "", each[: -len(_name_of(each))]) for each in parameters]
    return f"{name}({','.join(types)}){qualifiers}", "" if name in _GUARDED else text


def _split(parameters: str) -> list[str]:
    """The parameters without their default values."""
    found, depth, start = [], 0, 0
    for end, letter in enumerate(f"{parameters},"):
        if letter == "," and depth == 0:
            found.append(parameters[start:end].split("=", maxsplit=1)[0].strip())
            start = end + 1
        depth += (letter in _OPENING) - (letter in _CLOSING)
    return [each for each in found if each]


def _named(place: int, parameter: str) -> str:
    return parameter if _NAMED.fullmatch(parameter) else f"{parameter} argument{place}"


def _name_of(parameter: str) -> str:
    return re.split(r"[\s*&>]", parameter)[-1]
