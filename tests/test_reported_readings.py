"""Small cases of public bug reports: readings of free memory that are old or wrong, others on the device, fragments.

Without these, room is promised that is not there, models leave for memory that somebody else holds, or an allocation
fails while idle models could have left for it. Each test names the report that it is about.
"""

from __future__ import annotations

import asyncio
import contextlib

import pytest
import torch
from place import DEVICE, same_values
from torch import nn

import vram_magic as vm
from vram_magic import vram_manager
from vram_magic.devices import FakeDevice
from vram_magic.models.managed import TorchModel
from vram_magic.sizes import format_size

if DEVICE == "cuda":
    import simulated

pytestmark = pytest.mark.usefixtures("whole_device")

MIB, GIB = 1 << 20, 1 << 30


def stack(layers: int = 8) -> nn.Sequential:
    """Layers of 1 MiB."""
    return nn.Sequential(*[nn.Linear(512, 512, bias=False, device=DEVICE) for _ in range(layers)])


def take(size_bytes: int) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8, device=DEVICE)


# --- readings that are late, never, or early --------------------------------------------------------------------------


@pytest.fixture
def probe(monkeypatch):
    """Makes the driver tell another figure of free bytes: ``probe(f)`` gives ``f(true figure)``; notes all readings."""
    real, readings = torch.cuda.mem_get_info, []

    def lie(change):
        def told(*arguments):
            free, total = real(*arguments)
            readings.append(free)
            return change(free), total

        monkeypatch.setattr(torch.cuda, "mem_get_info", told)
        return readings

    return lie


# case: stale-free-reading
@pytest.mark.simulation_only
@pytest.mark.parametrize("when", ["late", "never", "early"])
def test_a_reading_that_is_old_or_ahead_changes_nothing_where_our_own_books_suffice(tmp_path, probe, when):
    with vm.VRAMManager(DEVICE, "32MiB", block_bytes="1MiB", spill_dir=tmp_path, host_budget=0) as mgr:
        base = mgr.used_bytes
        mgr.budget_bytes = base + 32 * MIB
        one, two = stack(16), stack(12)
        first, second = mgr.register("one", one), mgr.register("two", two)
        at_first, _ = torch.cuda.mem_get_info()
        readings: list[int] = []
        readings = probe(
            {
                "late": lambda free: at_first if len(readings) <= 3 else free,
                "never": lambda _free: at_first,
                "early": lambda free: free + 16 * MIB,
            }[when]
        )
        first.evict()
        assert mgr.make_room(20 * MIB) == 0  # 4 were free, 16 left
        kept = take(20 * MIB)
        assert mgr.used_bytes == base + 32 * MIB
        assert second.state == "device"
        more = take(3 * MIB)
        assert second.device_bytes == 9 * MIB
        assert mgr.peak_bytes <= mgr.budget_bytes
        assert len(readings) < 30
    del kept, more


# case: stale-free-reading
@pytest.mark.simulation_only
def test_memory_that_others_take_as_soon_as_it_is_free_ends_in_a_clear_error_after_a_few_tries(
    tmp_path, probe, monkeypatch
):
    evict, evictions = TorchModel.evict, []

    def robbed(self, *arguments, **options):
        freed = evict(self, *arguments, **options)
        evictions.append(freed[0])
        torch.cuda.empty_cache()
        _, total = torch.cuda.mem_get_info()
        simulated.set_foreign(total - torch.cuda.memory_reserved())
        return freed

    with vm.VRAMManager(DEVICE, "1GiB", block_bytes="1MiB", spill_dir=tmp_path, host_budget=0) as mgr:
        handle = mgr.register("model", model := stack(16))
        expected = [p.detach().cpu().clone() for p in model.parameters()]
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        simulated.set_foreign(free)
        monkeypatch.setattr(TorchModel, "evict", robbed)
        readings = probe(lambda free: free)
        with pytest.raises(torch.OutOfMemoryError) as raised:
            take(4 * MIB)
        assert len(str(raised.value).splitlines()) == 4
        assert "other processes" in str(raised.value)
        assert mgr.last_error.needed_bytes == 4 * MIB
        assert evictions
        assert len(evictions) + len(readings) < 100
        simulated.set_foreign(0)
        handle.load()
        assert all(same_values(p.detach(), e) for p, e in zip(model.parameters(), expected, strict=True))


