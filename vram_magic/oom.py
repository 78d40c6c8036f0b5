"""The out-of-memory error. It stands apart from `errors`, since its base class needs torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import OutOfMemoryError

from vram_magic.errors import VRAMError
from vram_magic.sizes import format_size

__all__ = ["OTHER_PROCESSES", "OTHER_TENSORS", "VRAMOutOfMemoryError", "cure", "refusal", "too_low"]

OTHER_TENSORS = "other tensors"
OTHER_PROCESSES = "other processes"
_MIB = 1 << 20


class VRAMOutOfMemoryError(VRAMError, OutOfMemoryError):
    """There is no room, and making it was not possible. Nothing was moved for it.

    ``needed_bytes`` is the request, ``free_bytes`` and ``budget_bytes`` are as they were when it was refused, and
    ``holders`` says who has the memory: bytes by model name, those of all other tensors under ``"other tensors"``, and
    where they lower what this kernel may use, those of ``"other processes"`` and the driver.
    """

    def __init__(
        self, text: str, *, needed_bytes: int, free_bytes: int, budget_bytes: int, holders: Mapping[str, int]
    ) -> None:
        super().__init__(text)
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes
        self.budget_bytes = budget_bytes
        self.holders = dict(holders)

    def __reduce__(self) -> Any:
        """For copies, and other processes: pickling knows positional arguments only."""
        return _rebuilt, (str(self), self.needed_bytes, self.free_bytes, self.budget_bytes, self.holders)

    def bare(self) -> VRAMOutOfMemoryError:
        """The same without a traceback: one that is kept must not keep the failed call's tensors."""
        return _rebuilt(str(self), self.needed_bytes, self.free_bytes, self.budget_bytes, self.holders)


def _rebuilt(
    text: str, needed_bytes: int, free_bytes: int, budget_bytes: int, holders: Mapping[str, int]
) -> VRAMOutOfMemoryError:
    return VRAMOutOfMemoryError(
        text, needed_bytes=needed_bytes, free_bytes=free_bytes, budget_bytes=budget_bytes, holders=holders
    )


def refusal(
    *,
    device: str,
    what: str,
    needed_bytes: int,
    free_bytes: int,
    budget_bytes: int,
    holders: Mapping[str, int],
    spared: Mapping[str, str],
    missing_bytes: int,
    left: str,
) -> VRAMOutOfMemoryError:
    """The error for a request that cannot be met.

    ``spared``: why a model stays; ``missing_bytes``: what lacks with all that may leave; ``left``: what left.
    """
    remedy = _remedy(needed_bytes, missing_bytes, budget_bytes, holders, spared)
    text = (
        f"Not enough memory on {device}: {what}.\n"
        f"The budget is {format_size(budget_bytes)}, {format_size(max(free_bytes, 0))} of it are free{_gone(left)}.\n"
        f"{_held(holders, spared)}\n{_hints(holders, spared)}{remedy}{_doctor(holders)}"
    )
    return VRAMOutOfMemoryError(
        text, needed_bytes=needed_bytes, free_bytes=free_bytes, budget_bytes=budget_bytes, holders=holders
    )


def too_low(
    *,
    wanted_bytes: int,
    used_bytes: int,
    free_bytes: int,
    budget_bytes: int,
    holders: Mapping[str, int],
    spared: Mapping[str, str],
    missing_bytes: int,
    left: str,
) -> VRAMOutOfMemoryError:
    """The error for a budget that is lower than what stays with all that may leave. The words are `refusal`'s.

    ``needed_bytes`` of the error is what would have to leave.
    """
    lowest_bytes = wanted_bytes + missing_bytes
    pinned = _largest_pinned(holders, spared)
    text = (
        f"A budget of {format_size(wanted_bytes)} is too low.\n"
        f"{format_size(lowest_bytes)} cannot leave; {format_size(budget_bytes)} is the budget now, "
        f"{format_size(max(free_bytes, 0))} of it are free{_gone(left)}.\n"
        f"{_held(holders, spared)}\n"
        f"{_hints(holders, spared)}Set at least: %vram budget {-(-lowest_bytes // _MIB)}MiB"
        f"{pinned and f'   or let it leave with: %vram unpin {pinned}'}{_doctor(holders)}"
    )
    needed_bytes = used_bytes - wanted_bytes
    return VRAMOutOfMemoryError(
        text, needed_bytes=needed_bytes, free_bytes=free_bytes, budget_bytes=budget_bytes, holders=holders
    )


def cure(reason: str) -> str:
    """What helps against a weight's reason to stay, where its words do not say; else empty."""
    if "autograd graph" not in reason:
        return ""
    return (
        "Unless an operation runs now, an output that is still alive holds the graph: del it, "
        "or compute under torch.no_grad()"
    )


def _held(holders: Mapping[str, int], spared: Mapping[str, str]) -> str:
    held = ", ".join(
        f"{name} {format_size(size)}" + (f" ({spared[name]})" if spared.get(name) else "")
        for name, size in sorted(holders.items(), key=lambda item: -item[1])
        if size
    )
    return f"Held by: {held or 'nobody'}."


def _gone(left: str) -> str:
    return f"; {left} left and it was not enough" if left else ""


def _hints(holders: Mapping[str, int], spared: Mapping[str, str]) -> str:
    cures = dict.fromkeys(cure(reason) for name, reason in spared.items() if holders.get(name))
    return "".join(f"{text}. " for text in cures if text)


def _doctor(holders: Mapping[str, int]) -> str:
    if not holders.get(OTHER_TENSORS) or holders[OTHER_TENSORS] < max(holders.values()):
        return ""
    return "   See what the other tensors are with: %vram doctor"


def _largest_pinned(holders: Mapping[str, int], spared: Mapping[str, str]) -> str:
    pinned = {name: size for name, size in holders.items() if spared.get(name) == "pinned"}
    return max(pinned, key=pinned.__getitem__, default="")


def _remedy(needed: int, missing: int, budget: int, holders: Mapping[str, int], spared: Mapping[str, str]) -> str:
    pinned = {name: holders.get(name, 0) for name, reason in spared.items() if reason == "pinned"}
    if sum(pinned.values()) >= missing > 0:
        return f"Let it leave with: %vram unpin {max(pinned, key=pinned.__getitem__)}"
    if holders.get(OTHER_PROCESSES, 0) >= missing > 0:
        return "End the other processes that hold the device's memory (nvidia-smi lists them), or take a smaller model"
    if "a graph is being captured" in spared.values():
        return "Nothing may leave while a graph is captured: make room before it, with: %vram evict NAME"
    room = f"give more room with: %vram budget {_round_up(budget + missing)}"
    if needed > budget:
        return f"It can never fit this budget; {room}"
    if holders.get(OTHER_TENSORS, 0) >= missing > 0:
        return f"Delete tensors that you no longer need with: del NAME   or {room}"
    waits = "Wait for the models in use, or " if "in use" in spared.values() else ""
    return f"{waits}{room}" if waits else room[0].upper() + room[1:]


def _round_up(size_bytes: int) -> str:
    unit, name = (1 << 30, "GiB") if size_bytes >= 1 << 30 else (_MIB, "MiB")
    return f"{-(-size_bytes // unit)}{name}"
