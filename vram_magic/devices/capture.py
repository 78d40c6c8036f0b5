"""Whether a CUDA graph is being captured anywhere in this process.

While one is, an allocation or a free by another thread makes the capture fail, so nothing may be moved. torch tells
only whether the current stream of the asking thread is captured. So the two methods of `torch.cuda.CUDAGraph` through
which every capture in Python begins and ends are replaced by ones that count, while a manager of a CUDA device is open.

The count takes a leaf lock of its own.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["CaptureWatch"]


class CaptureWatch:
    """Counts captures in progress from `install` to `remove`."""

    def __init__(self) -> None:
        self._count = 0
        self._lock = threading.Lock()
        self._before: dict[str, Callable[..., Any]] = {}
        self._ours: dict[str, Callable[..., Any]] = {}

    @property
    def capturing(self) -> bool:
        """Whether one is in progress, in any thread, or in the stream of this one."""
        if self._count or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return self._count > 0
        return bool(torch.cuda.is_current_stream_capturing())

    def install(self) -> None:
        graph = torch.cuda.CUDAGraph
        for name, change, first in (("capture_begin", 1, True), ("capture_end", -1, False)):
            self._before[name] = getattr(graph, name)
            self._ours[name] = self._counting(self._before[name], change, first=first)
            setattr(graph, name, self._ours[name])

    def remove(self) -> None:
        """Puts the methods back, unless somebody replaced ours meanwhile."""
        for name, before in self._before.items():
            if getattr(torch.cuda.CUDAGraph, name) is self._ours[name]:
                setattr(torch.cuda.CUDAGraph, name, before)
        self._before.clear()

    def _counting(self, method: Callable[..., Any], change: int, *, first: bool) -> Callable[..., Any]:
        @functools.wraps(method)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if first:
                self._add(change)
            try:
                return method(*args, **kwargs)
            except BaseException:
                if first:
                    self._add(-change)  # it did not begin
                raise
            finally:
                if not first:
                    self._add(change)

        return counted

    def _add(self, change: int) -> None:
        with self._lock:
            self._count = max(self._count + change, 0)
