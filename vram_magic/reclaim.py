"""Making room: one decision at a time, planned whole before anything moves, measured afterwards.

All of it runs in the deciding thread, so decisions never race and no mode of the caller's is active. The room that was
made is handed over as a reservation: nobody else can take it between the move and its use.
"""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Iterable
from typing import Any

from vram_magic.decision import Decision, Room
from vram_magic.devices.base import AUTO, Device
from vram_magic.journal import Journal, StepTaken
from vram_magic.models.managed import Candidates, EngineModel, ManagedModel, TorchModel
from vram_magic.oom import OTHER_PROCESSES, OTHER_TENSORS, VRAMOutOfMemoryError, refusal, too_low
from vram_magic.policy import ModelState, Plan, Request, Snapshot, Step, plan
from vram_magic.registry import Registry
from vram_magic.residency.parts import Key
from vram_magic.sharing import Owners
from vram_magic.sizes import format_size
from vram_magic.workspaces import given_back

__all__ = ["Reclaimer"]

_IN_TRANSIT = "in transit"


class Reclaimer:
    """Meets requests for room on one device."""

    def __init__(self, registry: Registry, device: Device, journal: Journal) -> None:
        self._registry = registry
        self._device = device
        self._journal = journal

    # --------------------------------------------------------------------------------------------- requests

    def make_room(
        self,
        request: Request,
        *,
        required: ManagedModel | None = None,
        credit_bytes: int = 0,
        user_code: bool = True,
        flushed: bool = False,
        spare_bytes: int = 0,
    ) -> Room:
        """Room for ``request.need_bytes``, reserved. ``credit_bytes``: what the caller's own reservation still holds.

        ``flushed``: the device's allocator has just failed, after giving up its cache; ``spare_bytes`` of the request
        are then a guess.

        ``user_code``: workspaces may be asked, and frames may rest; not in the middle of an allocation, whose thread
        may hold any lock, and is in an operation.
        """
        self.clear_up()
        self._device.refresh(flushed=flushed)
        decision = Decision(request, required, credit_bytes, had_bytes=self.available_bytes() + credit_bytes)
        decision.may_rest, decision.spare_bytes = user_code, spare_bytes
        if user_code and decision.had_bytes < request.need_bytes <= self._device.meter.limit_bytes:
            self._ask_workspaces(decision)
        try:
            return self._meet(decision)
        except Exception as error:  # noqa: BLE001  an engine's unload raised: its caller is told, and the books are right
            self._record(decision, f"{type(error).__name__}: {error}")
            return Room(None, decision.freed_bytes, error)
        finally:
            decision.parts.clear()  # an error refers to these frames, and may live as long as the user looks at it

    def preview(self, request: Request) -> Plan:
        """The plan for a request, moving nothing."""
        self.clear_up()
        self._device.refresh()
        return self._plan(Decision(request, None, 0, offers_workspaces=True, may_rest=True))

    def lower_budget(self, budget_bytes: int) -> int:
        """Makes models leave until the new budget holds, and sets it; returns the bytes freed.

        Raises `VRAMOutOfMemoryError`, and then the old one stays.
        """
        self.clear_up()
        meter = self._device.meter
        asked_by = f"a budget of {format_size(budget_bytes)}"
        request = Request(max(meter.committed_bytes - budget_bytes, 0) + self.available_bytes(), asked_by=asked_by)
        decision = Decision(request, None, 0, had_bytes=self.available_bytes())
        decision.may_rest = True
        if not self._fits(decision):
            self._ask_workspaces(decision)
        before = self._device.budget_setting
        try:
            self._leave_until_it_holds(decision, budget_bytes)
        except BaseException as error:
            self._device.set_budget(before)
            cause = "not enough may leave" if isinstance(error, VRAMOutOfMemoryError) else error
            self._record(decision, f"the budget stays: {cause}")
            raise
        finally:
            decision.parts.clear()  # an error refers to this frame, and may live as long as the user looks at it
        if decision.left:
            self._record(decision, "the budget was lowered")
        return decision.freed_bytes

    def _leave_until_it_holds(self, decision: Decision, budget_bytes: int) -> None:
        before, fits = self._device.budget_setting, self._plan(decision).satisfied
        if fits:
            self._device.set_budget(budget_bytes)  # first, so that nobody takes the room that is being made
        while fits and self.available_bytes() < 0:
            decision.request = Request(0, asked_by=decision.request.asked_by)
            fits = self._one_round(decision)
        if not fits:
            self._device.set_budget(before)  # the error tells what holds again
            used, free = self._device.meter.committed_bytes, self.available_bytes()
            if decision.failure is not None:
                raise decision.failure
            raise too_low(wanted_bytes=budget_bytes, used_bytes=used, free_bytes=free, **self._circumstances(decision))

    def evict(self, model: ManagedModel, asked_by: str) -> int:
        """Moves out what can leave of a model that the caller has marked; returns the bytes."""
        decision = Decision(Request(0, asked_by=asked_by), None, 0, had_bytes=self.available_bytes())
        decision.may_rest = True
        with self._registry.lock:
            others = [other for other in self._registry.models.values() if other is not model]
        # Whatever it asked for: nothing is demoted by its user's own wish.
        found = model.candidates(may_rest=decision.may_rest, asked=True)
        found = Owners(others, self._spared).allowed(model, found, asked=True)
        parts = [part for part, _ in found.parts]
        freed, stayed = self._timed(decision, model, parts, Step(model.name, len(parts), 0, "asked", asked_by))
        if found.kept and isinstance(model, TorchModel):
            model.body.staying = model.body.staying or found.kept
        if freed:
            self._record(decision, stayed or "asked by the user")
        return freed

    def look(self, model: ManagedModel) -> None:
        """Brings the model's figures up to date, unless it is being moved: then it is looked at anyway."""
        with self._registry.lock:
            ours = not (model.moving or model.forgotten)
        if ours:
            model.missing_bytes()

    def available_bytes(self) -> int:
        """Free bytes that nobody has reserved; negative when a budget was lowered below use."""
        return self._device.meter.limit_bytes - self._device.meter.committed_bytes

    def clear_up(self) -> None:
        """Forgets models whose objects died. Finalisers only leave a note, since they run anywhere."""
        while self._registry.gone:
            name = self._registry.gone.popleft()
            with self._registry.lock:
                model = self._registry.models.get(name)
                if model is None or getattr(model, "thing", model) is not None:
                    continue
                self._registry.remove(model)
            model.release()

    # --------------------------------------------------------------------------------------------- one request

    def _meet(self, decision: Decision) -> Room:
        while True:
            need = max(decision.request.need_bytes - decision.credit_bytes, 0)
            if (reservation := self._device.meter.reserve(need)) is not None:
                if decision.left:
                    self._record(decision, "made room")
                return Room(reservation, decision.freed_bytes)
            if not self._one_round(decision):
                busy = self._moves_elsewhere(decision) and need <= self._device.meter.limit_bytes
                if not busy and self._may_collect(decision):
                    continue
                error = decision.failure or self._refusal(decision)
                if not busy:
                    self._record(decision, decision.told_failure or "not enough, even with everything that may leave")
                return Room(None, decision.freed_bytes, error, busy)

    def _may_collect(self, decision: Decision) -> bool:
        """Before giving up, once: a failed call's tensors may hang in cycles. It costs: only if they may be enough."""
        missing = decision.plan.missing_bytes if decision.plan else 0
        if decision.collected or not decision.may_rest or self.holders().get(OTHER_TENSORS, 0) < missing:
            return False
        decision.collected = True
        gc.collect()
        return True

    def _one_round(self, decision: Decision) -> bool:
        """Plans and moves once; False when no plan satisfies the request."""
        chosen = self._plan(decision)
        if not chosen.satisfied and self._ask_for_less(decision, chosen):
            chosen = self._plan(decision)
            if not chosen.steps:
                return False  # all has left
        if not chosen.satisfied:
            return False
        models = self._claim(chosen.steps)
        gave: set[str] = set()
        try:
            for step, model in models:
                if self._fits(decision):
                    break  # a victim gave more than it was believed to hold
                if self._take(decision, model, step):
                    gave.add(model.name)
        finally:
            for _, model in models:
                self._registry.done_moving(model, changed=model.name in gave)
        return True

    @staticmethod
    def _ask_for_less(decision: Decision, chosen: Plan) -> bool:
        """Gives up what of the guess is more than everybody has."""
        missing = chosen.missing_bytes
        if not 0 < missing <= decision.spare_bytes:
            return False
        decision.request = dataclasses.replace(decision.request, need_bytes=decision.request.need_bytes - missing)
        decision.spare_bytes, decision.first = decision.spare_bytes - missing, None
        return True

    def _fits(self, decision: Decision) -> bool:
        return self.available_bytes() + decision.credit_bytes >= decision.request.need_bytes

    def _take(self, decision: Decision, model: ManagedModel, step: Step) -> int:
        found = decision.parts[model.name]
        parts = [part for part, _ in (found.demotable if step.stage == "demotion" else found.parts)[-step.blocks :]]
        try:
            freed, stayed = self._moved(decision, model, parts, step)
        except BaseException as error:  # a backend may exit, too
            if not isinstance(model, EngineModel):
                raise
            decision.failure = decision.failure or error
            freed, stayed = 0, f"{type(error).__name__}: {error}"
        if freed < step.bytes:
            decision.stuck[model.name] = stayed or "it gave less than it held"
            if isinstance(model, TorchModel):
                decision.stuck_keys |= {span.key for block in parts for span in block.spans if span.owned}
        return freed

    def _moved(self, decision: Decision, model: ManagedModel, parts: list[Any], step: Step) -> tuple[int, str]:
        """To demote: the flag first, then the move; what has not left gets its old residency back."""
        if step.stage != "demotion":
            return self._timed(decision, model, parts, step)
        assert isinstance(model, TorchModel)  # noqa: S101  nothing of an engine can be proven
        model.body.demote(parts)
        try:
            return self._timed(decision, model, parts, step)
        finally:
            model.body.promote(parts)

    def _timed(self, decision: Decision, model: ManagedModel, parts: list[Any], step: Step) -> tuple[int, str]:
        meter, start = self._device.meter, time.perf_counter()
        before, keys = meter.live_bytes, model.body.keys if isinstance(model, TorchModel) else set()
        freed, stayed = model.evict(parts, only_proven=step.stage == "demotion", may_rest=decision.may_rest)
        self._tell_sharers(model, keys)
        if freed and isinstance(model, EngineModel):
            self._device.refresh()  # its memory is not torch's: only the device can say whether it came free
        if freed:
            # Measured, where others did not allocate meanwhile; never more than what left.
            measured = min(max(before - meter.live_bytes, 0), freed) or freed
            ms = (time.perf_counter() - start) * 1e3
            decision.left.append(StepTaken(model.name, len(parts), measured, step.stage, step.reason, ms))
            decision.freed_bytes += measured
        return freed, stayed

    def _tell_sharers(self, model: ManagedModel, keys: set[Key]) -> None:
        """What others share with the model may have left them, too: they look again at their next call."""
        with self._registry.lock:
            others = [m for m in self._registry.models.values() if isinstance(m, TorchModel) and m is not model]
        for other in others:
            if keys & other.body.keys:
                other.body.complete = False

    def _claim(self, steps: Iterable[Step]) -> list[tuple[Step, ManagedModel]]:
        """Marks the victims, unless they came to life since they were looked at."""
        claimed = []
        with self._registry.lock:
            for step in steps:
                model = self._registry.models.get(step.model)
                if step.blocks and model is not None and not self._spared(model, None):
                    self._registry.claim(model)
                    claimed.append((step, model))
        return claimed

    # --------------------------------------------------------------------------------------------- planning

    def _plan(self, decision: Decision) -> Plan:
        """The plan for what is there now; resident models are proven clean only when nothing else suffices."""
        chosen = self._plan_once(decision, proven=False)
        with self._registry.lock:
            resident = any(model.residency == "device" for model in self._registry.models.values())
        if not chosen.satisfied and resident:
            chosen = self._plan_once(decision, proven=True)
        assert decision.snapshot is not None  # noqa: S101
        decision.plan = chosen
        decision.first = decision.first or (decision.snapshot, decision.request, chosen)
        return chosen

    def _plan_once(self, decision: Decision, *, proven: bool) -> Plan:
        with self._registry.lock:
            models = sorted(self._registry.models.values(), key=lambda model: model.name)
        found = {model: self._candidates(model, decision, proven=proven) for model in models}
        owners = Owners(models, lambda model: self._objection(model, decision.required))
        decision.parts = {model.name: owners.allowed(model, parts) for model, parts in found.items()}
        with self._registry.lock:
            states = tuple(self._state(model, decision) for model in models if model.device_bytes)
        free = self.available_bytes() + decision.credit_bytes
        decision.snapshot = Snapshot(self._device.meter.limit_bytes, free, states)
        return plan(decision.snapshot, decision.request)

    def _candidates(self, model: ManagedModel, decision: Decision, *, proven: bool) -> Candidates:
        if self._spared(model, decision.required):
            return Candidates()
        if isinstance(model, EngineModel) and model.name in decision.stuck:
            return Candidates(kept=decision.stuck[model.name])
        found = model.candidates(proven=proven, may_rest=decision.may_rest)
        return found.without(decision.stuck_keys, decision.stuck.get(model.name, ""))

    def _state(self, model: ManagedModel, decision: Decision) -> ModelState:
        found = decision.parts[model.name]
        return ModelState(
            name=model.name,
            rank=model.rank,
            last_used=model.last_used,
            blocks=tuple(size for _, size in found.parts),
            demotable=tuple(size for _, size in found.demotable),
            residency=model.residency,
            workspace=decision.offers_workspaces and model.workspace is not None,
            spared=self._spared(model, decision.required),
            kept=found.kept,
        )

    def _objection(self, model: ManagedModel, required: ManagedModel | None) -> str:
        """Why what it shares with another may not be taken from that one either."""
        return self._spared(model, required) or ("asking to stay" if model.residency == "device" else "")

    def _spared(self, model: ManagedModel, required: ManagedModel | None = None) -> str:
        """Why nothing of the model may be taken (rule 4)."""
        if model is required:
            return "needed by this request"
        if model.leases:
            return "in use"
        if model.pinned:
            return "pinned"
        if self._device.capturing():
            return "a graph is being captured"
        return _IN_TRANSIT if model.moving else ""

    def _moves_elsewhere(self, decision: Decision) -> bool:
        """Whether a move of another is in progress, or was when it was planned: what it gave up may be enough now."""
        if decision.plan and any(reason == _IN_TRANSIT for _, reason in decision.plan.spared):
            return True
        with self._registry.lock:
            return any(m.moving and m is not decision.required for m in self._registry.models.values())

    # --------------------------------------------------------------------------------------------- the rest

    def _ask_workspaces(self, decision: Decision) -> None:
        """Idle models give back caches, lowest rank first, until it fits."""
        with self._registry.lock:
            idle = [m for m in self._registry.models.values() if m.workspace and not self._spared(m, decision.required)]
        for step in given_back(idle, self._device.meter):
            decision.left.append(step)
            decision.freed_bytes += step.bytes
            if self._fits(decision):
                return

    def holders(self) -> dict[str, int]:
        """Bytes on the device by model, and those of everything else."""
        with self._registry.lock:
            held = {name: size for name, model in self._registry.models.items() if (size := model.device_bytes)}
        rest = self._device.meter.live_bytes - sum(held.values())
        return held | ({OTHER_TENSORS: rest} if rest > 0 else {})

    def _holders_of_all(self) -> tuple[dict[str, int], tuple[str, ...]]:
        """`holders`, and where others lower what this kernel may use, them too, with the processes in words."""
        outside = self._device.outside(processes=True)
        bounded = self._device.budget_setting == AUTO or self._device.meter.limit_bytes < self._device.budget_bytes
        if outside is None or not outside.foreign_bytes or not bounded:
            return self.holders(), ()
        return self.holders() | {OTHER_PROCESSES: outside.foreign_bytes}, outside.processes

    def _refusal(self, decision: Decision) -> VRAMOutOfMemoryError:
        request = decision.request
        return refusal(
            device=self._device.name,
            what=f"{request.asked_by or 'this request'} needs {format_size(request.need_bytes)}",
            needed_bytes=request.need_bytes,
            free_bytes=self.available_bytes() + decision.credit_bytes,
            **self._circumstances(decision),
        )

    def _circumstances(self, decision: Decision) -> dict[str, Any]:
        """Who holds what, and why, for an error."""
        with self._registry.lock:
            spared = {
                name: self._spared(model, decision.required) or decision.stuck.get(name) or _kept(decision, name)
                for name, model in self._registry.models.items()
            }
        holders, processes = self._holders_of_all()
        if processes:
            spared[OTHER_PROCESSES] = ", ".join(processes)
        return {
            "budget_bytes": self._device.budget_bytes,
            "holders": holders,
            "spared": spared,
            "missing_bytes": decision.plan.missing_bytes if decision.plan else 0,
            "left": ", ".join(f"{step.model} {format_size(step.bytes)}" for step in decision.left),
        }

    def _record(self, decision: Decision, reason: str) -> None:
        self._journal.append(decision.record(reason))


def _kept(decision: Decision, name: str) -> str:
    return decision.parts[name].kept if name in decision.parts else ""
