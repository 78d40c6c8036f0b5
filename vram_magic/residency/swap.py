"""Replacing the memory behind a span's tensors while nobody is using it.

An operation that runs in another thread, or that this allocation interrupted, reads its weights through raw pointers:
replacing them then gives wrong values or kills the process. What tells (measured with convolutions, LSTMs, matmuls in
a second thread and live autograd graphs):

* the storage's use count: a tensor that we do not know lies over it (a view, ``numpy()``, an alias)
* each tensor's use count: an operation or an autograd graph holds it
* each Python object's reference count: a frame holds it; ``w.sum(0)`` shows nowhere else
* each tensor's version, where its bytes were copied before: an operation has written to it since

The counts must equal those that the model itself explains. Reference counts above it may still be explained by what
rests on the heap (an optimizer, a notebook variable): that does not run. Only a frame, or C code, is left then. That is
a danger in the middle of an operation, and while another thread runs; else frames rest (`frames_rest`), all references
are harmless, and a local variable that names a weight does not keep it.

The look and the replacement must be one step, or another thread starts an operation in between. `replace` does both
inside a single call into C iterators: the interpreter hands the GIL over between bytecodes, and there are none inside.
"""

from __future__ import annotations

import gc
import operator
import sys
import threading
import time
import types
from collections import Counter
from collections.abc import Iterable
from itertools import chain, compress, repeat, starmap

import torch

from vram_magic.residency.living import referrers, uncollected
from vram_magic.residency.spans import Span

__all__ = [
    "SHARED", "all_rest", "busy", "explained", "frames_rest", "harmless", "has_other_references", "put_back",
    "replace", "storage_use_count", "versions",
]  # fmt: skip

_refcounts = sys.getrefcount
_use_count = torch.Tensor._use_count  # type: ignore[attr-defined]
storage_use_count = torch._C._storage_Use_Count
_version = operator.attrgetter("_version")
_OVERHEAD = next(map(_refcounts, [object()]))  # the list that holds it and the call itself

# Classes of quantized weights answer for themselves when an attribute of a tensor is read or set: in Python.
_plainly = torch._C.DisableTorchFunctionSubclass


def _references_of_a_base() -> int:
    """How many references torch itself holds to the Python object of a tensor that has views: 1, or 0 in older ones."""
    base, plain = torch.empty(1), torch.empty(1)
    view = base.view(1)
    held, free = map(_refcounts, [base, plain])
    del view
    return held - free


_OF_A_BASE = _references_of_a_base()

SHARED = "another tensor shares its memory"

# What may hold a reference for a call in progress: frames, argument tuples, and the very method that is being called.
_RUNNING = (
    tuple, types.FrameType, types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType,
    types.BuiltinMethodType, types.MethodType, types.MethodWrapperType,
)  # fmt: skip

# Where threads wait: what stands on top of a resting thread's stack. By function, since `Thread.run` and a pool's
# worker call what they were given directly, and that may be an operation.
_WAITING = {
    ("threading", "wait"), ("threading", "_wait_for_tstate_lock"), ("threading", "join"), ("threading", "_shutdown"),
    ("queue", "get"), ("selectors", "select"), ("concurrent.futures.thread", "_worker"),
    ("multiprocessing.connection", "wait"), ("subprocess", "_try_wait"), ("subprocess", "wait"),
    ("socket", "accept"), ("socket", "readinto"), ("ssl", "read"),
    ("vram_magic.workers", "work"), ("vram_magic.workers", "run"), ("vram_magic.workers", "finish"),
    ("vram_magic.workers", "wait"), ("vram_magic.notebook.panel.clicks", "_work"),
}  # fmt: skip
_WAITING_PACKAGES = {"execnet", "ipykernel", "zmq"}

_AGAIN = 50  # looks, a millisecond apart


def busy(span: Span, references: list[int] | None = None, *, holders: int | None = 0) -> str:
    """Why the span's memory cannot be replaced now, or an empty string. A look only: it may be out of date at once.

    ``references`` are the counts from `harmless`, or None to leave them out; ``holders`` is how many tensors of our
    own lie over the same memory, or None where anybody's may, and will keep it.
    """
    tensors = span.tensors
    if span.alone and holders is not None and storage_use_count(span.memory._cdata) != _owners(span, holders):
        return SHARED
    with _plainly():
        uses = list(map(_use_count, tensors))
    if uses != span.uses:
        return "an operation or an autograd graph uses it"
    if references is not None and list(map(_refcounts, tensors)) != references:
        return "Python code is using it"
    return ""


def versions(span: Span) -> list[int]:
    """How often each of the span's tensors was written to by an operation (not through ``.data``)."""
    with _plainly():
        return list(map(_version, span.tensors))


def replace(
    span: Span, fresh: list[torch.Tensor], references: list[int], seen: list[int], *, holders: int | None = 0
) -> bool:
    """Gives each of the span's tensors the data of its counterpart in ``fresh``, all or none.

    False: it is in use, or was written to since its `versions` were ``seen``. The span still holds the old memory, so
    nothing is freed here. ``references`` and ``holders`` as for `busy`.
    """
    tensors = span.tensors
    looks = [
        map(operator.eq, map(_use_count, tensors), span.uses),
        map(operator.eq, map(_refcounts, tensors), references),
        map(operator.eq, map(_version, tensors), seen),
    ]
    if span.alone and holders is not None:
        looks.append(map(operator.eq, map(storage_use_count, [span.memory._cdata]), [_owners(span, holders)]))
    return _set_if(looks, tensors, fresh)


