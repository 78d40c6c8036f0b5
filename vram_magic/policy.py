"""Who leaves when room is short: tiers, and the planner.

Owns the order. `plan` is a pure function from a `Snapshot` and a `Request` to a `Plan`: the same input
gives the same plan, whatever the order in which the models are listed, so a journal can be replayed.

The words: a *rank* is a tier's number, the lower leaves the earlier. *Pass 1* takes models of the
request's rank and below, *pass 2* higher ranks, *demotion* models that asked to stay on the device. A
*workspace* is memory a model gives back without leaving; how much is known only once it happened, so the
planner asks for it first and counts nothing on it.

All sizes are bytes, as the snapshot believes them; what a move really freed is for others to measure.
Takes no lock. Refuses to know torch, devices, clocks, or how bytes move.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from vram_magic.sizes import format_blocks, format_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from _typeshed import DataclassInstance

__all__ = [
    "DEFAULT_TIERS",
    "RESIDENCIES",
    "ModelState",
    "Plan",
    "Request",
    "Snapshot",
    "Step",
    "plan",
    "plan_from_json",
    "request_from_json",
    "snapshot_from_json",
    "to_json",
]

DEFAULT_TIERS: Mapping[str, int] = {"llm": 0, "tts": 1, "asr": 2}
RESIDENCIES = ("auto", "device", "host", "disk")


@dataclass(frozen=True, slots=True)
class ModelState:
    """What the planner may know of one model."""

    name: str
    rank: int
    last_used: int  # any clock that only grows; smaller is longer ago
    blocks: tuple[int, ...] = ()  # sizes of the blocks that may leave, in module order: the tail leaves first
    residency: str = "auto"
    demotable: tuple[int, ...] = ()  # sizes of the blocks that asked to stay and may be demoted, likewise
    workspace: bool = False  # it has a callable that can give memory back
    spared: str = ""  # why nothing of it may be taken; then `blocks` is ignored
    kept: str = ""  # why further blocks, not in `blocks`, stay


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The device at the moment of a decision."""

    budget_bytes: int
    free_bytes: int  # negative once a budget was lowered below use
    models: tuple[ModelState, ...]


@dataclass(frozen=True, slots=True)
class Request:
    """Who wants how much free memory."""

    need_bytes: int
    rank: int | None = None  # None: a cell's own tensor, which may take every rank in pass 1
    prefer: tuple[str, ...] = ()  # names to take first within their rank
    asked_by: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """One model's part in a plan: so many blocks off its tail, or its workspace."""

    model: str
    blocks: int
    bytes: int
    stage: str  # "workspace" | "pass 1" | "pass 2" | "demotion"
    reason: str

    def __str__(self) -> str:
        what = f"{format_blocks(self.blocks)}, {format_size(self.bytes)}" if self.blocks else "no block"
        return f"{self.model}: {what} ({self.stage}: {self.reason})"


@dataclass(frozen=True, slots=True)
class Plan:
    """What would leave, in order, and why; all of it or, when that would not do, nothing."""

    steps: tuple[Step, ...]
    satisfied: bool
    freed_bytes: int
    spared: tuple[tuple[str, str], ...] = ()  # (name, why it or the rest of it stays)
    missing_bytes: int = 0  # when not satisfied; at most, since workspaces may still give something back

    def __str__(self) -> str:
        lines = [self._headline()]
        lines += [f"  {i}. {step}" for i, step in enumerate(self.steps, 1)]
        lines += [f"  {name} stays: {why}" for name, why in self.spared]
        return "\n".join(lines)

    def _headline(self) -> str:
        if not self.satisfied:
            missing = format_size(self.missing_bytes)
            return f"not enough room: {missing} would still be missing if everything left, so no block would leave"
        if not self.steps:
            return "fits already: nothing would leave"
        return f"would free {format_size(self.freed_bytes)}:"


def plan(snapshot: Snapshot, request: Request) -> Plan:
    """The whole decision, before anything moves."""
    short = request.need_bytes - snapshot.free_bytes
    if short <= 0:
        return Plan((), satisfied=True, freed_bytes=0)
    models = sorted(snapshot.models, key=_by_use)
    idle = [model for model in models if not model.spared]
    workspaces = tuple(_workspace_step(model) for model in idle if model.workspace)
    moves = tuple(_moves(_candidates(idle, request), short))
    freed = sum(step.bytes for step in moves)
    if freed < short:  # all or nothing
        return Plan(workspaces, False, 0, _spared(models, (), satisfied=False), missing_bytes=short - freed)
    return Plan(workspaces + moves, True, freed, _spared(models, moves, satisfied=True))


