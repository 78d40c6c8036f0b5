"""Outside engines behind a ledger of declared sizes.

Without these the ledger could drift from what the engines hold: after a failed, doubled or cancelled load a gigabyte
that is taken counts as free, and nobody sees it until an engine runs out of memory in the middle of its work.
"""

from __future__ import annotations

import _thread
import asyncio
import copy
import pickle
import random
import sys
import threading
import time

import pytest
import torch

import vram_magic as vm

pytestmark = [pytest.mark.timeout(180), pytest.mark.cpu_only("no device")]

GiB = 2**30


class Engines:
    """An async backend that records, and counts what it holds: from the start of a load to the end of an unload."""

    def __init__(self, sizes: dict[str, float] | None = None, capacity: float = float("inf")) -> None:
        self.sizes = sizes or {}
        self.capacity = capacity
        self.held: set[str] = set()
        self.busy: list[str] = []
        self.highest = 0.0
        self.loads: list[str] = []
        self.unloads: list[str] = []
        self.threads: set[str] = set()

    async def load(self, model_id: str) -> None:
        self.loads.append(model_id)
        self.threads.add(threading.current_thread().name)
        self.busy.append(model_id)
        self.highest = max(self.highest, sum(self.sizes.get(name, 0) for name in [*self.held, *self.busy]))
        try:
            await self.loading(model_id)
            assert model_id not in self.held, f"{model_id} was loaded twice"
            self.held.add(model_id)
        finally:
            self.busy.remove(model_id)

    async def unload(self, model_id: str) -> None:
        self.unloads.append(model_id)
        self.threads.add(threading.current_thread().name)
        await self.unloading(model_id)
        self.held.remove(model_id)

    async def loading(self, model_id: str) -> None:
        """For tests to override."""

    async def unloading(self, model_id: str) -> None:
        """For tests to override."""


class Slow(Engines):
    """Loads that wait until they are let go."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go = threading.Event(), threading.Event()

    async def loading(self, model_id: str) -> None:
        self.begun.set()
        while not self.go.is_set():  # noqa: ASYNC110  set from another loop
            await asyncio.sleep(0.002)


class Broken(Engines):
    """Raises while the verb is in ``broken``."""

    def __init__(self, *broken: str) -> None:
        super().__init__()
        self.broken = set(broken)

    async def loading(self, model_id: str) -> None:
        if "load" in self.broken:
            raise ConnectionError("the engine does not answer")

    async def unloading(self, model_id: str) -> None:
        if "unload" in self.broken:
            raise ConnectionError("the engine does not answer")


@pytest.fixture
def mgr():
    manager = vm.VRAMManager(total_vram_gb=16.0)
    yield manager
    manager.close()


async def load(mgr, tier, gb, backend, name=None, **more):
    return await mgr.load_model(name or tier, model_type=tier, vram_gb=gb, backend=backend, **more)


async def load_all(mgr, backend, models):
    for tier, gb in models.items():
        await load(mgr, tier, gb, backend, f"old {tier}")


def loaded(mgr):
    return set(mgr.get_loaded_models())


async def until(condition):
    while not condition():  # the watchdog of the test bounds it  # noqa: ASYNC110  set from another loop
        await asyncio.sleep(0.002)


def in_threads(*jobs):
    """Runs the jobs together; returns what each gave or raised."""
    results = [None] * len(jobs)

    def run(place, job):
        try:
            results[place] = job()
        except BaseException as error:
            results[place] = error

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in enumerate(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.fixture
def restless():
    """Threads change places as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


# ------------------------------------------------------------------------------------------------------ the table


@pytest.mark.parametrize(
    ("there", "tier", "gb", "leave", "free"),
    [
        ({}, "llm", 4, [], 12),  # 16 - 4
        ({"asr": 4}, "llm", 4, [], 8),  # 16 - 4 - 4
        ({"asr": 4, "tts": 2, "llm": 4}, "llm", 9, ["llm"], 1),  # 16 - 4 - 2 - 9
        ({"asr": 4, "tts": 2, "llm": 4}, "llm", 12, ["llm", "tts"], 0),  # 16 - 4 - 12
        ({"asr": 4, "tts": 2, "llm": 4}, "llm", 13, ["llm", "tts", "asr"], 3),  # 16 - 13
        ({"llm": 13}, "asr", 4, ["llm"], 12),  # 16 - 4
        ({"asr": 4, "llm": 11}, "tts", 2, ["llm"], 10),  # 16 - 4 - 2
        ({"asr": 12}, "tts", 6, ["asr"], 10),  # 16 - 6
    ],
)
def test_engines_leave_in_the_order_of_their_tiers_and_only_as_many_as_needed(mgr, there, tier, gb, leave, free):
    backend = Engines()

    async def scene():
        await load_all(mgr, backend, there)
        return await load(mgr, tier, gb, backend, "new")

    handle = asyncio.run(scene())
    assert backend.unloads == [f"old {left}" for left in leave]
    assert loaded(mgr) == backend.held == {"new", *(f"old {t}" for t in there if t not in leave)}
    assert mgr.available_vram_gb == free
    assert (handle.state, handle.total_bytes, handle.device_bytes) == ("device", gb * GiB, gb * GiB)


