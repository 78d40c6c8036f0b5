"""The planner's rules, on any snapshot.

Without these a plan could silently take a leased block, take more than was needed, or leave half a
decision behind, in some mixture of tiers that no example thought of.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vram_magic.policy import (
    ModelState,
    Request,
    Snapshot,
    plan,
    plan_from_json,
    request_from_json,
    snapshot_from_json,
    to_json,
)

pytestmark = pytest.mark.cpu_only("no device")

if TYPE_CHECKING:
    from collections.abc import Iterator
    from random import Random

NAMES = [*"abcdef", "größe", "a model"]

MODELS = st.builds(
    ModelState,
    name=st.sampled_from(NAMES),
    rank=st.integers(0, 3),
    last_used=st.integers(0, 4),
    blocks=st.lists(st.integers(0, 9), max_size=5).map(tuple),
    residency=st.sampled_from(["auto", "disk", "host", "device"]),
    demotable=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    workspace=st.booleans(),
    spared=st.sampled_from(["", "", "", "in use", "pinned"]),
    kept=st.sampled_from(["", "", "edited"]),
)
SNAPSHOTS = st.builds(
    Snapshot,
    budget_bytes=st.just(100),
    free_bytes=st.integers(-10, 10),
    models=st.lists(MODELS, max_size=8, unique_by=lambda model: model.name).map(tuple),
)
REQUESTS = st.builds(
    Request,
    need_bytes=st.integers(0, 60),
    rank=st.none() | st.integers(0, 3),
    prefer=st.lists(st.sampled_from(NAMES), max_size=3).map(tuple),
    asked_by=st.text(max_size=3),
)


def in_order(snapshot: Snapshot, request: Request) -> Iterator[tuple[str, str, int]]:
    """Every block that may be taken, one by one, as the contract words the order: (model, stage, size)."""

    def turn(model: ModelState) -> tuple[int, int, int, str]:
        wish = request.prefer.index(model.name) if model.name in request.prefer else len(NAMES)
        return model.rank, wish, model.last_used, model.name

    def use(model: ModelState) -> tuple[int, int, str]:
        return model.rank, model.last_used, model.name

    idle = [model for model in snapshot.models if not model.spared]
    low = [m for m in idle if request.rank is None or m.rank <= request.rank]
    stages = {
        "pass 1": sorted(low, key=turn),
        "pass 2": sorted((m for m in idle if m not in low), key=turn),
        "demotion": sorted(idle, key=use),
    }
    for stage, models in stages.items():
        for model in models:
            sizes = model.demotable if stage == "demotion" else model.blocks
            yield from ((model.name, stage, size) for size in reversed(sizes))


@given(SNAPSHOTS, REQUESTS)
def test_nothing_is_taken_that_may_not_be_taken(snapshot: Snapshot, request: Request) -> None:
    models = {model.name: model for model in snapshot.models}
    for step in plan(snapshot, request).steps:
        model = models[step.model]
        assert not model.spared
        assert model.workspace if step.stage == "workspace" else step.blocks > 0
        blocks = model.demotable if step.stage == "demotion" else model.blocks
        assert step.bytes == sum(blocks[len(blocks) - step.blocks :])


@given(SNAPSHOTS, REQUESTS)
def test_blocks_leave_in_the_order_of_the_contract(snapshot: Snapshot, request: Request) -> None:
    short = request.need_bytes - snapshot.free_bytes
    expected: dict[tuple[str, str], list[int]] = {}
    for name, stage, size in in_order(snapshot, request):
        if short <= 0:
            break
        expected.setdefault((name, stage), []).append(size)
        short -= size
    moves = [step for step in plan(snapshot, request).steps if step.blocks]
    wanted = [(*who, len(taken), sum(taken)) for who, taken in expected.items() if sum(taken)]
    assert [(s.model, s.stage, s.blocks, s.bytes) for s in moves] == (wanted if short <= 0 else [])


@given(SNAPSHOTS, REQUESTS)
def test_never_more_than_a_block_beyond_the_need(snapshot: Snapshot, request: Request) -> None:
    decision = plan(snapshot, request)
    moves = [step for step in decision.steps if step.blocks]
    if moves:
        last = next(model for model in snapshot.models if model.name == moves[-1].model)
        blocks = last.demotable if moves[-1].stage == "demotion" else last.blocks
        last_block = blocks[-moves[-1].blocks]
        assert decision.freed_bytes - last_block < request.need_bytes - snapshot.free_bytes


@given(SNAPSHOTS, REQUESTS)
def test_all_or_nothing(snapshot: Snapshot, request: Request) -> None:
    decision = plan(snapshot, request)
    short = request.need_bytes - snapshot.free_bytes
    eligible = sum(size for _, _, size in in_order(snapshot, request))
    assert decision.satisfied is (short <= eligible)
    assert decision.freed_bytes == sum(step.bytes for step in decision.steps)
    if decision.satisfied:
        assert decision.freed_bytes >= short
        assert decision.missing_bytes == 0
    else:
        assert not any(step.blocks for step in decision.steps)
        assert decision.missing_bytes == short - eligible


@given(SNAPSHOTS, REQUESTS)
def test_what_fits_already_moves_nothing(snapshot: Snapshot, request: Request) -> None:
    decision = plan(snapshot, request)
    assert (decision.satisfied and not decision.steps) is (request.need_bytes <= snapshot.free_bytes)


@given(SNAPSHOTS, REQUESTS, st.randoms(use_true_random=False))
def test_the_plan_does_not_depend_on_how_models_are_listed(
    snapshot: Snapshot, request: Request, random: Random
) -> None:
    shuffled = list(snapshot.models)
    random.shuffle(shuffled)
    again = Snapshot(snapshot.budget_bytes, snapshot.free_bytes, tuple(shuffled))
    assert plan(snapshot, request) == plan(snapshot, request) == plan(again, request)


@given(SNAPSHOTS, REQUESTS)
def test_everyone_with_something_left_is_told_why(snapshot: Snapshot, request: Request) -> None:
    decision = plan(snapshot, request)
    taken = Counter({m.name: 0 for m in snapshot.models})
    for step in decision.steps:
        taken[step.model] += step.blocks
    left = {m.name for m in snapshot.models if m.spared or m.kept or len(m.blocks + m.demotable) > taken[m.name]}
    told = dict(decision.spared)
    assert all(told.values())
    assert not decision.steps or left <= told.keys()


@given(SNAPSHOTS, REQUESTS)
def test_json_round_trips(snapshot: Snapshot, request: Request) -> None:
    decision = plan(snapshot, request)
    assert snapshot_from_json(json.loads(json.dumps(to_json(snapshot)))) == snapshot
    assert request_from_json(json.loads(json.dumps(to_json(request)))) == request
    assert plan_from_json(json.loads(json.dumps(to_json(decision)))) == decision
