"""The cascade with real modules, through both doors: the Python API and the magics.

Without these the planner may decide rightly while other bytes leave: too many of them, from the wrong end, more than
the device then measures as free, or with weights that come back changed.

One unit is a layer of 1 MiB, and one block. The device has 16 units.
"""

from __future__ import annotations

import gc
from ctypes import string_at

import numpy as np
import pytest
import torch
from place import DEVICE
from safetensors.numpy import save_file

import vram_magic as vm
from vram_magic.sizes import format_size

pytestmark = pytest.mark.timeout(180)

UNIT = 2**20
SLACK = UNIT // 4  # inputs and results of the calls; less than a block
X = torch.linspace(-1, 1, 512, device=DEVICE)[None]


def build(units: int, device: str = DEVICE) -> torch.nn.Module:
    layers = [torch.nn.Linear(512, 512, bias=False, device=device) for _ in range(units)]  # 512 * 512 * 4 bytes
    return torch.nn.Sequential(*layers)


def contents(model: torch.nn.Module) -> list[tuple[int, bytes]]:
    """Each parameter's identity and bytes, in memory that torch does not count.

    The simulated GPU's memory is the processor's, too.
    """
    return [(id(p), string_at(p.data_ptr(), p.nbytes)) for p in model.parameters()]


class PythonDoor:
    """The API as a user calls it; the variables are the user's."""

    def __init__(self, mgr: vm.VRAMManager) -> None:
        self.mgr = mgr
        self.variables: dict[str, torch.nn.Module] = {}

    def load(self, name, units, tier, **options):
        self.variables[name] = self.mgr.load(name, lambda: build(units), tier=tier, **options).model

    def load_file(self, name, path, into):
        self.mgr.load(name, path, into=into)

    def load_again(self, name):
        self.mgr[name].load()

    def evict(self, name):
        self.mgr[name].evict()

    def pin(self, name):
        self.mgr[name].pin()

    def set_budget(self, size_bytes):
        self.mgr.budget_bytes = size_bytes

    def call(self, name):
        return self.variables[name](X).detach()

    def allocate(self, size_bytes):
        return torch.empty(size_bytes, dtype=torch.uint8, device=DEVICE)

    def delete(self, name):
        del self.variables[name]


class MagicDoor:
    """Cells of a notebook."""

    def __init__(self, mgr: vm.VRAMManager, shell) -> None:
        self.mgr = mgr
        self.shell = shell
        self.variables = shell.user_ns
        shell.push({"build": build, "torch": torch, "X": X, "DEVICE": DEVICE})
        self._run("%load_ext vram_magic")

    def load(self, name, units, tier, **options):
        more = " ".join(f"--{option} {value}" for option, value in options.items())
        self._run(f"%load_model {name} lambda: build({units}) --tier {tier} {more}")

    def load_file(self, name, path, into):
        self.shell.push({"into": into})
        self._run(f"%load_model {name} {str(path)!r} --into into")

    def load_again(self, name):
        self._run(f"%vram load {name}")

    def evict(self, name):
        self._run(f"%vram evict {name}")

    def pin(self, name):
        self._run(f"%vram pin {name}")

    def set_budget(self, size_bytes):
        self._run(f"%vram budget {size_bytes}")

    def call(self, name):
        self._run(f"result = {name}(X).detach()")
        return self.variables.pop("result")

    def allocate(self, size_bytes):
        self._run(f"result = torch.empty({size_bytes}, dtype=torch.uint8, device=DEVICE)")
        return self.variables.pop("result")

    def delete(self, name):
        self._run(f"del {name}")

    def _run(self, cell):
        error = self.shell.run_cell(cell).error_in_exec
        if error is not None:
            raise error


@pytest.fixture(params=["python", "magic"])
def door(request, tmp_path):
    shell = request.getfixturevalue("bare_notebook").shell if request.param == "magic" else None
    gc.collect()
    mgr = vm.VRAMManager(device=DEVICE, budget="1GiB", block_bytes=UNIT, spill_dir=tmp_path / "spill")
    made = PythonDoor(mgr) if shell is None else MagicDoor(mgr, shell)
    made.base_bytes = mgr.used_bytes
    mgr.budget_bytes = made.base_bytes + 16 * UNIT + SLACK
    yield made
    mgr.close()


