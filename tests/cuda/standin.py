"""The stand-in CUDA runtime seen from Python: builds it, starts a process on it, sets and asks it.

`runtime/` holds its C sources. Preloaded, they let the unmodified CUDA build of torch start without a card: device
memory is host memory below a capacity, copies are real, kernels do nothing (products of float32 matrices alone are
computed). So torch's own caching allocator, streams, pools and out-of-memory are what the tests meet; values that come
from kernels mean nothing there. All sizes are bytes.

    python tests/cuda/standin.py COMMAND...     runs a command on it
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["CAPACITY_BYTES", "Standin", "build", "environment", "is_preloaded", "main"]

CAPACITY_BYTES = 256 << 20

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
_SOURCES = _HERE / "runtime"
_COMPILE = ("gcc", "-std=gnu11", "-O2", "-g", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror")
_PRELOADED = "libstandin_cudart.so"
_LIBRARIES = {  # by the names under which torch and pynvml look for them
    _PRELOADED: ("cudart.c", "streams.c", "cublas.c"),
    "libcuda.so.1": ("driver.c",),
    "libnvidia-ml.so.1": ("nvml.c",),
}
_COUNTERS = ("mallocs", "frees", "ooms", "launches", "syncs")


# ------------------------------------------------------------------------------------------------------- building


def build() -> Path:
    """The folder of the built libraries; made when a source or torch has changed. Takes about a second."""
    folder = _ROOT / "build" / f"standin-{_fingerprint()}"
    if not folder.is_dir():
        folder.parent.mkdir(exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix="standin-", dir=folder.parent))
        includes = [f"-I{path}" for path in _include_folders()]
        for library, sources in _LIBRARIES.items():
            paths = [str(_SOURCES / source) for source in sources]
            subprocess.run([*_COMPILE, *includes, *paths, "-o", str(made / library), "-lpthread", "-ldl"], check=True)
        if not folder.is_dir():  # or somebody else has built it meanwhile
            made.rename(folder)
    return folder


def _fingerprint() -> str:
    sources = b"".join(path.read_bytes() for path in sorted(_SOURCES.iterdir()))
    return hashlib.sha256(sources + importlib.metadata.version("torch").encode()).hexdigest()[:16]


def _include_folders() -> Iterator[Path]:
    """CUDA's headers come with the wheels that torch needs; those of its compiler, `crt/`, with triton."""
    for package, pattern in (("nvidia", "*/include"), ("triton", "backends/nvidia/include")):
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise SystemExit(f"The stand-in needs the headers in the package {package!r}, of torch's CUDA build")
        for location in spec.submodule_search_locations:
            yield from sorted(Path(location).glob(pattern))


# ------------------------------------------------------------------------------------------------------- starting


def environment(**changes: str) -> dict[str, str]:
    """The environment of a process that starts on the stand-in, with changes; values are text."""
    folder = build()
    paths = {name: os.pathsep.join(filter(None, (str(first), os.environ.get(name)))) for name, first in _paths(folder)}
    # cuBLASLt has no stand-in; torch then takes cuBLAS for a layer with a bias too.
    own = {"LD_PRELOAD": str(folder / _PRELOADED), "DISABLE_ADDMM_CUDA_LT": "1"}
    return {"STANDIN_CAPACITY": str(CAPACITY_BYTES)} | dict(os.environ) | paths | own | changes


def _paths(folder: Path) -> Iterator[tuple[str, Path]]:
    yield "LD_LIBRARY_PATH", folder
    yield "PYTHONPATH", _ROOT


def is_preloaded() -> bool:
    """Whether this process runs on the stand-in."""
    return hasattr(ctypes.CDLL(None), "standin_count")


def main() -> None:
    """Becomes the command given on the command line, on the stand-in."""
    os.execvpe(sys.argv[1], sys.argv[1:], environment())


# ------------------------------------------------------------------------------------------------ setting and asking


class Standin:
    """The stand-in under this process."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        for name in ("standin_capacity", "standin_used"):
            getattr(self._library, name).restype = ctypes.c_size_t
        self._library.standin_count.restype = ctypes.c_long
        self._library.standin_set_capacity.argtypes = [ctypes.c_size_t]
        self._library.standin_set_foreign.argtypes = [ctypes.c_uint, ctypes.c_size_t, ctypes.c_char_p]
        self._library.standin_set_malloc_delay_us.argtypes = [ctypes.c_long]

    def reset(self) -> None:
        """As at the start, but for the counters and what is allocated."""
        self.capacity_bytes = CAPACITY_BYTES
        self.set_foreign(0)
        self.delay_mallocs(0)
        self.pretend_capture(on=False)

    @property
    def capacity_bytes(self) -> int:
        return int(self._library.standin_capacity())

    @capacity_bytes.setter
    def capacity_bytes(self, size_bytes: int) -> None:
        self._library.standin_set_capacity(size_bytes)

    @property
    def used_bytes(self) -> int:
        """What the driver has given to this process."""
        return int(self._library.standin_used())

    def counts(self) -> dict[str, int]:
        """Calls since the start: mallocs, frees, ooms (mallocs that failed), launches, syncs."""
        return {name: int(self._library.standin_count(i)) for i, name in enumerate(_COUNTERS)}

    def set_foreign(self, size_bytes: int, pid: int = 0, name: str = "") -> None:
        """Another process holds so much; NVML names it, unless its pid is 0."""
        self._library.standin_set_foreign(pid, size_bytes, name.encode())

    def delay_mallocs(self, microseconds: int) -> None:
        """Each cudaMalloc takes so long, as a full card's do."""
        self._library.standin_set_malloc_delay_us(microseconds)

    def pretend_capture(self, *, on: bool) -> None:
        """Every stream tells that it is being captured; waiting for one is an error."""
        self._library.standin_pretend_capture(int(on))


if __name__ == "__main__":
    main()