@pytest.mark.parametrize("there", [{}, {"llm": 4}, {"asr": 4, "tts": 2, "llm": 4}, {"llm": 16}])
def test_what_can_never_fit_is_refused_and_nobody_leaves(mgr, there):
    backend = Engines()
    before = 16 - sum(there.values())

    async def scene():
        await load_all(mgr, backend, there)
        await load(mgr, "llm", 17, backend, "giant")

    with pytest.raises(vm.VRAMOutOfMemoryError) as refused:
        asyncio.run(scene())
    error = refused.value
    assert (error.needed_bytes, error.free_bytes, error.budget_bytes) == (17 * GiB, before * GiB, 16 * GiB)
    assert error.holders == {f"old {tier}": gb * GiB for tier, gb in there.items()}
    assert str(error).count("\n") == 3  # four parts
    assert "giant" in str(error)
    assert backend.unloads == []
    assert loaded(mgr) == {f"old {tier}" for tier in there}
    assert "giant" not in mgr
    assert str(mgr.last_error) == str(error)


def test_the_same_engine_again_loads_once(mgr):
    backend = Engines()

    async def scene():
        first = await load(mgr, "llm", 4, backend)
        again = await load(mgr, "llm", 4, backend)
        return first.name, again.name

    assert asyncio.run(scene()) == ("llm", "llm")
    assert backend.loads == ["llm"]
    assert mgr.available_vram_gb == 12  # 16 - 4


def test_the_same_engine_twice_at_once_loads_once(mgr):
    backend = Slow()

    async def scene():
        both = [asyncio.create_task(load(mgr, "llm", 4, backend)) for _ in range(2)]
        await until(backend.begun.is_set)
        backend.go.set()
        await asyncio.gather(*both)

    asyncio.run(scene())
    assert backend.loads == ["llm"]
    assert mgr.available_vram_gb == 12


def test_a_load_that_raises_leaves_the_new_engine_absent(mgr):
    good, bad = Engines(), Broken("load")

    async def scene():
        await load(mgr, "tts", 2, good)
        await load(mgr, "llm", 12, good, "old llm")
        with pytest.raises(ConnectionError, match="does not answer"):
            await load(mgr, "llm", 13, bad, "new")
        held = sum({"tts": 2, "old llm": 12}[name] for name in good.held)
        assert "new" not in mgr
        assert loaded(mgr) == good.held
        assert mgr.available_vram_gb == 16 - held
        bad.broken.clear()
        await load(mgr, "llm", 13, bad, "new")

    asyncio.run(scene())
    assert loaded(mgr) == good.held | bad.held == {"tts", "new"}
    assert mgr.available_vram_gb == 1  # 16 - 2 - 13


def test_an_unload_that_raises_counts_nothing_free(mgr):
    good, stuck = Engines(), Broken("unload")

    async def scene():
        await load(mgr, "llm", 12, stuck, "old")
        with pytest.raises(ConnectionError, match="does not answer"):
            await load(mgr, "llm", 13, good, "new")
        assert (good.loads, loaded(mgr), mgr.available_vram_gb) == ([], {"old"}, 4)  # 16 - 12
        assert "new" not in mgr
        with pytest.raises(ConnectionError):
            await mgr.unload_model("old")
        assert (loaded(mgr), mgr.available_vram_gb) == ({"old"}, 4)
        stuck.broken.clear()
        await load(mgr, "llm", 13, good, "new")

    asyncio.run(scene())
    assert (loaded(mgr), stuck.held, good.held) == ({"new"}, set(), {"new"})
    assert mgr.available_vram_gb == 3  # 16 - 13


# -------------------------------------------------------------------------------------------------- cancelled loads


def test_a_load_cancelled_half_way_leaves_the_ledger_right_and_the_next_works(mgr):
    backend = Slow()

    async def scene():
        task = asyncio.create_task(load(mgr, "llm", 12, backend))
        await until(backend.begun.is_set)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (backend.held, backend.busy, loaded(mgr), mgr.available_vram_gb) == (set(), [], set(), 16)
        assert "llm" not in mgr
        backend.go.set()
        await load(mgr, "llm", 13, backend)

    asyncio.run(scene())
    assert backend.held == loaded(mgr) == {"llm"}
    assert mgr.available_vram_gb == 3