# case: stale-free-reading
@pytest.mark.simulation_only
@pytest.mark.parametrize("mib", [8, 30, 200])
def test_a_reading_that_promises_more_than_there_is_makes_models_leave_once_the_device_refuses(tmp_path, probe, mib):
    with vm.VRAMManager(DEVICE, "1GiB", block_bytes="1MiB", spill_dir=tmp_path, host_budget=0) as mgr:
        handle = mgr.register("model", model := stack(16))
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        simulated.set_capacity(total - free + 4 * MIB)
        probe(lambda free: free + mib * MIB)
        kept = take(12 * MIB)
        assert kept.numel() == 12 * MIB
        assert handle.device_bytes < 16 * MIB
        assert mgr.used_bytes <= mgr.budget_bytes
        del kept  # or there is no room to hand the model back
    del model


# case: stale-free-reading
@pytest.mark.simulation_only
def test_a_model_is_handed_back_in_ram_where_the_device_refuses_what_the_books_allow(mgr, probe):
    model = stack(16)
    expected = [p.detach().cpu().clone() for p in model.parameters()]
    handle = mgr.register("model", model)
    mgr.budget_bytes = mgr.used_bytes
    kept = take(12 * MIB)
    assert handle.state == "partial"
    mgr.budget_bytes = "1GiB"
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    simulated.set_capacity(total - free + 4 * MIB)
    probe(lambda free: free + 30 * MIB)
    try:
        handle.forget()
        assert {p.device.type for p in model.parameters()} == {"cpu"}
        assert all(same_values(p.detach(), e) for p, e in zip(model.parameters(), expected, strict=True))
    finally:
        simulated.set_capacity(2 * GIB)
        del kept


# --- a shared card of declared sizes ----------------------------------------------------------------------------------


class Backend:
    """An engine whose memory the driver may still count after it was unloaded."""

    def __init__(self, card: FakeDevice | None = None, still_held_bytes: int = 0) -> None:
        self.card, self.still_held_bytes = card, still_held_bytes
        self.loads: list[str] = []
        self.unloads: list[str] = []

    async def load(self, model_id: str) -> None:
        self.loads.append(model_id)

    async def unload(self, model_id: str) -> None:
        self.unloads.append(model_id)
        if self.card is not None:
            self.card.foreign_bytes += self.still_held_bytes


@pytest.fixture
def card(monkeypatch):
    """A card of 100 GiB, of which others hold 70."""
    made = FakeDevice(100 * GIB, foreign_bytes=70 * GIB)
    monkeypatch.setattr(vram_manager, "LedgerDevice", lambda capacity_bytes: made)
    return made


@pytest.fixture
def on_card(card):
    with vm.VRAMManager(total_vram_gb=100) as manager:
        yield manager


def load(mgr: vm.VRAMManager, name: str, gb: float, backend: Backend, **options: object) -> vm.Handle:
    return asyncio.run(mgr.load_model(name, vram_gb=gb, backend=backend, **options))


# case: other-process
@pytest.mark.cpu_only("no device")
def test_room_is_what_the_card_has_left_and_nobody_leaves_when_that_cannot_help(on_card, card):
    backend = Backend()
    load(on_card, "own", 10, backend)
    assert on_card.free_bytes == 20 * GIB
    with pytest.raises(vm.VRAMOutOfMemoryError, match=r"budget is 30\.0 GiB, 20\.0 GiB of it are free"):
        load(on_card, "new", 31, backend)
    assert (backend.loads, backend.unloads) == (["own"], [])
    assert len(on_card.journal) == 1  # tried once
    load(on_card, "new", 30, backend)  # with our own ten, that is all there is
    assert backend.unloads == ["own"]
    assert card.foreign_bytes == 70 * GIB


