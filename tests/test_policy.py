"""The planner, case by case.

Without these the order of leaving could change silently: every request would still find its room, only
from the wrong models.
"""

from __future__ import annotations

import json

import pytest

from vram_magic.policy import DEFAULT_TIERS, ModelState, Plan, Request, Snapshot, plan, to_json

pytestmark = pytest.mark.cpu_only("no device")

GiB = 2**30


def model(name: str, *blocks: int, rank: int = 0, used: int = 0, **more: object) -> ModelState:
    return ModelState(name, rank, used, blocks, **more)  # type: ignore[arg-type]


def resident(name: str, *demotable: int, **more: object) -> ModelState:
    return model(name, residency="device", demotable=demotable, **more)


def decide(free: int, need: int, *models: ModelState, rank: int | None = None, prefer: str = "") -> Plan:
    return plan(Snapshot(100, free, models), Request(need, rank, tuple(prefer.split())))


def moved(decision: Plan) -> list[tuple[str, int, str]]:
    return [(step.model, step.bytes, step.stage) for step in decision.steps]


@pytest.mark.parametrize(
    ("resident", "asked", "need", "leaving"),
    [
        ({"asr": 4, "tts": 2, "llm": 4}, "llm", 9, {"llm": "pass 1"}),
        ({"asr": 4, "tts": 2, "llm": 4}, "llm", 12, {"llm": "pass 1", "tts": "pass 2"}),
        ({"asr": 4, "tts": 2, "llm": 4}, "llm", 13, {"llm": "pass 1", "tts": "pass 2", "asr": "pass 2"}),
        ({"llm": 13}, "asr", 4, {"llm": "pass 1"}),
        ({"asr": 4, "llm": 11}, "tts", 2, {"llm": "pass 1"}),
        ({"asr": 12}, "tts", 6, {"asr": "pass 2"}),
        ({"asr": 4, "tts": 2, "llm": 4}, "llm", 17, None),
    ],
)
def test_the_three_tiers_leave_in_their_order(
    resident: dict[str, int], asked: str, need: int, leaving: dict[str, str] | None
) -> None:
    models = tuple(ModelState(name, DEFAULT_TIERS[name], 0, (gb * GiB,)) for name, gb in resident.items())
    snapshot = Snapshot(16 * GiB, (16 - sum(resident.values())) * GiB, models)
    decision = plan(snapshot, Request(need * GiB, DEFAULT_TIERS[asked]))
    assert decision.satisfied is (leaving is not None)
    assert [(step.model, step.stage) for step in decision.steps] == list((leaving or {}).items())


def test_what_fits_already_moves_nothing() -> None:
    assert decide(5, 5, model("a", 9)) == Plan((), True, 0)


def test_blocks_leave_from_the_tail_until_it_fits() -> None:
    decision = decide(1, 6, model("a", 9, 3, 2, 1))
    assert moved(decision) == [("a", 6, "pass 1")]  # 1 + 2 + 3
    assert decision.steps[0].blocks == 3
    assert decision.spared == (("a", "its first 1 block not needed"),)


def test_least_recently_used_leaves_first_within_a_rank() -> None:
    decision = decide(0, 8, model("new", 5, used=2), model("old", 5, used=1))
    assert [step.model for step in decision.steps] == ["old", "new"]
    assert decision.steps[0].reason == "tier 0, least recently used"


def test_the_preferred_leave_first_within_their_rank_only() -> None:
    models = [model(name, 1, rank=rank) for name, rank in [("a", 0), ("b", 0), ("c", 0), ("d", 1)]]
    decision = decide(0, 4, *models, prefer="d c b unknown")
    assert [step.model for step in decision.steps] == ["c", "b", "a", "d"]
    assert decision.steps[0].reason == "tier 0, preferred by the request"


def test_a_request_of_no_rank_takes_every_rank_in_pass_1() -> None:
    assert moved(decide(0, 2, model("b", 1, rank=7), model("a", 1, rank=2))) == [
        ("a", 1, "pass 1"),
        ("b", 1, "pass 1"),
    ]