def test_a_cancelled_load_waits_for_an_engine_that_cleans_up_slowly(mgr):
    class Tidy(Slow):
        async def loading(self, model_id):
            try:
                await super().loading(model_id)
            except asyncio.CancelledError:
                await asyncio.sleep(0.1)
                raise

    backend = Tidy()

    async def scene():
        task = asyncio.create_task(load(mgr, "llm", 12, backend))
        await until(backend.begun.is_set)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert backend.busy == []  # while it cleans up, its memory is not free

    asyncio.run(scene())
    assert mgr.available_vram_gb == 16


def test_a_cancelled_load_that_completes_all_the_same_is_counted(mgr):
    class Deaf(Slow):
        async def loading(self, model_id):
            try:
                await super().loading(model_id)
            except asyncio.CancelledError:
                await asyncio.sleep(0.05)

    backend = Deaf()

    async def scene():
        task = asyncio.create_task(load(mgr, "llm", 12, backend))
        await until(backend.begun.is_set)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert backend.held == loaded(mgr) == {"llm"}
        assert mgr.available_vram_gb == 4
        await mgr.unload_model("llm")

    asyncio.run(scene())
    assert (backend.held, mgr.available_vram_gb) == (set(), 16)


@pytest.mark.parametrize("first_raises", [False, True], ids=["cancelled", "raises"])
@pytest.mark.parametrize("attempt", range(5))
def test_the_second_asker_of_an_engine_survives_the_first(mgr, first_raises, attempt):
    class FirstRaises(Slow):
        async def loading(self, model_id):
            await super().loading(model_id)
            if len(self.loads) == 1:
                raise ConnectionError("only the first time")

    backend = FirstRaises() if first_raises else Slow()

    async def scene():
        first = asyncio.create_task(load(mgr, "llm", 12, backend))
        await until(backend.begun.is_set)
        second = asyncio.create_task(load(mgr, "llm", 12, backend))
        await asyncio.sleep(0.02)  # it waits by now; if not, the test asks for less
        if first_raises:
            backend.go.set()
        else:
            first.cancel()
        with pytest.raises(ConnectionError if first_raises else asyncio.CancelledError):
            await first
        backend.go.set()
        return await second

    handle = asyncio.run(scene())
    assert backend.held == loaded(mgr) == {"llm"}
    assert handle.state == "device"
    assert mgr.available_vram_gb == 4
    assert mgr["llm"].state == "device"


def test_a_load_cancelled_while_it_waits_for_room_leaves_nothing_behind(mgr):
    backend = Slow()

    async def scene():
        first = asyncio.create_task(load(mgr, "llm", 12, backend, "first"))
        await until(backend.begun.is_set)
        second = asyncio.create_task(load(mgr, "llm", 12, backend, "second"))
        await asyncio.sleep(0.05)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        backend.go.set()
        await first

    asyncio.run(scene())
    assert backend.held == loaded(mgr) == {"first"}
    assert "second" not in mgr
    assert mgr.available_vram_gb == 4


def test_a_cancelled_entry_into_a_lease_leaves_no_lease(mgr):
    backend = Slow()

    async def scene():
        backend.go.set()
        handle = await load(mgr, "llm", 12, backend)
        await load(mgr, "llm", 12, Engines(), "other")
        backend.go.clear()
        backend.begun.clear()

        async def use():
            async with handle.lease():
                raise AssertionError("never entered")

        task = asyncio.create_task(use())
        await until(backend.begun.is_set)
        task.cancel()
        backend.go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        return handle

    assert not asyncio.run(scene()).in_use


# ------------------------------------------------------------------------------------------------- asking and telling


def test_an_unknown_id_cannot_be_unloaded(mgr):
    with pytest.raises(vm.UnknownModelError, match="nobody") as unknown:
        asyncio.run(mgr.unload_model("nobody"))
    assert isinstance(unknown.value, KeyError)


def test_unloading_frees_the_declared_size(mgr):
    backend = Engines()

    async def scene():
        await load(mgr, "llm", 4.5, backend)
        assert mgr.is_loaded("llm")
        assert mgr.available_vram_gb == 11.5  # 16 - 4.5
        await mgr.unload_model("llm")

    asyncio.run(scene())
    assert (mgr.is_loaded("llm"), mgr.is_loaded("nobody"), loaded(mgr)) == (False, False, set())
    assert (backend.held, mgr.available_vram_gb, mgr.used_bytes, mgr.free_bytes) == (set(), 16.0, 0, 16 * GiB)
    assert "llm" not in mgr


def test_loaded_engines_are_listed_by_id(mgr):
    asyncio.run(load(mgr, "tts", 2, Engines(), "voice"))
    slot = mgr.get_loaded_models()["voice"]
    assert (slot.model_id, slot.model_type, slot.vram_gb, slot.priority) == ("voice", "tts", 2.0, 1)