# case: other-process
@pytest.mark.cpu_only("no device")
def test_when_others_take_more_of_the_card_the_room_shrinks_at_once(on_card, card):
    backend = Backend()
    load(on_card, "own", 10, backend)
    card.foreign_bytes = 85 * GIB
    with pytest.raises(vm.VRAMOutOfMemoryError):
        load(on_card, "new", 16, backend)
    assert not backend.unloads
    load(on_card, "new", 15, backend)
    assert backend.unloads == ["own"]


# case: other-process
@pytest.mark.cpu_only("no device")
def test_under_auto_the_memory_that_others_give_up_can_be_had_and_what_they_hold_is_told(on_card, card):
    on_card.budget_bytes = "auto"
    backend = Backend()
    load(on_card, "own", 10, backend)
    with pytest.raises(vm.VRAMOutOfMemoryError, match=r"other processes 70\.0 GiB"):
        load(on_card, "new", 50, backend)
    card.foreign_bytes = 40 * GIB
    load(on_card, "new", 50, backend)
    assert not backend.unloads


# case: other-process
@pytest.mark.simulation_only
def test_a_budget_of_ours_is_bounded_by_the_device_and_the_error_tells_how_much_is_others(mgr):
    pinned = mgr.register("pinned", model := stack(10), pin=True)
    idle = mgr.register("idle", other := stack(10))
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    simulated.set_foreign(free - 20 * MIB)
    for _ in range(3):  # no number of attempts makes anybody leave in vain
        with pytest.raises(torch.OutOfMemoryError) as raised:
            take(31 * MIB)
        assert f"other processes {format_size(free - 20 * MIB)}" in str(raised.value)
        assert (pinned.device_bytes, idle.device_bytes) == (10 * MIB, 10 * MIB)
    assert take(28 * MIB).numel() == 28 * MIB
    assert pinned.device_bytes == 10 * MIB
    del model, other


# case: stale-free-reading
@pytest.mark.cpu_only("no device")
def test_an_engine_whose_memory_is_not_free_yet_gives_no_room(on_card, card):
    card.foreign_bytes = 0
    on_card.budget_bytes = "auto"
    load(on_card, "old", 40, Backend(card, still_held_bytes=40 * GIB))
    backend = Backend()
    with pytest.raises(vm.VRAMOutOfMemoryError):
        load(on_card, "new", 80, backend)
    assert not backend.loads


# --- fragments --------------------------------------------------------------------------------------------------------


# case: fragmentation
@pytest.mark.simulation_only
def test_the_allocators_cache_goes_first_then_the_lowest_tier_and_then_more(mgr):
    low, high = stack(8), stack(8)
    one = mgr.register("low", low, tier="llm")
    two = mgr.register("high", high, tier="asr")
    torch.cuda.empty_cache()
    scattered = [take(MIB) for _ in range(16)]
    free, total = torch.cuda.mem_get_info()
    simulated.set_capacity(total - free)
    scattered.clear()  # sixteen blocks of 1 MiB are free now, and none of them is large enough
    assert torch.cuda.memory_reserved() - torch.cuda.memory_allocated() == 16 * MIB
    kept = [take(16 * MIB)]
    assert (one.device_bytes, two.device_bytes) == (8 * MIB, 8 * MIB)
    kept.append(take(4 * MIB))
    assert one.device_bytes < 8 * MIB
    assert two.device_bytes == 8 * MIB
    kept.append(take(6 * MIB))
    assert one.device_bytes == 0
    assert two.device_bytes < 8 * MIB
    del kept


