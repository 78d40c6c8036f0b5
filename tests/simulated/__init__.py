"""A simulated GPU: a device of type `cuda` in the CPU build of torch, for the tests.

Its memory is host memory under a hard capacity, handed out by a caching allocator with CUDA's statistics; freed memory
is filled with 0xEE, so that a use after free shows in the numbers. Operators run on the CPU's kernels over the very
same bytes; tensors of mixed devices are refused as on CUDA. `torch.cuda` is torch's own code over our bindings.

What it cannot show: work in flight, since all is done when its call returns; and an operator that holds no reference to
its arguments while it runs, since the fallback always holds one. The CPU's own kernels show the latter. Sparse and
quantized tensors, graphs and memory pools are missing; there is one device.

`load` must run before anything imports torch, which looks for CUDA only while it is imported. All sizes are bytes.
"""

from __future__ import annotations

import ctypes
import sys

from simulated.build import SimulationUnavailable, build, torch_folder

__all__ = [
    "CAPACITY_BYTES",
    "SimulationUnavailable",
    "live_bytes",
    "load",
    "set_capacity",
    "set_capturing",
    "set_foreign",
    "set_integrated",
    "set_poison",
]

CAPACITY_BYTES = 4 << 30
"""What the device has at the start."""

_states: list = []
"""The one state, once loaded."""


def load() -> None:
    """Puts the device into this process and imports torch. Raises `SimulationUnavailable`."""
    if _states:
        return
    if "torch" in sys.modules:
        raise SimulationUnavailable("the simulated GPU must be loaded before torch is imported")
    library = build()
    for name in ("libc10.so", "libtorch_cpu.so", "libtorch.so"):
        ctypes.CDLL(str(torch_folder() / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    loaded = ctypes.CDLL(str(library))
    for name in ("sim_set_capacity", "sim_set_foreign"):
        getattr(loaded, name).argtypes = [ctypes.c_uint64]
    loaded.sim_live.restype = ctypes.c_int64
    loaded.sim_pin.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
    loaded.sim_unpin.argtypes = [ctypes.c_void_p]
    from simulated import bindings  # it imports torch

    _states.append(bindings.State(loaded))
    set_capacity(CAPACITY_BYTES)
    bindings.install(_states[0])


def set_capacity(size_bytes: int) -> None:
    """How much memory the device has. What is allocated already stays."""
    _states[0].capacity_bytes = size_bytes
    _states[0].library.sim_set_capacity(size_bytes)


def set_foreign(size_bytes: int) -> None:
    """How much of it other processes hold."""
    _states[0].library.sim_set_foreign(size_bytes)


def set_poison(on: bool) -> None:
    """Whether memory is filled with 0xEE when it is fresh and when it is freed; on at the start."""
    _states[0].library.sim_set_poison(int(on))


def set_integrated(integrated: bool) -> None:
    """Whether the device calls itself one that shares the host's memory."""
    _states[0].integrated = integrated


def set_capturing(capturing: bool) -> None:
    """Whether a CUDA graph is being captured on every stream."""
    _states[0].capturing = capturing
    _states[0].library.sim_set_capturing(int(capturing))


def live_bytes() -> int:
    """What is allocated now, by the allocator's own count."""
    return int(_states[0].library.sim_live())