def resident(door):
    """Units on the device by model, of those that have any there."""
    return {name: h.device_bytes // UNIT for name, h in door.mgr.models.items() if h.device_bytes}


def used_units(door):
    return (door.mgr.used_bytes - door.base_bytes) / UNIT


ROWS = [
    ({}, "llm", 4, {}),  # 12 free
    ({"asr": 4}, "llm", 4, {"asr": 4}),  # 8 free
    ({"asr": 4, "tts": 2, "llm": 4}, "llm", 9, {"asr": 4, "tts": 2, "llm": 1}),  # 6 free, 3 short
    ({"asr": 4, "tts": 2, "llm": 4}, "llm", 12, {"asr": 4}),  # 6 short: llm 4, tts 2
    ({"asr": 4, "tts": 2, "llm": 4}, "llm", 13, {"asr": 3}),  # 7 short: llm 4, tts 2, asr 1
    ({"llm": 13}, "asr", 4, {"llm": 12}),  # 3 free, 1 short
    ({"asr": 4, "llm": 11}, "tts", 2, {"asr": 4, "llm": 10}),  # 1 free, 1 short
    ({"asr": 12}, "tts", 6, {"asr": 10}),  # 4 free, 2 short, of a higher tier: the last resort
]


@pytest.mark.parametrize("returning", [False, True], ids=["built", "returning"])
@pytest.mark.parametrize(("there", "tier", "units", "left"), ROWS)
def test_tiers_give_way_in_their_order_from_the_tail_and_only_as_much_as_needed(
    door, there, tier, units, left, returning
):
    if returning:
        door.load("new", units, tier)
        door.evict("new")
    for old, size in there.items():
        door.load(f"old_{old}", size, old)
    before = {name: contents(door.variables[name]) for name in door.mgr.models}
    results = {name: door.call(name).cpu().numpy().tobytes() for name in door.mgr.models if name != "new"}
    for old in there:
        door.mgr[f"old_{old}"].load()
    assert resident(door) == {f"old_{old}": size for old, size in there.items()}
    door.mgr.reset_peak()

    if returning:
        door.load_again("new")
    else:
        door.load("new", units, tier)

    expected = {"new": units} | {f"old_{old}": size for old, size in left.items()}
    assert resident(door) == expected
    assert used_units(door) == sum(expected.values())
    assert door.mgr.peak_bytes <= door.mgr.budget_bytes
    for name, kept in before.items():
        assert contents(door.variables[name]) == kept
    for name, result in results.items():
        assert door.call(name).cpu().numpy().tobytes() == result
    assert door.mgr.peak_bytes <= door.mgr.budget_bytes


def test_blocks_leave_from_the_tail(door):
    door.load("llm", 6, "llm")
    door.allocate(12 * UNIT)  # 10 free, 2 short
    weights = [layer.weight for layer in door.variables["llm"]]
    there = [weight.device.type == DEVICE and weight.untyped_storage().resizable() for weight in weights]
    assert there == [True] * 4 + [False] * 2
    assert door.mgr["llm"].state == "partial"


def test_the_least_recently_used_of_a_tier_gives_first(door):
    door.load("a", 5, "llm")
    door.load("b", 5, "llm")
    door.call("a")
    door.load("c", 9, "llm")  # 6 free, 3 short
    assert resident(door) == {"a": 5, "b": 2, "c": 9}


def test_the_same_model_again_moves_nothing(door):
    door.load("llm", 4, "llm")
    before = contents(door.variables["llm"])
    door.load_again("llm")
    assert (resident(door), contents(door.variables["llm"])) == ({"llm": 4}, before)
    assert len(door.mgr.journal) == 0


def test_what_can_never_fit_leaves_every_model_where_it_was(door):
    door.load("giant", 13, "llm")
    door.evict("giant")
    for tier, units in {"asr": 4, "tts": 2, "llm": 4}.items():
        door.load(f"old_{tier}", units, tier)
    door.set_budget(door.base_bytes + 12 * UNIT + SLACK)
    before = {name: contents(door.variables[name]) for name in door.mgr.models}
    used, free = door.mgr.used_bytes, door.mgr.free_bytes

    with pytest.raises(vm.VRAMOutOfMemoryError) as refused:
        door.load_again("giant")

    error = refused.value
    assert isinstance(error, torch.OutOfMemoryError)
    assert (error.needed_bytes, error.free_bytes, error.budget_bytes) == (13 * UNIT, free, door.mgr.budget_bytes)
    holders = {name: size for name, size in error.holders.items() if name != "other tensors"}
    assert holders == {"old_asr": 4 * UNIT, "old_tts": 2 * UNIT, "old_llm": 4 * UNIT}
    lines = str(error).splitlines()
    assert len(lines) == 4
    assert "giant needs 13.0 MiB" in lines[0]
    assert format_size(door.mgr.budget_bytes) in lines[1]
    assert "old_asr 4.0 MiB" in lines[2]
    assert "%vram" in lines[3]
    assert resident(door) == {"old_asr": 4, "old_tts": 2, "old_llm": 4}
    assert door.mgr.used_bytes == used
    assert {name: contents(door.variables[name]) for name in door.mgr.models} == before
    assert (door.mgr["giant"].state, str(door.mgr.last_error)) == ("host", str(error))


def test_a_file_that_can_never_fit_leaves_every_model_where_it_was(door, tmp_path):
    for tier, units in {"asr": 4, "llm": 4}.items():
        door.load(f"old_{tier}", units, tier)
    weights = {f"{i}.weight": np.zeros((512, 512), np.float32) for i in range(17)}
    save_file(weights, tmp_path / "giant.safetensors")
    into = build(17, "meta")
    with pytest.raises(vm.VRAMOutOfMemoryError) as refused:
        door.load_file("giant", tmp_path / "giant.safetensors", into)
    assert "giant" not in door.mgr
    assert resident(door) == {"old_asr": 4, "old_llm": 4}
    assert refused.value.needed_bytes == 17 * UNIT


@pytest.mark.cpu_only("numpy")
def test_a_weight_that_numpy_has_seen_leaves_like_any_other(door):
    door.load("llm", 4, "llm")
    for parameter in door.variables["llm"].parameters():
        parameter.detach().numpy().sum()
    assert resident(door) == {"llm": 4}
    door.evict("llm")
    assert used_units(door) == 0


def test_a_tensor_that_can_never_fit_leaves_every_model_where_it_was(door):
    door.load("llm", 4, "llm")
    door.load("asr", 4, "asr")
    with pytest.raises(torch.OutOfMemoryError) as refused:
        door.allocate(17 * UNIT)
    assert len(str(refused.value).splitlines()) == 4
    assert door.mgr.last_error.needed_bytes == 17 * UNIT
    assert resident(door) == {"llm": 4, "asr": 4}


def test_a_builder_that_runs_out_of_memory_leaves_no_model_and_no_bytes(door):
    door.load("asr", 4, "asr")
    door.pin("asr")
    with pytest.raises(vm.VRAMOutOfMemoryError, match="giant"):
        door.load("giant", 13, "llm")  # 4 + 13 > 16
    assert "giant" not in door.mgr
    assert "giant" not in door.variables
    assert resident(door) == {"asr": 4}


def test_a_tensor_of_the_users_takes_every_tier_in_ascending_order(door):
    for tier, units in {"asr": 4, "tts": 2, "llm": 4}.items():
        door.load(f"old_{tier}", units, tier)
    tensor = door.allocate(13 * UNIT)  # 7 short: llm 4, tts 2, asr 1
    assert resident(door) == {"old_asr": 3}
    assert used_units(door) == 16  # 13 + 3
    del tensor
    assert used_units(door) == 3


def test_a_pinned_model_stays_and_the_next_one_gives(door):
    door.load("llm", 4, "llm")
    door.load("asr", 4, "asr")
    door.pin("llm")
    door.load("new", 10, "llm")  # 8 free, 2 short
    assert resident(door) == {"llm": 4, "asr": 2, "new": 10}
    with pytest.raises(vm.ModelInUseError, match="unpin"):
        door.evict("llm")
    with pytest.raises(torch.OutOfMemoryError, match="pinned"):
        door.allocate(13 * UNIT)  # 16 - 4


def test_a_model_that_asks_to_stay_and_has_no_file_stays(door):
    door.load("llm", 8, "llm", residency="device")
    door.load("asr", 4, "asr")
    door.allocate(7 * UNIT)  # 4 free, 3 short
    assert resident(door) == {"llm": 8, "asr": 1}
    with pytest.raises(torch.OutOfMemoryError):
        door.allocate(9 * UNIT)
    assert door.mgr["llm"].residency == "device"


def test_a_lower_budget_makes_tails_leave_at_once(door):
    door.load("llm", 4, "llm")
    door.load("asr", 4, "asr")
    door.set_budget(door.base_bytes + 6 * UNIT + SLACK)
    assert resident(door) == {"llm": 2, "asr": 4}
    door.set_budget(door.base_bytes + 16 * UNIT + SLACK)
    door.call("llm")
    assert resident(door) == {"llm": 4, "asr": 4}


def test_a_budget_below_what_is_pinned_is_refused_and_nothing_moves(door):
    door.load("llm", 4, "llm")
    door.load("asr", 4, "asr")
    door.pin("asr")
    before = door.mgr.budget_bytes
    with pytest.raises(vm.VRAMOutOfMemoryError):
        door.set_budget(door.base_bytes + 3 * UNIT)
    assert (resident(door), door.mgr.budget_bytes) == ({"llm": 4, "asr": 4}, before)


def test_a_deleted_model_gives_its_bytes_before_anyone_else(door):
    door.load("llm", 8, "llm")
    door.load("asr", 8, "asr")
    door.delete("asr")
    assert used_units(door) == 8
    door.allocate(8 * UNIT)
    assert resident(door) == {"llm": 8}
    assert list(door.mgr.models) == ["llm"]


def test_an_edit_survives_any_number_of_round_trips(door):
    door.load("a", 9, "llm")
    door.load("b", 9, "llm")
    for turn in range(4):
        with torch.no_grad():
            door.variables["a"][turn].weight.neg_()
            door.variables["b"][8 - turn].weight.data.mul_(2)
        before = [contents(door.variables[name]) for name in "ab"]
        door.call("a")
        door.call("b")
        door.call("a")
        assert [contents(door.variables[name]) for name in "ab"] == before
    assert door.mgr.peak_bytes <= door.mgr.budget_bytes


def test_the_journal_tells_each_decision_and_replays(door, tmp_path):
    for tier, units in {"asr": 4, "tts": 2, "llm": 4}.items():
        door.load(f"old_{tier}", units, tier)
    door.load("new", 1, "llm")
    door.evict("new")
    door.pin("old_asr")
    door.load("big", 6, "tts")
    door.allocate(8 * UNIT)  # 10 short of 16 - 4 - 8
    record = door.mgr.journal[-1]
    assert record.asked_by == "an allocation"
    assert (record.need_bytes, record.freed_bytes) == (8 * UNIT, 8 * UNIT)
    assert [(s.model, s.blocks, s.bytes, s.stage) for s in record.left] == [
        ("old_llm", 4, 4 * UNIT, "pass 1"),
        ("old_tts", 2, 2 * UNIT, "pass 1"),
        ("big", 2, 2 * UNIT, "pass 1"),
    ]
    assert dict(record.spared)["old_asr"] == "pinned"
    assert "4 blocks not needed" in dict(record.spared)["big"]
    door.mgr.journal.to_jsonl(tmp_path / "journal.jsonl")
    recorded = [record.plan for record in door.mgr.journal if record.snapshot]
    assert vm.Journal.replay(tmp_path / "journal.jsonl") == recorded