# case: fragmentation
@pytest.mark.simulation_only
def test_the_doctor_tells_used_kept_and_scattered_memory_apart(notebook, monkeypatch):
    real = torch.accelerator.memory_stats
    notebook.run("x = torch.ones(2**20, device=DEVICE)\ny = torch.ones(2**20, device=DEVICE); del y")
    scattered = {"inactive_split_bytes.all.current": 3 * MIB}
    monkeypatch.setattr(torch.accelerator, "memory_stats", lambda *arguments: dict(real(*arguments)) | scattered)
    cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    assert cached > 3 * MIB
    rows = [line.strip() for line in notebook.run("%vram doctor").splitlines()]
    assert any(row.startswith("4.0 MiB  x") for row in rows)
    assert any(row.startswith(f"{format_size(cached)}  torch's cache, 3.0 MiB of it in gaps between") for row in rows)


# case: fragmentation
@pytest.mark.simulation_only
@pytest.mark.simulation_only
def test_the_largest_piece_of_the_cache_is_told_apart_from_its_sum(notebook, monkeypatch):
    notebook.run("x = torch.ones(4 << 20, device=DEVICE); del x")
    pieces = [
        {"state": state, "size": mib * MIB}
        for state, mib in (("inactive", 3), ("active_allocated", 9), ("inactive", 5))
    ]
    segments = [{"device": 0, "blocks": pieces}, {"device": 1, "blocks": [{"state": "inactive", "size": 7 * MIB}]}]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments, raising=False)
    assert "torch's cache, its largest piece 5.0 MiB" in notebook.run("%vram doctor")


# --- a driver that never says no --------------------------------------------------------------------------------------


# case: sysmem-fallback
@pytest.mark.parametrize("budget", ["explicit", "auto"])
def test_where_the_device_never_refuses_the_budget_is_kept_all_the_same(tmp_path, monkeypatch, budget):
    options = {"block_bytes": "1MiB", "spill_dir": tmp_path, "host_budget": 0}
    there, opened = 512 * MIB, []  # what the driver or the system tells; it gives as much as anybody asks for

    def left() -> int:
        used = torch.cuda.memory_reserved() if DEVICE == "cuda" else opened[-1].used_bytes if opened else 0
        return max(there - used, 0)

    if budget == "auto" and DEVICE == "cuda":
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (left(), there))
    elif budget == "auto":
        monkeypatch.setattr("vram_magic.devices.cpu.available_ram_bytes", left)
        monkeypatch.setattr("vram_magic.devices.cpu.ram_reserve_bytes", lambda: 0)
    if DEVICE == "cuda":
        torch.cuda.reset_accumulated_memory_stats()
    with vm.VRAMManager(DEVICE, "auto" if budget == "auto" else "48MiB", **options) as mgr:
        opened.append(mgr)
        if budget == "explicit":
            mgr.budget_bytes = mgr.used_bytes + 48 * MIB
        handle = mgr.register("idle", model := stack(32))
        mgr.make_room(0)
        limit, kept = mgr.budget_bytes, []
        mgr.reset_peak()
        with contextlib.suppress(torch.OutOfMemoryError):
            while mgr.used_bytes <= limit:
                kept.append(take(MIB))
        assert handle.device_bytes == 0  # all of it left, one by one, and only then it was refused
        assert mgr.peak_bytes <= limit
        assert mgr.free_bytes < MIB
        if DEVICE == "cuda":
            assert torch.cuda.memory_stats()["num_ooms"] == 0  # the device was never asked in vain
        kept.clear()
        handle.load()
        assert handle.state == "device"
    del model


# case: sysmem-fallback
def test_what_just_fits_is_not_refused_beforehand(mgr):
    handle = mgr.register("model", model := stack(16))
    handle.evict()
    mgr.budget_bytes = mgr.used_bytes + handle.total_bytes
    handle.load()
    assert (handle.state, mgr.free_bytes) == ("device", 0)
    del model
