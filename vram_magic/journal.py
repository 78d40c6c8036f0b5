"""The journal: every decision with its reason, and the means to plan it again.

Owns the records and their file, one JSON object a line. Sizes are bytes, durations milliseconds, times
Unix seconds. What a plan foresaw is in `Record.plan`; what happened, as measured, in `Record.left`.

Takes no lock: an append to a bounded deque is atomic, and every reader works on a copy, so threads may
append while others read. Knows the policy, to replay it, and nothing of who made the decisions.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import time as now
from typing import TYPE_CHECKING, Any, TypeVar, overload
from uuid import uuid4

from vram_magic import policy
from vram_magic.sizes import format_blocks, format_size

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

__all__ = ["Arrival", "Journal", "Record", "StepTaken", "entries_since"]


@dataclass(frozen=True, slots=True)
class StepTaken:
    """A step that happened: the bytes are measured, not believed."""

    model: str
    blocks: int
    bytes: int
    stage: str
    reason: str
    ms: float = 0.0

    def __str__(self) -> str:
        count = f"{format_blocks(self.blocks)} " if self.blocks else ""
        return f"{self.model} {count}{format_size(self.bytes)} ({self.stage}, {self.ms:.0f} ms)"


@dataclass(frozen=True, slots=True)
class Record:
    """One decision: who asked, needed, had; who left; who was spared and why."""

    asked_by: str
    need_bytes: int
    had_bytes: int
    freed_bytes: int
    left: tuple[StepTaken, ...] = ()
    spared: tuple[tuple[str, str], ...] = ()
    reason: str = ""
    snapshot: policy.Snapshot | None = None
    request: policy.Request | None = None
    plan: policy.Plan | None = None
    time: float = field(default_factory=now)

    def __str__(self) -> str:
        had = f"had {format_size(self.had_bytes)}"
        needed = f"needed {format_size(self.need_bytes)}, {had}" if self.need_bytes else had
        left = ", ".join(map(str, self.left)) or "nothing"
        why = f"; {self.reason}" if self.reason else ""
        spared = ", ".join(f"{name} ({reason})" for name, reason in self.spared)
        stayed = f"\n  spared: {spared}" if spared else ""
        return f"{self.asked_by or 'unknown'}: {needed}; left: {left}{why}{stayed}"


@dataclass(frozen=True, slots=True)
class Arrival:
    """Weights that came to the device. Nobody decided it, so it is no `Record`."""

    model: str
    bytes: int
    ms: float
    time: float = field(default_factory=now)

    def __str__(self) -> str:
        speed = f", {self.bytes / 1e3 / self.ms:.0f} MB/s" if self.ms else ""
        return f"{self.model} {format_size(self.bytes)} ({self.ms:.0f} ms{speed})"


Entry = TypeVar("Entry")


def entries_since(entries: Sequence[Entry], last: Entry | None) -> list[Entry]:
    """Those after ``last``; all of them, when it is not there any more."""
    new: list[Entry] = []
    for entry in reversed(entries):
        if entry is last:
            break
        new.append(entry)
    return new[::-1]


class Journal(Sequence[Record]):
    """The last `maxlen` records, oldest first."""

    def __init__(self, maxlen: int = 1000) -> None:
        self._records: deque[Record] = deque(maxlen=maxlen)
        self.arrivals: deque[Arrival] = deque(maxlen=maxlen)
        """What came to the device, oldest first; iterate over a ``copy()``."""

    def append(self, record: Record) -> None:
        """Adds a record, from any thread; the oldest goes when the journal is full."""
        self._records.append(record)

    def __len__(self) -> int:
        return len(self._records)

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        return self._copy()[index] if isinstance(index, slice) else self._records[index]

    def __iter__(self) -> Iterator[Record]:
        return iter(self._copy())

    def __reversed__(self) -> Iterator[Record]:
        return reversed(self._copy())

    def __repr__(self) -> str:
        return f"<Journal of {len(self)} records>"

    def _copy(self) -> list[Record]:
        # copy() first, since it is one atomic call: iterating the deque itself raises when it grows meanwhile
        return list(self._records.copy())

    def to_jsonl(self, path: str | os.PathLike[str]) -> None:
        """Writes all records to `path`, one a line; a reader sees the old file or the new, never a part."""
        target = Path(path)
        draft = target.with_name(f".{uuid4().hex}.tmp")  # beside the target: a rename must not cross a disk
        try:
            with draft.open("x", encoding="utf-8") as file:
                file.writelines(f"{json.dumps(policy.to_json(record))}\n" for record in self)
            draft.replace(target)
        except BaseException:
            with suppress(OSError):
                draft.unlink()
            raise

    @staticmethod
    def read(path: str | os.PathLike[str]) -> list[Record]:
        """The records that `to_jsonl` wrote; ValueError names the line that is not one."""
        with Path(path).open(encoding="utf-8") as file:
            return [_read_line(line, f"{path}, line {n}") for n, line in enumerate(file, 1) if line.strip()]

    @staticmethod
    def replay(path: str | os.PathLike[str]) -> list[policy.Plan]:
        """Plans again, in order, each record of the file that carries what it was decided on."""
        decisions = ((record.snapshot, record.request) for record in Journal.read(path))
        return [policy.plan(snapshot, request) for snapshot, request in decisions if snapshot and request]


def _read_line(line: str, where: str) -> Record:
    try:
        return _record_from_json(json.loads(line))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{where}: not a journal record ({error})") from error


def _record_from_json(data: dict[str, Any]) -> Record:
    snapshot, request, plan = data["snapshot"], data["request"], data["plan"]
    nested = {
        "left": tuple(StepTaken(**step) for step in data["left"]),
        "spared": tuple((name, why) for name, why in data["spared"]),
        "snapshot": snapshot and policy.snapshot_from_json(snapshot),
        "request": request and policy.request_from_json(request),
        "plan": plan and policy.plan_from_json(plan),
    }
    return Record(**{**data, **nested})