def test_the_rank_of_a_tier_is_known_without_a_manager():
    assert [vm.ModelSlot.priority_rank(tier) for tier in ("llm", "tts", "asr")] == [0, 1, 2]


def test_a_tier_of_the_users_own_takes_its_place(mgr):
    mgr.tiers["ocr"] = 5
    backend = Engines()

    async def scene():
        await load(mgr, "ocr", 4, backend)
        await load(mgr, "asr", 4, backend)
        await load(mgr, "llm", 12, backend)

    asyncio.run(scene())
    assert backend.unloads == ["asr"]  # rank 2 before rank 5
    assert mgr.get_loaded_models()["ocr"].priority == 5


def test_an_unknown_tier_is_refused_by_name(mgr):
    with pytest.raises(ValueError, match="mystery"):
        asyncio.run(load(mgr, "mystery", 1, Engines()))
    assert "mystery" not in mgr


def test_a_bare_priority_counts_as_a_rank(mgr):
    backend = Engines()

    async def scene():
        await load(mgr, "llm", 6, backend, "precious", priority=9)
        await load(mgr, "asr", 6, backend)
        await load(mgr, "llm", 6, backend)

    asyncio.run(scene())
    assert backend.unloads == ["asr"]
    assert mgr["precious"].priority == 9


def test_the_least_recently_used_of_a_tier_leaves_first(mgr):
    backend = Engines()

    async def scene():
        handles = {name: await load(mgr, "llm", 4, backend, name) for name in "abc"}
        with handles["a"].lease():
            pass
        await load(mgr, "llm", 6, backend, "new")  # 4 free, 2 short

    asyncio.run(scene())
    assert backend.unloads == ["b"]


def test_a_pinned_engine_never_leaves(mgr):
    backend = Engines()

    async def scene():
        await load(mgr, "llm", 4, backend, "pinned", pin=True)
        await load(mgr, "asr", 4, backend)
        await load(mgr, "asr", 12, backend, "new")
        with pytest.raises(vm.VRAMOutOfMemoryError, match=r"pinned 4.0 GiB \(pinned\)"):
            await load(mgr, "asr", 13, backend, "more")
        with pytest.raises(vm.ModelInUseError):
            await mgr.unload_model("pinned")
        with pytest.raises(vm.ModelInUseError):
            mgr["pinned"].evict()
        mgr["pinned"].unpin()
        await load(mgr, "asr", 13, backend, "more")

    asyncio.run(scene())
    assert backend.unloads == ["asr", "pinned", "new"]
    assert loaded(mgr) == {"more"}


def test_an_engine_in_use_never_leaves(mgr):
    backend = Engines()

    async def scene():
        handle = await load(mgr, "llm", 12, backend, "used")
        async with handle.lease():
            assert handle.in_use
            with pytest.raises(vm.VRAMOutOfMemoryError, match="in use"):
                await load(mgr, "llm", 12, backend, "new")
            for leave in (mgr.unload_model("used"), handle.aevict()):
                with pytest.raises(vm.ModelInUseError):
                    await leave
            assert (backend.unloads, handle.state) == ([], "device")
        assert not handle.in_use
        await load(mgr, "llm", 12, backend, "new")

    asyncio.run(scene())
    assert (backend.unloads, loaded(mgr), "new" in mgr) == (["used"], {"new"}, True)


def test_an_engine_that_left_comes_back_when_it_is_used(mgr):
    backend = Engines()

    async def scene():
        handle = await load(mgr, "llm", 12, backend, "first")
        await load(mgr, "llm", 12, backend, "second")
        assert (handle.state, mgr.is_loaded("first")) == ("disk", False)
        async with handle.lease():
            assert backend.held == {"first"}
        await handle.aload()

    asyncio.run(scene())
    assert backend.loads == ["first", "second", "first"]


def test_a_handle_can_let_its_engine_go(mgr):
    backend = Engines()

    async def scene():
        handle = await load(mgr, "llm", 12, backend)
        assert await handle.aevict() == 12 * GiB
        assert await handle.aevict() == 0
        return handle

    handle = asyncio.run(scene())
    assert (backend.held, mgr.available_vram_gb) == (set(), 16)
    handle.forget()
    assert "llm" not in mgr
    with pytest.raises(vm.UnknownModelError):
        handle.load()
    assert backend.held == set()


def test_the_same_id_with_another_size_or_engine_replaces_the_old(mgr):
    one, two = Engines(), Engines()

    async def scene():
        await load(mgr, "llm", 4, one)
        await load(mgr, "llm", 6, one)
        assert (one.unloads, one.held, mgr.available_vram_gb) == (["llm"], {"llm"}, 10)  # 16 - 6
        await load(mgr, "llm", 6, two)

    asyncio.run(scene())
    assert (one.held, two.held, loaded(mgr), mgr.available_vram_gb) == (set(), {"llm"}, {"llm"}, 10)


