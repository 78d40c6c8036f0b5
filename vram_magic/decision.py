"""One decision about room: what is collected while a request is being met, and what comes out of it.

Plain data; sizes are bytes. Takes no lock. Refuses to know how models are found and moved.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vram_magic.devices.meter import Reservation
from vram_magic.journal import Record, StepTaken
from vram_magic.models.managed import Candidates, ManagedModel
from vram_magic.policy import Plan, Request, Snapshot
from vram_magic.residency.parts import Key

__all__ = ["Decision", "Room", "extra_bytes"]

# What c10's caching allocators ask the driver for at once, for requests up to 1 MiB and for larger ones; above it, too,
# where their segments can grow.
_SMALL, _SMALL_SEGMENT, _SEGMENT = 1 << 20, 2 << 20, 20 << 20


@dataclass(slots=True)
class Room:
    """The outcome of a decision: the room, or the error that says why there is none."""

    reservation: Reservation | None = None
    freed_bytes: int = 0
    error: BaseException | None = None
    busy: bool = False
    """There is none now, but a move in progress may change that."""

    def release(self) -> None:
        if self.reservation is not None:
            self.reservation.release()


@dataclass(slots=True)
class Decision:
    """What is collected while one request is being met."""

    request: Request
    required: ManagedModel | None
    credit_bytes: int
    had_bytes: int = 0
    spare_bytes: int = 0
    """What of the request is a guess (`extra_bytes`): if it is too much, all that may leave is tried."""
    freed_bytes: int = 0
    left: list[StepTaken] = field(default_factory=list)
    stuck: dict[str, str] = field(default_factory=dict)
    """Why a model gave less than planned."""
    stuck_keys: set[Key] = field(default_factory=set)
    """What of it is not tried again."""
    snapshot: Snapshot | None = None
    plan: Plan | None = None
    first: tuple[Snapshot, Request, Plan] | None = None
    # By model, what could leave. It refers to weights, so it must not outlive the decision: they would look used.
    parts: dict[str, Candidates] = field(default_factory=dict)
    offers_workspaces: bool = False
    """Whether they were not asked yet."""
    failure: BaseException | None = None
    """What an engine's unload raised first: told if others cannot give enough either."""
    collected: bool = False
    may_rest: bool = False
    """Whether the asker is in no operation."""

    @property
    def told_failure(self) -> str:
        """`failure` in words; empty where nothing failed."""
        return "" if self.failure is None else f"{type(self.failure).__name__}: {self.failure}"

    def record(self, reason: str) -> Record:
        """What the journal keeps of it."""
        snapshot, request, chosen = self.first or (None, self.request, None)
        return Record(
            asked_by=request.asked_by,
            need_bytes=request.need_bytes,
            had_bytes=self.had_bytes,
            freed_bytes=self.freed_bytes,
            left=tuple(self.left),
            spared=chosen.spared if chosen else (),
            reason=reason,
            snapshot=snapshot,
            request=request,
            plan=chosen,
        )


def extra_bytes(failed_again: int, size_bytes: int) -> int:
    """What to find beyond a request, which has failed so often although the device had as many bytes as it asks for.

    At first what is missing to whole segments; then the free bytes must be scattered, and each time twice as much is
    tried, so that a fit is found soon, and little leaves in vain.
    """
    if not failed_again:
        return 0
    segment = _SMALL_SEGMENT if size_bytes <= _SMALL else _SEGMENT
    return -size_bytes % segment + (segment << (failed_again - 2) if failed_again > 1 else 0)
