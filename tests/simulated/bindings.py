"""The bindings that a CUDA build of torch has under `torch._C` and the CPU build has not, for the simulated GPU.

With these in place torch's own Python code of `torch.cuda` runs as it is: lazy initialisation, streams, statistics,
random numbers. What it bound to stand-ins while it was imported is bound anew here. Sizes are bytes.
"""

from __future__ import annotations

import ctypes
import os
import uuid
from typing import Any, Self

import torch

__all__ = ["State", "install"]


class State:
    """What the tests can set, and the loaded library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.capacity_bytes = 0
        self.integrated = False
        self.capturing = False
        self.forked = False


class DeviceProperties:
    """As CUDA's: what the driver tells of a device."""

    name = "Simulated GPU"
    major, minor = 8, 0
    multi_processor_count = 1
    warp_size = 32
    is_multi_gpu_board = 0
    gcnArchName = "sm_80"  # noqa: N815  torch's name
    uuid = uuid.uuid5(uuid.NAMESPACE_URL, "simulated-gpu")

    def __init__(self, state: State) -> None:
        self.total_memory = state.capacity_bytes
        self.is_integrated = int(state.integrated)


class Stream(torch.Stream):
    """`torch.cuda.Stream` over the device's generic streams."""

    def __new__(cls, device: Any = None, priority: int = 0, **known: int) -> Self:
        if known:
            return super().__new__(cls, **known)
        return super().__new__(cls, device=_device(device), priority=priority)

    @property
    def cuda_stream(self) -> int:
        return self.stream_id


class Event(torch.Event):
    """`torch.cuda.Event` over the device's generic events."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Self:
        return super().__new__(
            cls, device="cuda", enable_timing=enable_timing, blocking=blocking, interprocess=interprocess
        )

    def elapsed_time(self, end_event: torch.Event) -> float:
        return torch.ops.sim.elapsed_ms(self.event_id, end_event.event_id)  # torch's own takes no subclass


class Runtime:
    """`torch.cuda.cudart()`: the calls of the CUDA runtime that torch and its users make from Python."""

    class cudaError:  # noqa: N801  the runtime's name
        success = 0

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def cudaGetErrorString(self, code: int) -> str:  # noqa: N802
        return f"error {code}"

    def cudaMemGetInfo(self, device: int) -> tuple[int, int]:  # noqa: N802
        return torch._C._accelerator_getMemoryInfo(device)

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:  # noqa: N802
        self._library.sim_pin(address, size_bytes)
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        return 0 if self._library.sim_unpin(address) else 1


def install(state: State) -> None:
    """Makes `torch.cuda` see the device."""
    for name, function in _bindings(state).items():
        setattr(torch._C, name, function)
    cuda = torch.cuda
    cuda._exchange_device = torch._C._cuda_exchangeDevice
    cuda._maybe_exchange_device = torch._C._cuda_maybeExchangeDevice
    cuda._is_in_bad_fork = torch._C._cuda_isInBadFork
    cuda._cudart = Runtime(state.library)
    cuda.graphs._cuda_isCurrentStreamCapturing = torch._C._cuda_isCurrentStreamCapturing
    for module in (cuda, cuda.streams):
        module.Stream, module.Event = Stream, Event
    torch.UntypedStorage.__new__ = _new_storage
    torch.UntypedStorage.resize_ = _resize_storage
    torch._C._set_cudnn_enabled(False)  # else each look for it warns that this build has none
    os.register_at_fork(after_in_child=lambda: setattr(state, "forked", cuda._initialized))


def _bindings(state: State) -> dict[str, Any]:
    accelerator = torch._C

    def init() -> None:
        torch.cuda.default_generators = (torch.ops.sim.default_generator(),)
        torch.cuda._get_device_properties = lambda _: DeviceProperties(state)

    def device_of(stream: torch.Stream) -> tuple[int, int, int]:
        return stream.stream_id, stream.device_index, stream.device_type

    def set_stream(**known: int) -> None:
        accelerator._accelerator_setStream(torch.Stream(**known))

    return {
        "_cuda_init": init,
        "_cuda_isInBadFork": lambda: state.forked,
        "_cuda_getDeviceCount": lambda: 1,
        "_cuda_getArchFlags": lambda: "sm_80",
        "_cuda_getDevice": lambda: 0,
        "_cuda_setDevice": accelerator._accelerator_setDeviceIndex,
        "_cuda_exchangeDevice": accelerator._accelerator_exchangeDevice,
        "_cuda_maybeExchangeDevice": accelerator._accelerator_maybeExchangeDevice,
        "_cuda_hasPrimaryContext": lambda _: torch.cuda.is_initialized(),
        "_cuda_synchronize": lambda: None,
        "_cuda_ipc_collect": lambda: None,
        "_cuda_isCurrentStreamCapturing": lambda: state.capturing,
        "_cuda_getCurrentStream": lambda device: device_of(accelerator._accelerator_getStream(device)),
        "_cuda_getCurrentRawStream": lambda device: accelerator._accelerator_getStream(device).stream_id,
        "_cuda_getDefaultStream": lambda device: (0, device, torch.Stream(device="cuda").device_type),
        "_cuda_setStream": set_stream,
        "_cuda_emptyCache": accelerator._accelerator_emptyCache,
        "_cuda_memoryStats": accelerator._accelerator_getDeviceStats,
        "_cuda_resetAccumulatedMemoryStats": accelerator._accelerator_resetAccumulatedStats,
        "_cuda_resetPeakMemoryStats": accelerator._accelerator_resetPeakStats,
        "_cuda_getAllocatorBackend": lambda: "native",
    }


def _device(device: Any) -> torch.device:
    return torch.device("cuda", torch.cuda._utils._get_device_index(device, optional=True))


def _new_storage(cls: type, *arguments: Any, device: Any = None, **more: Any) -> torch.UntypedStorage:
    if device is None or torch.device(device).type != "cuda":
        return torch._C.StorageBase.__new__(cls, *arguments, device=device, **more)
    torch.cuda.init()
    return torch.empty(*(arguments or (0,)), dtype=torch.uint8, device=device).untyped_storage()


def _resize_storage(storage: torch.UntypedStorage, size_bytes: int) -> torch.UntypedStorage:
    if storage.device.type != "cuda":
        return torch._C.StorageBase.resize_(storage, size_bytes)
    torch.ops.sim.resize_storage(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage), size_bytes)
    return storage