def test_a_replacement_that_can_never_fit_leaves_the_old_engine(mgr):
    backend = Engines()

    async def scene():
        await load(mgr, "llm", 4, backend)
        await load(mgr, "llm", 17, backend)

    with pytest.raises(vm.VRAMOutOfMemoryError):
        asyncio.run(scene())
    assert (backend.unloads, loaded(mgr), mgr.available_vram_gb) == ([], {"llm"}, 12)


def test_an_engine_in_use_is_not_replaced(mgr):
    backend = Engines()

    async def scene():
        handle = await load(mgr, "llm", 4, backend)
        async with handle.lease():
            with pytest.raises(vm.ModelInUseError):
                await load(mgr, "llm", 6, backend)

    asyncio.run(scene())
    assert (backend.unloads, mgr.available_vram_gb) == ([], 12)


@pytest.mark.parametrize("name", ["", " ", "a\nb", "x" * 201, None, 7])
def test_a_name_that_is_none_is_refused(mgr, name):
    with pytest.raises(ValueError, match="name"):
        asyncio.run(mgr.load_model(name, model_type="llm", vram_gb=1, backend=Engines()))


@pytest.mark.parametrize("size", [-1, float("nan"), float("inf"), "much"])
def test_a_size_that_is_none_is_refused(mgr, size):
    with pytest.raises((ValueError, TypeError)):
        asyncio.run(load(mgr, "llm", size, Engines()))
    assert (len(mgr.models), mgr.available_vram_gb) == (0, 16)


def test_any_number_of_ledgers_live_side_by_side(mgr):
    other = vm.VRAMManager(total_vram_gb=1)
    asyncio.run(load(other, "llm", 1, Engines()))
    assert (other.available_vram_gb, mgr.available_vram_gb) == (0, 16)
    other.close()


def test_a_ledger_holds_no_torch_models(mgr):
    with pytest.raises(vm.VRAMError, match="ledger"):
        mgr.register("model", object())


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_closing_unloads_every_engine_and_ends_the_threads():
    mgr = vm.VRAMManager(total_vram_gb=16.0)
    backend = Engines()

    async def scene():
        await load(mgr, "llm", 4, backend)
        await load(mgr, "tts", 4, backend, pin=True)

    asyncio.run(scene())
    ours = {t for t in threading.enumerate() if t.name.startswith("vram-magic")}
    mgr.close()
    mgr.close()
    assert (backend.held, mgr.used_bytes) == (set(), 0)
    with pytest.raises(vm.VRAMError, match="closed"):
        asyncio.run(load(mgr, "llm", 4, backend))
    for thread in ours & set(threading.enumerate()):
        if thread.name == "vram-magic-loop":
            thread.join()


# ------------------------------------------------------------------------------------------------ loops and threads


def test_engines_run_on_the_managers_own_loop_while_the_callers_is_blocked(mgr):
    first, second = Engines(), Engines()

    async def scene():
        handle = await load(mgr, "llm", 12, first, "first")
        await load(mgr, "llm", 12, second, "second")
        handle.load()  # sync, in a coroutine: nothing else runs on this loop until it returns
        return threading.current_thread().name

    caller = asyncio.run(scene())
    assert first.held == loaded(mgr) == {"first"}
    assert len(first.threads | second.threads) == 1
    assert caller not in first.threads | second.threads


def test_the_callers_loop_runs_on_while_an_engine_loads(mgr):
    backend = Slow()

    async def scene():
        task = asyncio.create_task(load(mgr, "llm", 12, backend))
        await until(backend.begun.is_set)
        assert not task.done()
        backend.go.set()  # only reached because the load does not block this loop
        await task

    asyncio.run(scene())


def test_plain_threads_each_with_a_loop_of_its_own_load_together(mgr, restless):
    backend = Engines({str(i): 4 for i in range(8)})
    results = in_threads(*(lambda i=i: asyncio.run(load(mgr, "llm", 4, backend, str(i))) for i in range(8)))
    assert [r for r in results if isinstance(r, BaseException)] == []
    assert backend.held == loaded(mgr)
    assert len(backend.held) == 4  # 16 / 4
    assert backend.highest <= 16


