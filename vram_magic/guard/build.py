"""Builds the native guard once for each torch version, and finds it again.

A library lands in a private folder of the user's cache under a name that carries everything it depends on: torch's
version and ABI, the compiler, and a hash of the source. It is written under a temporary name and renamed, so two
kernels that build at once both end with a whole file and no lock is needed.

``torch.utils.cpp_extension`` would do this too, but asks for ninja and for Python's headers; plain ``g++`` does.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

__all__ = ["GuardUnavailable", "build"]

_COMPILERS = ("c++", "g++", "clang++")


class GuardUnavailable(Exception):  # noqa: N818  it is a state that the report shows, not a failure of the user's
    """There is no native guard here; the text says why, for the report."""


def build(source: Path) -> Path:
    """The compiled library of ``source``. Raises `GuardUnavailable`."""
    compiler = os.environ.get("CXX") or next((c for c in _COMPILERS if shutil.which(c)), None)
    if compiler is None or shutil.which(compiler) is None:
        raise GuardUnavailable("no C++ compiler (install g++)")
    name = f"{source.stem}-{_fingerprint(source, compiler)}.so"
    for folder in _folders():
        if (library := folder / name).is_file():
            return library
        if os.access(folder, os.W_OK):
            return _compile(compiler, source, library)
    raise GuardUnavailable("no folder to keep the compiled guard in (home and temporary folder are read-only)")


def _fingerprint(source: Path, compiler: str) -> str:
    parts = (torch.__version__, torch.__file__, str(torch._C._GLIBCXX_USE_CXX11_ABI), compiler)
    return hashlib.sha256("|".join(parts).encode() + source.read_bytes()).hexdigest()[:20]


def _folders() -> list[Path]:
    """Private folders to look in, best first; made when missing, left out when they are somebody else's."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    wanted = [cache / "vram_magic", Path(tempfile.gettempdir()) / f"vram_magic-guard-{os.getuid()}"]
    return [folder for folder in wanted if _made_private(folder)]


def _made_private(folder: Path) -> bool:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError:
        return False
    # A library that someone else can write to is code that someone else can run as us.
    return status.st_uid == os.getuid() and not status.st_mode & 0o022


def _compile(compiler: str, source: Path, library: Path) -> Path:
    root = Path(torch.__file__).parent
    handle, temporary = tempfile.mkstemp(suffix=".so", dir=library.parent)
    os.close(handle)
    command = [compiler, "-O2", "-std=c++17", "-shared", "-fPIC", f"-I{root}/include", str(source)]
    command += [f"-L{root}/lib", "-lc10", f"-Wl,-rpath,{root}/lib", "-o", temporary]
    if torch._C._GLIBCXX_USE_CXX11_ABI is False:
        command.insert(1, "-D_GLIBCXX_USE_CXX11_ABI=0")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)  # noqa: S603
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise GuardUnavailable(f"{compiler} could not build the guard: {last}")
        os.replace(temporary, library)
    except (OSError, subprocess.SubprocessError) as error:
        raise GuardUnavailable(f"{compiler} could not build the guard: {error}") from error
    finally:
        Path(temporary).unlink(missing_ok=True)
    return library