def put_back(span: Span, seen: list[int]) -> bool:
    """Gives the span's tensors its own memory again, unless they were written to since their `versions` were seen."""
    tensors = span.tensors
    return _set_if([map(operator.eq, map(_version, tensors), seen)], tensors, span.original())


def _set_if(looks: list[map[bool]], tensors: list[torch.Tensor], fresh: list[torch.Tensor]) -> bool:
    idle = map(all, [chain.from_iterable(looks)])
    # One call into C: from the first look to the last replacement no other thread runs.
    with _plainly():
        done = list(map(setattr, chain.from_iterable(compress([tensors], idle)), repeat("data"), fresh))
    return bool(done)


def harmless(spans: list[Span], *, may_rest: bool, again: int = _AGAIN) -> list[list[int]]:
    """For each span the reference counts at which nothing runs.

    ``may_rest``: the asker is in no operation. If no other thread is either, before and after the look, the counts as
    they are mean nothing but names. Else those count that are explained; where that is not enough, it looks up to
    ``again`` times more: threads that nobody thinks of wake up for a moment (a kernel's heartbeat, the monitor of
    tqdm), and a weight must not stay for that.
    """
    if may_rest and (resting := _at_rest(spans)) is not None:
        return resting
    counts = explained(spans)
    if not may_rest or not again or counts == _counts(spans):
        return counts
    for _ in range(again):
        time.sleep(0.001)
        if (resting := _at_rest(spans)) is not None:
            return resting
    return explained(spans)


def _at_rest(spans: list[Span]) -> list[list[int]] | None:
    """The reference counts as they are, if no thread is in an operation."""
    if not frames_rest():
        return None
    counts = _counts(spans)
    return counts if frames_rest() else None


def _counts(spans: list[Span]) -> list[list[int]]:
    return [list(map(_refcounts, span.tensors)) for span in spans]


def explained(spans: list[Span]) -> list[list[int]]:
    """For each span the reference counts that are harmless whatever runs.

    They are those of the model's own places and of whatever rests on the heap; the real counts differ where a frame or
    C code holds a tensor.
    """
    by_slots = list(map(_by_slots, spans))
    odd = {s for s, expected in zip(spans, by_slots, strict=True) if list(map(_refcounts, s.tensors)) != expected}
    resting = _resting_references(odd) if odd else {}
    return [
        [
            max(own, _OVERHEAD + resting.get(id(tensor), 0) - 1)
            for own, tensor in zip(expected, span.tensors, strict=True)
        ]
        if span in odd
        else expected
        for span, expected in zip(spans, by_slots, strict=True)
    ]


def _by_slots(span: Span) -> list[int]:
    return [
        _OVERHEAD + slots + (_OF_A_BASE if uses > 1 else 0) for slots, uses in zip(span.slots, span.uses, strict=True)
    ]


def has_other_references(span: Span) -> bool:
    """Whether anything but the model's own places refers to one of the span's tensors."""
    return list(map(_refcounts, span.tensors)) != _by_slots(span)


def frames_rest() -> bool:
    """Whether no thread is in the middle of an operation: each waits in Python, except the one that asks.

    A thread that runs an operation shows as the Python code that called it; one that waits, as a waiting module's. One
    that waits for room inside an allocation is in an operation all the same.
    """
    return all_rest(set(_stacks()) - {threading.get_ident()})


def all_rest(threads: Iterable[int]) -> bool:
    """Whether each of the threads waits in Python, outside any operation."""
    wanted = set(threads)
    # No name for the frames: this one is among them, and the cycle would keep everybody's local variables alive.
    return all(_rests(frame) for thread, frame in _stacks().items() if thread in wanted)


def _stacks() -> dict[int, types.FrameType]:
    """The innermost frame of each thread.

    CPython takes a lock of its own for this, and a collection that starts under it and finds a dead `threading.local`
    takes the lock again: the process hangs (python/cpython#106883; seen with 3.11.7). So no collection may start.
    """
    return list(uncollected(starmap(sys._current_frames, [()]))).pop()


def _rests(frame: types.FrameType) -> bool:
    module = str(frame.f_globals.get("__name__"))
    if (module, frame.f_code.co_name) not in _WAITING and module.partition(".")[0] not in _WAITING_PACKAGES:
        return False
    below: types.FrameType | None = frame
    while below is not None:
        if below.f_globals.get("__name__") == "vram_magic.pressure":
            return False
        below = below.f_back
    return True


def _resting_references(spans: Iterable[Span]) -> Counter[int]:
    """How often what rests on the heap refers to each tensor (by id), the spans' own lists included.

    One pass of the garbage collector's lists (tens of milliseconds).
    """
    tensors = [tensor for span in spans for tensor in span.tensors]
    wanted = set(map(id, tensors))
    holders = [holder for holder in referrers(tensors, but=_RUNNING) if holder is not tensors]
    return Counter(filter(wanted.__contains__, map(id, gc.get_referents(*holders))))


def _owners(span: Span, holders: int) -> int:
    """The storage's use count while idle: its tensors, the span's own hold, and ours."""
    return len(span.tensors) + 1 + holders