def test_a_backend_may_await_the_manager_but_not_block_its_own_loop_with_it(mgr):
    class Asking(Engines):
        async def loading(self, model_id):
            if model_id == "patient":
                await mgr.amake_room("10GiB")
            if model_id == "hasty":
                mgr.make_room("15GiB")

    backend = Asking()

    async def scene():
        await load(mgr, "llm", 8, backend, "old")
        await load(mgr, "llm", 1, backend, "patient")
        assert loaded(mgr) == {"patient"}
        with pytest.raises(vm.VRAMError, match=r"await mgr\.amake_room"):
            await load(mgr, "llm", 1, backend, "hasty")

    asyncio.run(scene())
    assert loaded(mgr) == backend.held == {"patient"}
    assert mgr.available_vram_gb == 15


def test_an_interrupted_load_is_in_the_books(mgr):
    backend = Slow()

    async def scene():
        backend.go.set()
        return await load(mgr, "llm", 12, backend)

    handle = asyncio.run(scene())
    handle.evict()
    backend.go.clear()
    backend.begun.clear()

    def interrupt():
        backend.begun.wait()
        _thread.interrupt_main()
        time.sleep(0.1)
        backend.go.set()

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        handle.load()
    thread.join()
    assert backend.held == loaded(mgr)
    assert mgr.available_vram_gb == 16 - 12 * len(backend.held)
    handle.load()
    assert backend.held == loaded(mgr) == {"llm"}


@pytest.mark.parametrize("attempt", range(10))
def test_loads_that_cannot_fit_beside_a_pinned_engine_are_refused_and_none_waits_for_another(mgr, restless, attempt):
    backend = Engines()
    asyncio.run(load(mgr, "llm", 9, backend, "pinned", pin=True))

    async def scene():
        return await asyncio.gather(*(load(mgr, "llm", 9, backend, n) for n in "abcd"), return_exceptions=True)

    results = asyncio.run(scene())
    assert [type(result) for result in results] == [vm.VRAMOutOfMemoryError] * 4
    assert loaded(mgr) == backend.held == {"pinned"}
    assert list(mgr.models) == ["pinned"]


class Restless(Engines):
    """Yields at random, and fails now and then."""

    def __init__(self, sizes, rng, failing=0.0):
        super().__init__(sizes)
        self.rng, self.failing = rng, failing

    async def loading(self, model_id):
        await self._dawdle()
        if self.rng.random() < self.failing:
            raise ConnectionError(model_id)

    async def unloading(self, model_id):
        await self._dawdle()

    async def _dawdle(self):
        for _ in range(self.rng.randrange(4)):
            await asyncio.sleep(self.rng.choice([0, 0, 0.001]))


@pytest.mark.parametrize("failing", [0.0, 0.2], ids=["sound", "failing"])
@pytest.mark.parametrize("seed", range(6))
def test_fifty_loads_at_once_never_pass_the_capacity(mgr, restless, seed, failing):
    rng = random.Random(seed)
    sizes = {f"m{i}": rng.choice([1, 2, 3, 5, 8, 12, 16]) for i in range(50)}
    backend = Restless(sizes, random.Random(seed), failing)
    outcomes: list[BaseException] = []

    async def one(name):
        await asyncio.sleep(rng.random() * 0.01)
        tier = rng.choice(["llm", "tts", "asr"])
        task = asyncio.create_task(load(mgr, tier, sizes[name], backend, name))
        if rng.random() < 0.2:
            await asyncio.sleep(0.003)
            task.cancel()
        try:
            handle = await task
            if rng.random() < 0.3:
                async with handle.lease():
                    assert name in backend.held
                    await asyncio.sleep(0)
                    assert name in backend.held
            if rng.random() < 0.4:
                await mgr.unload_model(name)
        except (asyncio.CancelledError, ConnectionError, vm.UnknownModelError, vm.VRAMOutOfMemoryError) as error:
            outcomes.append(error)

    async def scene():
        await asyncio.gather(*map(one, sizes))

    asyncio.run(scene())
    assert backend.highest <= 16
    assert backend.held == loaded(mgr)
    assert backend.busy == []
    assert mgr.available_vram_gb == 16 - sum(sizes[name] for name in backend.held)
    assert mgr.peak_bytes <= 16 * GiB
    held = sum(sizes[name] for name in backend.held)
    assert (mgr.make_room("16GiB"), backend.held) == (held * GiB, set())


# ---------------------------------------------------------------------------------------- room, budget and the journal


def test_room_can_be_made_by_hand(mgr):
    backend = Engines()
    asyncio.run(load_all(mgr, backend, {"asr": 4, "tts": 2, "llm": 4}))
    assert mgr.make_room("6GiB") == 0  # 16 - 4 - 2 - 4 are free
    assert mgr.make_room("7GiB") == 4 * GiB
    assert mgr.make_room(12 * GiB, prefer=("old asr",)) == 2 * GiB  # tts has the lower rank
    with pytest.raises(vm.VRAMOutOfMemoryError):
        mgr.make_room("17GiB")
    assert loaded(mgr) == {"old asr"}
    assert asyncio.run(mgr.amake_room("16GiB")) == 4 * GiB


