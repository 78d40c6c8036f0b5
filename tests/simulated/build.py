"""Builds the simulated GPU once for each torch version and source, and finds it again.

It must not import torch: the library has to be in the process before torch is. So torch's folder and version are read
from the file system. The library lands in a private folder of the user's cache, under a temporary name and then
renamed: processes that build at once both end with a whole file, and no lock is needed.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

__all__ = ["SimulationUnavailable", "build", "torch_folder"]

_SOURCES = Path(__file__).parent
_COMPILERS = ("c++", "g++", "clang++")


class SimulationUnavailable(Exception):  # noqa: N818  a state of the machine, which skips the run
    """There can be no simulated GPU in this process; the text says why."""


def torch_folder() -> Path:
    """Where torch is installed. Imports nothing."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise SimulationUnavailable("torch is not installed")
    return Path(spec.origin).parent


def build() -> Path:
    """The compiled library. Raises `SimulationUnavailable`."""
    compiler = os.environ.get("CXX") or next((c for c in _COMPILERS if shutil.which(c)), None)
    if compiler is None or shutil.which(compiler) is None:
        raise SimulationUnavailable("the simulated GPU needs a C++ compiler (install g++)")
    library = _folder() / f"simcuda-{_fingerprint(compiler)}.so"
    return library if library.is_file() else _compile(compiler, library)


def _fingerprint(compiler: str) -> str:
    digest = hashlib.sha256(f"{importlib.metadata.version('torch')}|{torch_folder()}|{compiler}".encode())
    for source in sorted([*_SOURCES.glob("*.cpp"), *_SOURCES.glob("*.h")]):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:20]


def _folder() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vram_magic-tests"
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise SimulationUnavailable(f"no folder to keep the simulated GPU in: {error}") from error
    return cache


def _compile(compiler: str, library: Path) -> Path:
    root = torch_folder()
    handle, temporary = tempfile.mkstemp(suffix=".so", dir=library.parent)
    os.close(handle)
    command = [compiler, "-O1", "-std=c++20", "-shared", "-fPIC", f"-I{root}/include", str(_SOURCES / "simcuda.cpp")]
    command += [f"-L{root}/lib", "-lc10", "-ltorch_cpu", "-ltorch", f"-Wl,-rpath,{root}/lib", "-o", temporary]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line] or ["no message"]
            raise SimulationUnavailable(f"{compiler} could not build the simulated GPU: {errors[0]}")
        os.replace(temporary, library)
    except (OSError, subprocess.SubprocessError) as error:
        raise SimulationUnavailable(f"{compiler} could not build the simulated GPU: {error}") from error
    finally:
        Path(temporary).unlink(missing_ok=True)
    return library