def _by_use(model: ModelState) -> tuple[int, int, str]:
    # the name only breaks ties, so that a replay plans the same
    return model.rank, model.last_used, model.name


def _workspace_step(model: ModelState) -> Step:
    return Step(model.name, 0, 0, "workspace", "idle, can give memory back without leaving")


def _candidates(idle: Sequence[ModelState], request: Request) -> Iterator[tuple[ModelState, str, str]]:
    """Each model that may be taken, with its stage and reason, in the order of taking."""
    wishes = {name: -place for place, name in enumerate(reversed(request.prefer), 1)}
    # `idle` is in order of rank and use, and sorting is stable: only the wishes remain to be sorted in.
    # Pass 2 comes behind pass 1 by itself, since its ranks are the higher ones.
    for model in sorted(idle, key=lambda model: (model.rank, wishes.get(model.name, 0))):
        wished = model.name in wishes
        if request.rank is None or model.rank <= request.rank:
            use = "preferred by the request" if wished else "least recently used"
            yield model, "pass 1", f"tier {model.rank}, {use}"
        else:
            wish = ", preferred by the request" if wished else ""
            yield model, "pass 2", f"higher tier, as a last resort{wish}"
    for model in idle:
        yield model, "demotion", "resident model, its weights are safe in its file"


def _moves(candidates: Iterable[tuple[ModelState, str, str]], short: int) -> Iterator[Step]:
    """Takes from each in turn until `short` bytes are found; fewer when there are no more."""
    for model, stage, reason in candidates:
        blocks, size = _tail(model.demotable if stage == "demotion" else model.blocks, short)
        if size:
            yield Step(model.name, blocks, size, stage, reason)
            short -= size
            if short <= 0:
                return


def _tail(blocks: tuple[int, ...], short: int) -> tuple[int, int]:
    """How many blocks off the tail give `short` bytes, and their size; all blocks if they do not."""
    total = sum(blocks)
    if total < short:
        return len(blocks), total
    sizes = list(accumulate(reversed(blocks)))
    last = bisect_left(sizes, short)
    return last + 1, sizes[last]


def _spared(models: Iterable[ModelState], moves: Iterable[Step], *, satisfied: bool) -> tuple[tuple[str, str], ...]:
    taken: Counter[str] = Counter()
    for step in moves:
        taken[step.model] += step.blocks
    reasons = ((model.name, _why_stays(model, taken[model.name], satisfied=satisfied)) for model in models)
    return tuple((name, why) for name, why in reasons if why)


def _why_stays(model: ModelState, taken: int, *, satisfied: bool) -> str:
    """Why the model, or what would be left of it, stays; empty when nothing of it does."""
    if model.spared:
        return model.spared
    return "; ".join(why for why in (_why_untaken(model, taken, satisfied=satisfied), model.kept) if why)


def _why_untaken(model: ModelState, taken: int, *, satisfied: bool) -> str:
    rest = len(model.blocks) + len(model.demotable) - taken
    if rest and not satisfied:
        return "may leave, but all that may leave is not enough"
    if model.residency == "device" and not taken:
        return "asks to stay on the device"
    if not rest:
        return ""
    if taken:
        return f"its first {format_blocks(rest)} not needed"
    return "not needed: enough was free without it"


def to_json(obj: DataclassInstance) -> dict[str, Any]:
    """A snapshot, request or plan as what `json.dumps` takes; the `*_from_json` functions undo it."""
    return asdict(obj)


def snapshot_from_json(data: Mapping[str, Any]) -> Snapshot:
    """The snapshot that `to_json` wrote."""
    models = (
        ModelState(**{**model, "blocks": tuple(model["blocks"]), "demotable": tuple(model["demotable"])})
        for model in data["models"]
    )
    return Snapshot(**{**data, "models": tuple(models)})


def request_from_json(data: Mapping[str, Any]) -> Request:
    """The request that `to_json` wrote."""
    return Request(**{**data, "prefer": tuple(data["prefer"])})


def plan_from_json(data: Mapping[str, Any]) -> Plan:
    """The plan that `to_json` wrote."""
    steps = tuple(Step(**step) for step in data["steps"])
    return Plan(**{**data, "steps": steps, "spared": tuple((name, why) for name, why in data["spared"])})