def test_a_preferred_engine_leaves_first_within_its_rank(mgr):
    backend = Engines()

    async def scene():
        for name in "abc":
            await load(mgr, "llm", 5, backend, name)

    asyncio.run(scene())
    mgr.make_room("6GiB", prefer=["c"])
    assert backend.unloads == ["c"]


def test_a_plan_tells_who_would_leave_and_moves_nothing(mgr):
    backend = Engines()
    asyncio.run(load_all(mgr, backend, {"asr": 4, "tts": 2, "llm": 4}))
    plan = mgr.plan("11GiB", tier="llm")
    assert [(s.model, s.blocks, s.bytes, s.stage) for s in plan.steps] == [
        ("old llm", 1, 4 * GiB, "pass 1"),
        ("old tts", 1, 2 * GiB, "pass 2"),
    ]
    assert (plan.satisfied, plan.freed_bytes) == (True, 6 * GiB)
    assert not mgr.plan("17GiB").satisfied
    assert mgr.plan("17GiB").steps == ()
    assert backend.unloads == []


def test_reserved_room_is_kept_from_loads(mgr):
    backend = Engines()

    async def scene():
        await load(mgr, "llm", 8, backend, "old")
        async with mgr.reserve("10GiB"):
            assert backend.unloads == ["old"]
            await load(mgr, "llm", 6, backend, "small")
            with pytest.raises(vm.VRAMOutOfMemoryError):
                await load(mgr, "llm", 7, backend, "large")
        await load(mgr, "llm", 7, backend, "large")

    asyncio.run(scene())
    assert loaded(mgr) == {"small", "large"}


def test_a_reserve_that_cannot_be_met_raises_and_moves_nothing(mgr):
    backend = Engines()
    asyncio.run(load(mgr, "llm", 8, backend, pin=True))
    with pytest.raises(vm.VRAMOutOfMemoryError), mgr.reserve("9GiB"):
        raise AssertionError("never entered")
    assert mgr.available_vram_gb == 8
    assert mgr.make_room("8GiB") == 0  # nothing is held back


def test_a_reserve_inside_a_reserve_keeps_room_of_its_own(mgr):
    with mgr.reserve("10GiB"):
        with mgr.reserve("6GiB"), pytest.raises(vm.VRAMOutOfMemoryError):
            asyncio.run(load(mgr, "llm", 1, Engines()))  # 10 + 6 are spoken for
        asyncio.run(load(mgr, "llm", 6, Engines()))


def test_a_lower_budget_makes_idle_engines_leave_at_once(mgr):
    backend = Engines()
    asyncio.run(load_all(mgr, backend, {"asr": 4, "tts": 2, "llm": 4}))
    mgr.budget_bytes = "7GiB"
    assert (backend.unloads, mgr.budget_bytes, mgr.available_vram_gb) == (["old llm"], 7 * GiB, 1)  # 7 - 4 - 2
    mgr.budget_bytes = 20 * GiB
    assert (loaded(mgr), mgr.available_vram_gb) == ({"old asr", "old tts"}, 14)


def test_a_budget_that_cannot_be_lowered_stays_and_nothing_moves(mgr):
    backend = Engines()

    async def scene():
        await load_all(mgr, backend, {"asr": 4, "tts": 2})
        await load(mgr, "llm", 4, backend, pin=True)

    asyncio.run(scene())
    with pytest.raises(vm.VRAMOutOfMemoryError):
        mgr.budget_bytes = "3GiB"
    assert (backend.unloads, mgr.budget_bytes, mgr.available_vram_gb) == ([], 16 * GiB, 6)
    with pytest.raises(ValueError, match="budget"):
        mgr.budget_bytes = "much"
    assert mgr.budget_bytes == 16 * GiB


def test_a_budget_whose_engine_will_not_leave_stays(mgr):
    backend = Broken("unload")
    asyncio.run(load(mgr, "llm", 12, backend))
    with pytest.raises(ConnectionError):
        mgr.budget_bytes = "8GiB"
    assert (mgr.budget_bytes, mgr.available_vram_gb, loaded(mgr)) == (16 * GiB, 4, {"llm"})


def test_every_decision_is_in_the_journal(mgr):
    backend = Engines()

    async def scene():
        await load(mgr, "asr", 4, backend, pin=True)
        await load(mgr, "tts", 2, backend)
        await load(mgr, "llm", 4, backend, "old")
        assert len(mgr.journal) == 0  # nothing had to be decided
        await load(mgr, "llm", 11, backend, "new")  # free 6: 4 + 2 must leave, and 16 - 4 - 11 = 1 stays

    asyncio.run(scene())
    record = mgr.journal[-1]
    assert "new" in record.asked_by
    assert (record.need_bytes, record.had_bytes, record.freed_bytes) == (11 * GiB, 6 * GiB, 6 * GiB)
    assert [(s.model, s.bytes, s.stage) for s in record.left] == [
        ("old", 4 * GiB, "pass 1"),
        ("tts", 2 * GiB, "pass 2"),
    ]
    assert all(step.ms >= 0 for step in record.left)
    assert dict(record.spared) == {"asr": "pinned"}
    assert record.reason