def test_resident_models_are_demoted_last_by_rank_then_use() -> None:
    stays = [resident(n, 1, rank=r, used=u) for n, r, u in [("x", 1, 0), ("y", 0, 9)]]
    decision = decide(0, 3, *stays, model("a", 1, rank=5), rank=0)
    assert moved(decision) == [("a", 1, "pass 2"), ("y", 1, "demotion"), ("x", 1, "demotion")]


def test_a_resident_model_stays_when_the_others_suffice() -> None:
    decision = decide(0, 1, resident("x", 9), model("a", 1, rank=5), rank=0)
    assert moved(decision) == [("a", 1, "pass 2")]
    assert decision.spared == (("x", "asks to stay on the device"),)


def test_what_was_demoted_once_leaves_like_any_other_and_the_rest_of_it_last() -> None:
    mixed = ModelState("x", 0, 0, (2,), "device", demotable=(3,))
    assert moved(decide(0, 2, mixed, model("a", 1, used=1))) == [("x", 2, "pass 1")]
    assert moved(decide(0, 5, mixed, model("a", 1, used=1))) == [
        ("x", 2, "pass 1"),
        ("a", 1, "pass 1"),
        ("x", 3, "demotion"),
    ]


def test_spared_models_give_neither_blocks_nor_workspace() -> None:
    decision = decide(0, 1, model("a", 9, spared="in use", workspace=True))
    assert decision == Plan((), False, 0, (("a", "in use"),), missing_bytes=1)


def test_workspaces_are_asked_first_of_every_rank_and_counted_as_nothing() -> None:
    lender = model("lender", rank=9, workspace=True)
    decision = decide(0, 2, model("a", 2, workspace=True), lender, rank=0)
    assert moved(decision) == [("a", 0, "workspace"), ("lender", 0, "workspace"), ("a", 2, "pass 1")]
    assert decision.freed_bytes == 2


def test_all_or_nothing_keeps_every_block_but_still_asks_the_workspaces() -> None:
    decision = decide(1, 9, model("a", 3, workspace=True), model("b", 4, spared="pinned"))
    assert moved(decision) == [("a", 0, "workspace")]
    assert (decision.satisfied, decision.freed_bytes, decision.missing_bytes) == (False, 0, 5)  # 9 - 1 - 3
    assert dict(decision.spared) == {"a": "may leave, but all that may leave is not enough", "b": "pinned"}


def test_a_budget_below_use_is_a_shortfall_too() -> None:
    assert moved(decide(-3, 0, model("a", 2, 2))) == [("a", 4, "pass 1")]


def test_who_stays_is_told_why() -> None:
    models = [
        model("gone", 1),
        model("rest", 1, kept="2 blocks: an optimizer holds them", used=1),
        model("unreached", 1, rank=1),
        model("elsewhere"),
    ]
    assert decide(0, 2, *models).spared == (
        ("rest", "2 blocks: an optimizer holds them"),
        ("unreached", "not needed: enough was free without it"),
    )


def test_a_plan_reads_as_text() -> None:
    decision = decide(0, 3 * GiB, model("llm", GiB, GiB, GiB, GiB), model("asr", GiB, spared="in use", rank=2))
    assert str(decision).splitlines() == [
        "would free 3.0 GiB:",
        "  1. llm: 3 blocks, 3.0 GiB (pass 1: tier 0, least recently used)",
        "  llm stays: its first 1 block not needed",
        "  asr stays: in use",
    ]
    assert str(decide(1, 1)) == "fits already: nothing would leave"


def test_an_unsatisfied_plan_says_what_is_missing_and_who_is_spared() -> None:
    text = str(decide(0, 3 * GiB, model("llm", GiB, workspace=True), model("asr", GiB, spared="pinned", rank=2)))
    assert text.splitlines() == [
        "not enough room: 2.0 GiB would still be missing if everything left, so no block would leave",
        "  1. llm: no block (workspace: idle, can give memory back without leaving)",
        "  llm stays: may leave, but all that may leave is not enough",
        "  asr stays: pinned",
    ]


def test_json_carries_everything_in_plain_types() -> None:
    snapshot = Snapshot(9, 1, (model("a", 1, 2, kept="x"),))
    assert json.loads(json.dumps(to_json(snapshot)))["models"][0]["blocks"] == [1, 2]