def test_a_refusal_is_in_the_journal_and_says_who_was_spared(mgr):
    backend = Engines()

    async def scene():
        await load(mgr, "asr", 8, backend, pin=True)
        await load(mgr, "llm", 4, backend)
        with pytest.raises(vm.VRAMOutOfMemoryError):
            await load(mgr, "llm", 9, backend, "new")

    asyncio.run(scene())
    record = mgr.journal[-1]
    assert (record.left, record.freed_bytes, record.need_bytes) == ((), 0, 9 * GiB)
    assert dict(record.spared)["asr"] == "pinned"
    assert "llm" in dict(record.spared)
    assert "not enough" in record.reason


def test_an_unload_that_failed_is_in_the_journal(mgr):
    async def scene():
        await load(mgr, "llm", 12, Broken("unload"), "old")
        with pytest.raises(ConnectionError):
            await load(mgr, "llm", 12, Engines(), "new")

    asyncio.run(scene())
    record = mgr.journal[-1]
    assert (record.left, record.freed_bytes) == ((), 0)
    assert "does not answer" in record.reason


def test_the_journal_replays_to_the_plans_it_recorded(mgr, tmp_path):
    backend = Engines()

    async def scene():
        await load_all(mgr, backend, {"asr": 4, "tts": 2, "llm": 4})
        await load(mgr, "llm", 9, backend, "new")
        with pytest.raises(vm.VRAMOutOfMemoryError):
            await load(mgr, "llm", 17, backend, "giant")
        await load(mgr, "asr", 6, backend, "last")

    asyncio.run(scene())
    mgr.make_room("8GiB")
    mgr["last"].pin()
    mgr.budget_bytes = "8GiB"
    with pytest.raises(vm.VRAMOutOfMemoryError):
        mgr.budget_bytes = "4GiB"
    mgr["last"].unpin()
    mgr.budget_bytes = "4GiB"
    mgr.journal.to_jsonl(tmp_path / "journal.jsonl")
    recorded = [record.plan for record in mgr.journal if record.snapshot]
    assert vm.Journal.replay(tmp_path / "journal.jsonl") == recorded
    assert len(recorded) >= 4


# ------------------------------------------------------------------------------------------- what backends may raise


def test_an_engine_that_runs_out_of_memory_itself_is_asked_once_and_takes_nobodys_place(mgr):
    async def scene():
        class Greedy(Engines):
            async def loading(self, model_id: str) -> None:
                self.tries = getattr(self, "tries", 0) + 1
                raise torch.OutOfMemoryError("the engine's own")

        idle, greedy = Engines(), Greedy()
        for number in range(6):
            await load(mgr, "llm", 1.0, idle, f"idle {number}")
        with pytest.raises(torch.OutOfMemoryError, match="the engine's own"):
            await load(mgr, "llm", 9.0, greedy, "new")
        assert greedy.tries == 1
        assert loaded(mgr) == {f"idle {number}" for number in range(6)}

    asyncio.run(scene())


def test_an_engine_that_will_not_leave_does_not_keep_others_from_leaving(mgr):
    async def scene():
        stuck, idle = Broken("unload"), Engines()
        await load(mgr, "llm", 6.0, stuck, "stuck")
        await load(mgr, "llm", 6.0, idle, "idle")
        await load(mgr, "llm", 6.0, idle, "new")
        assert loaded(mgr) == {"stuck", "new"}
        with pytest.raises(ConnectionError):
            await load(mgr, "llm", 12.0, idle, "too large beside it")
        assert "stuck" in loaded(mgr)

    asyncio.run(scene())


def test_an_engine_of_no_bytes_is_loaded_too(mgr):
    async def scene():
        backend = Engines()
        await load(mgr, "llm", 0, backend, "remote")
        assert backend.held == {"remote"}
        assert mgr.is_loaded("remote")
        await mgr.unload_model("remote")
        assert not backend.held

    asyncio.run(scene())


def test_the_error_can_be_copied_and_sent_to_another_process(mgr):
    with pytest.raises(vm.VRAMOutOfMemoryError) as raised:
        mgr.make_room("17GiB")
    for error in (copy.copy(raised.value), pickle.loads(pickle.dumps(raised.value))):
        assert str(error) == str(raised.value)
        assert (error.needed_bytes, error.holders) == (17 << 30, raised.value.holders)
