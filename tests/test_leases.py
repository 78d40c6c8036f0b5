"""Uses in progress: who holds a lease, for how long, and who waits for whom.

Without these a model could leave in the middle of its call, a forgotten lease could keep it for ever, or two threads
could wait for each other until somebody kills the kernel.

One unit is a layer of 1 MiB, and one block. The device has room for 6 units.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import threading
import time

import pytest
import torch
from place import DEVICE

import vram_magic as vm

pytestmark = pytest.mark.timeout(180)

UNIT = 2**20
SLACK = UNIT // 2  # inputs and results of the calls; less than a block
X = torch.linspace(-1, 1, 512, device=DEVICE)[None]


class Stack(torch.nn.Module):
    """Layers of one unit each, and several ways to go through them."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(512, 512, bias=False, device=DEVICE) for _ in range(units))
        self.between = None  # called in the middle of a forward

    def forward(self, x):
        for place, layer in enumerate(self.layers):
            if place == 1 and self.between is not None:
                self.between()
            x = layer(x)
        return x

    def stream(self, x):
        for layer in self.layers:
            x = layer(x)
            yield x

    async def answer(self, x):
        for layer in self.layers:
            x = layer(x)
            await asyncio.sleep(0)
        return x

    async def astream(self, x):
        for layer in self.layers:
            x = layer(x)
            yield x


@pytest.fixture
def mgr(tmp_path):
    gc.collect()
    manager = vm.VRAMManager(device=DEVICE, budget="1GiB", block_bytes=UNIT, spill_dir=tmp_path / "spill")
    manager.budget_bytes = manager.used_bytes + 6 * UNIT + SLACK
    with torch.no_grad():
        yield manager
    manager.close()


@pytest.fixture
def restless():
    """Threads change places as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def make(mgr):
    """Builds and registers a model of so many units, resident as far as it fits beside the others."""
    kept = {}

    def made(name, units, tier="llm", **more):
        kept[name] = Stack(units)
        return mgr.register(name, kept[name], tier=tier, **more)

    yield made
    kept.clear()


def units(handle):
    return handle.device_bytes // UNIT


def of(size_bytes):
    return torch.empty(size_bytes, dtype=torch.uint8, device=DEVICE)


def result_of(handle):
    return handle.model(X).tolist()


def started(job):
    """A thread that runs the job; ``outcome()`` waits for what it gave or raised."""
    results = []

    def run():
        try:
            with torch.no_grad():
                results.append(job())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def outcome():
        thread.join()
        return results[0]

    outcome.running = thread.is_alive
    return outcome


def wait_for_a_waiter(mgr):
    while not mgr._core.registry._waiting:
        time.sleep(0.002)


class Gate:
    """Two events: a call that is inside says so, and goes on when it may."""

    def __init__(self):
        self.inside, self.go = threading.Event(), threading.Event()

    def __call__(self):
        self.inside.set()
        self.go.wait()


# --------------------------------------------------------------------------------------------------- never taken


def test_a_leased_model_is_never_taken(mgr, make):
    leased, idle = make("leased", 4), make("idle", 2)
    with leased.lease() as model:
        assert model is leased.model
        assert (leased.in_use, idle.in_use) == (True, False)
        assert started(lambda: mgr.make_room(2 * UNIT))() == 2 * UNIT  # only the idle one gives
        refused = started(lambda: mgr.make_room(3 * UNIT))()
        assert isinstance(refused, vm.VRAMOutOfMemoryError)
        assert "leased 4.0 MiB (in use)" in str(refused)
        assert isinstance(started(lambda: of(3 * UNIT))(), torch.OutOfMemoryError)
        assert units(leased) == 4
    assert not leased.in_use
    assert mgr.make_room(6 * UNIT) == 4 * UNIT


def test_a_model_is_never_taken_while_a_call_of_it_runs(mgr, make):
    model, other = make("model", 4), make("other", 2)
    right = result_of(model)
    other.evict()
    gate = model.model.between = Gate()
    call = started(lambda: result_of(model))
    gate.inside.wait()
    assert model.in_use
    assert isinstance(started(lambda: mgr.make_room(5 * UNIT))(), vm.VRAMOutOfMemoryError)
    assert "in use" in model.why()
    assert units(model) == 4
    gate.go.set()
    assert call() == right
    assert not model.in_use


def test_a_call_that_lacks_room_waits_for_the_call_that_has_it(mgr, make):
    one = make("one", 4)
    one_right = result_of(one)
    two = make("two", 4)  # two blocks of the first left for it
    two_right = result_of(two)
    gate = one.model.between = Gate()
    first = started(lambda: result_of(one))
    gate.inside.wait()
    second = started(lambda: result_of(two))
    wait_for_a_waiter(mgr)
    assert second.running()
    gate.go.set()
    assert first() == one_right
    assert second() == two_right


def test_leased_and_pinned_models_cannot_be_evicted_by_hand(mgr, make):
    handle = make("model", 2)
    with handle.lease(), pytest.raises(vm.ModelInUseError, match="in use") as refused:
        handle.evict()
    assert isinstance(refused.value, RuntimeError)
    assert len(str(refused.value).splitlines()) == 4
    handle.pin()
    with pytest.raises(vm.ModelInUseError, match="%vram unpin model"):
        handle.evict()
    assert units(handle) == 2
    handle.unpin()
    assert handle.evict() == 2 * UNIT


def test_a_budget_is_not_lowered_below_what_is_leased(mgr, make):
    leased, idle = make("leased", 3), make("idle", 2)
    before = mgr.budget_bytes
    with leased.lease():
        with pytest.raises(vm.VRAMOutOfMemoryError) as refused:
            mgr.budget_bytes = before - 4 * UNIT  # 6 - 4 < 3
        assert refused.value.budget_bytes == before
        assert (mgr.budget_bytes, units(leased), units(idle)) == (before, 3, 2)
        mgr.budget_bytes = before - 2 * UNIT  # 6 - 2 - 3 = 1
        assert (units(leased), units(idle)) == (3, 1)
    mgr.budget_bytes = before - 4 * UNIT
    assert units(leased) + units(idle) == 2


def test_leases_count_and_end_in_any_order(mgr, make):
    one, two, seen = make("one", 2), make("two", 2), []
    first, second, third = one.lease(), one.lease(), two.lease()
    for lease in (first, second, third):
        lease.__enter__()
    first.__exit__(None, None, None)
    assert one.in_use
    second.__exit__(None, None, None)
    assert (one.in_use, two.in_use) == (False, True)
    third.__exit__(None, None, None)
    assert not two.in_use
    one.evict()
    one.model.between = lambda: seen.append(one.in_use)
    result_of(one)
    assert (seen, units(one)) == ([True], 2)  # the calls after them hold leases of their own


def test_a_lease_may_end_in_another_thread(mgr, make):
    handle = make("model", 2)
    lease = handle.lease()
    lease.__enter__()
    started(lambda: lease.__exit__(None, None, None))()
    assert not handle.in_use
    handle.evict()
    result_of(handle)
    assert units(handle) == 2


def test_a_lease_ends_when_its_body_raises(mgr, make):
    handle = make("model", 2)
    with pytest.raises(ZeroDivisionError), handle.lease():
        raise ZeroDivisionError
    handle.model.between = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        handle.model(X)
    assert not handle.in_use


def test_a_lease_that_cannot_be_had_leaves_nothing_behind(mgr, make):
    pinned, handle = make("pinned", 4, pin=True), make("model", 2)
    handle.evict()
    filler = of(UNIT)  # 6 - 4 - 1 = 1
    with pytest.raises(vm.VRAMOutOfMemoryError, match="pinned"):
        handle.model(X)
    assert (handle.in_use, units(handle), units(pinned)) == (False, 0, 4)
    del filler
    assert len(result_of(handle)) == 1


def test_a_lease_on_a_forgotten_model_is_refused(mgr, make):
    handle = make("model", 2)
    model = handle.model
    handle.forget()
    for ask in (handle.lease, handle.load, handle.evict):
        with pytest.raises(vm.UnknownModelError, match="model"):
            ask()
    assert len(model(X)) == 1


# ------------------------------------------------------------------------------------------------------ threads


def test_a_thread_whose_wait_is_over_but_has_not_woken_up_is_hope(mgr):
    registry, other = mgr._core.registry, threading.get_ident() + 1
    registry._waiting[other] = list  # it waits for nobody any more
    try:
        assert registry._hope(lambda: [other])
        registry._waiting[other] = lambda: [threading.get_ident()]
        assert not registry._hope(lambda: [other])
    finally:
        del registry._waiting[other]


def test_a_mark_that_is_given_up_is_worth_a_second_try_to_others_and_not_to_oneself(mgr, make):
    handle, registry = make("one", 4), mgr._core.registry
    model, before = handle._managed, registry.changes
    with registry.moving(model, "loading"):
        assert not registry._wait_for_others(model, registry.changes)
        assert registry.changes == before + 1


def test_two_threads_that_call_two_models_in_turn_with_room_for_one_never_hang(mgr, make, restless):
    one, two, third = make("one", 4), make("two", 4), Stack(1)
    right = {"one": result_of(one), "two": result_of(two)}
    start = threading.Barrier(3)
    stop = threading.Event()

    def alternate(first, second):
        start.wait()
        for turn in range(200):
            handle = first if turn % 2 else second
            assert result_of(handle) == right[handle.name], turn
        return "done"

    def come_and_go():
        start.wait()
        while not stop.is_set():
            mgr.register("third", third).forget()
        return "done"

    restless_one = started(come_and_go)
    calls = [started(lambda: alternate(one, two)), started(lambda: alternate(two, one))]
    try:
        assert [call() for call in calls] == ["done", "done"]
    finally:
        stop.set()
    assert restless_one() == "done"
    assert (one.in_use, two.in_use) == (False, False)
    assert mgr.peak_bytes <= mgr.budget_bytes
    assert sorted(mgr.models) == ["one", "two"]


def test_many_threads_and_askers_of_figures_never_hang(mgr, make, restless):
    handles = [make(name, 2) for name in "abcde"]  # 10 units for 6
    right = {handle.name: result_of(handle) for handle in handles}
    stop = threading.Event()

    def call(seed):
        for turn in range(40):
            handle = handles[(seed * 3 + turn * 2) % 5]
            assert result_of(handle) == right[handle.name]
            if turn % 8 == 0:
                with contextlib.suppress(vm.ModelInUseError):
                    handles[(seed + turn) % 5].evict()
        return "done"

    def look():
        while not stop.is_set():
            assert [h.state in ("device", "partial", "host", "disk") for h in handles] == [True] * 5
            assert all(h.device_bytes <= h.total_bytes for h in handles)
            mgr.plan(UNIT)
        return "done"

    looking = started(look)
    calls = [started(lambda seed=seed: call(seed)) for seed in range(4)]
    try:
        assert [outcome() for outcome in calls] == ["done"] * 4
    finally:
        stop.set()
    assert looking() == "done"
    assert mgr.peak_bytes <= mgr.budget_bytes


@pytest.mark.parametrize("attempt", range(5))
def test_two_threads_that_each_hold_what_the_other_needs_do_not_hang(mgr, make, restless, attempt):
    one, two = make("one", 3), make("two", 3)
    rest = [make("rest of one", 3), make("rest of two", 3)]
    one.load()
    two.load()
    both = threading.Barrier(2)

    def hold_and_ask(held, wanted):
        with held.lease():
            both.wait()
            return result_of(wanted)

    outcomes = [started(lambda: hold_and_ask(one, rest[0])), started(lambda: hold_and_ask(two, rest[1]))]
    results = [outcome() for outcome in outcomes]
    failed = [result for result in results if isinstance(result, BaseException)]
    assert {type(error) for error in failed} == {vm.VRAMOutOfMemoryError}
    assert len(failed) == 1  # the other one gets the room when the first has given up
    assert not any(handle.in_use for handle in (one, two, *rest))
    for handle in (one, two, *rest):
        result_of(handle)


def test_two_loads_that_can_never_fit_do_not_wake_each_other_for_ever(mgr, make, restless):
    one, two = make("one", 3), make("two", 3)
    one.load()
    two.load()
    others = [of(2 * UNIT)]
    mgr._core.registry.touch(one._managed)  # now the other one gives
    others.append(of(2 * UNIT))
    assert (units(one), units(two)) == (1, 1)  # each lacks 2 units, and could have 1
    both = threading.Barrier(2)
    for _ in range(3):
        outcomes = [started(lambda h=handle: both.wait() < 2 and result_of(h)) for handle in (one, two)]
        assert [type(outcome()) for outcome in outcomes] == [vm.VRAMOutOfMemoryError] * 2
    others.clear()
    assert result_of(one)
    assert result_of(two)


def test_leases_that_end_soon_are_waited_for_by_however_many(mgr, make):
    """A model that is half there fills the last bytes: what the holders compute needs room that its loaders keep."""
    handles = [make(f"m{number}", 2) for number in range(6)]
    mgr.budget_bytes -= UNIT + SLACK  # two and a half of them, to the last byte

    def hold(handle):
        with handle.lease() as model:
            model(X)
            time.sleep(0.01)
        return "done"

    for _ in range(4):
        outcomes = [started(lambda h=handles[number % 6]: hold(h)) for number in range(18)]
        assert [outcome() for outcome in outcomes] == ["done"] * 18


def test_a_thread_that_waits_is_not_refused_because_another_one_asks_too_much(mgr, make):
    held, wanted = make("held", 4), make("wanted", 4)
    right = result_of(wanted)
    held.load()
    inside, go = threading.Event(), threading.Event()

    def too_much():
        with held.lease():
            inside.set()
            go.wait()
            return result_of(wanted)  # 4 + 4 > 6, and it holds 4 itself

    greedy = started(too_much)
    inside.wait()
    patient = started(lambda: result_of(wanted))
    wait_for_a_waiter(mgr)
    go.set()
    assert isinstance(greedy(), vm.VRAMOutOfMemoryError)
    assert patient() == right


def test_a_call_inside_a_call_that_cannot_fit_fails_at_once(mgr, make):
    outer, inner = make("outer", 4), make("inner", 4)
    outer.model.between = lambda: inner.model(X)
    with pytest.raises(vm.VRAMOutOfMemoryError, match="in use"):
        outer.model(X)
    assert not outer.in_use
    assert len(result_of(inner)) == 1


def test_a_full_disk_is_told_and_nobody_hangs(mgr, make, monkeypatch):
    one, two = make("one", 4, residency="disk"), make("two", 4, residency="disk")
    right = result_of(one)
    torch.manual_seed(0)
    two.model.layers[0].weight.add_(1)
    one.model.layers[3].weight.mul_(2)
    right = result_of(one)
    result_of(two)

    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(mgr._torch_models.store, "write", full)
        two.model.layers[0].weight.add_(1)
        two.model.layers[1].weight.add_(1)
        two.model.layers[2].weight.add_(1)
        two.model.layers[3].weight.add_(1)
        with pytest.raises(vm.VRAMOutOfMemoryError, match="No space left"):
            one.model(X)
        assert not one.in_use
    assert result_of(one) == right


def test_a_model_that_is_forgotten_while_calls_wait_for_it_still_computes(mgr, make, restless):
    handle, other = make("model", 4), make("other", 4)
    model, right = handle.model, result_of(handle)
    for _ in range(10):
        other.load()
        calls = [started(lambda: model(X).tolist()) for _ in range(3)]
        handle.forget()
        assert [call() for call in calls] == [right] * 3
        handle = mgr.register("model", model)


# ------------------------------------------------------------------------------------------- generators, coroutines


def test_a_generator_holds_a_lease_from_its_first_item_to_its_end(mgr, make):
    handle = make("model", 3)
    stream = handle.model.stream(X)
    assert not handle.in_use  # nothing runs yet
    next(stream)
    assert handle.in_use
    with pytest.raises(vm.ModelInUseError):
        handle.evict()
    assert len(list(stream)) == 2
    assert not handle.in_use


@pytest.mark.parametrize("end", ["closed", "dropped", "thrown into"])
def test_a_generator_that_is_given_up_ends_its_lease(mgr, make, end):
    handle = make("model", 3)
    stream = handle.model.stream(X)
    next(stream)
    assert handle.in_use
    if end == "closed":
        stream.close()
    elif end == "dropped":
        del stream
    else:
        with pytest.raises(ZeroDivisionError):
            stream.throw(ZeroDivisionError)
    assert not handle.in_use
    assert handle.evict() == 3 * UNIT


def test_a_generator_brings_back_what_left_before_its_first_item(mgr, make):
    handle = make("model", 3)
    right = [x.tolist() for x in handle.model.stream(X)]
    stream = handle.model.stream(X)
    handle.evict()
    assert [x.tolist() for x in stream] == right


def test_nobody_waits_for_a_generator(mgr, make):
    handle, other = make("model", 4), make("other", 4)
    handle.load()
    stream = handle.model.stream(X)
    next(stream)
    with pytest.raises(vm.VRAMOutOfMemoryError, match="in use"):
        other.model(X)
    stream.close()
    assert len(result_of(other)) == 1


def test_a_generator_may_be_consumed_in_another_thread(mgr, make):
    handle = make("model", 3)
    stream = handle.model.stream(X)
    next(stream)
    assert started(lambda: len(list(stream)))() == 2
    assert not handle.in_use


def test_coroutines_and_async_generators_hold_a_lease_while_they_run(mgr, make):
    handle = make("model", 3)
    right = result_of(handle)
    handle.evict()

    async def scene():
        answering = handle.model.answer(X)
        assert not handle.in_use
        task = asyncio.create_task(answering)
        while not handle.in_use:  # noqa: ASYNC110  set by a call in progress
            await asyncio.sleep(0)
        with pytest.raises(vm.ModelInUseError):
            await handle.aevict()
        assert (await task).tolist() == right
        assert not handle.in_use

        stream = handle.model.astream(X)
        await anext(stream)
        assert handle.in_use
        await stream.aclose()
        assert not handle.in_use

    asyncio.run(scene())


# --------------------------------------------------------------------------------------------------------- asyncio


def test_async_calls_do_not_block_the_loop_while_they_wait(mgr, make):
    held, wanted = make("held", 4), make("wanted", 4)
    held.load()
    gate = held.model.between = Gate()

    async def scene():
        call = started(lambda: result_of(held))
        gate.inside.wait()
        load = asyncio.create_task(wanted.aload())
        while not mgr._core.registry._waiting:  # noqa: ASYNC110  other threads wait, too
            await asyncio.sleep(0.002)  # the loop goes on
        assert not load.done()
        gate.go.set()
        assert (await load) is wanted
        held.model.between = None
        call()
        assert units(wanted) == 4
        async with held.lease() as model:
            assert model is held.model
            assert (held.in_use, units(held)) == (True, 4)
            with pytest.raises(vm.VRAMOutOfMemoryError):
                await mgr.amake_room(3 * UNIT)
            assert await mgr.amake_room(2 * UNIT) == 2 * UNIT
        assert not held.in_use
        assert await held.aevict() == 4 * UNIT

    asyncio.run(scene())


def test_leases_of_coroutines_on_one_loop_are_their_own(mgr, make):
    handles = [make(name, 2) for name in "abc"]

    async def use(handle):
        for _ in range(20):
            async with handle.lease() as model:
                await asyncio.sleep(0)
                assert handle.in_use
                assert len(model(X)) == 1
                await asyncio.sleep(0)

    async def scene():
        await asyncio.gather(*(use(handle) for handle in handles for _ in range(3)))

    asyncio.run(scene())
    assert not any(handle.in_use for handle in handles)


def test_a_cancelled_wait_for_a_lease_leaves_none(mgr, make, restless):
    held, wanted = make("held", 4), make("wanted", 4)
    held.load()
    gate = held.model.between = Gate()

    async def scene():
        call = started(lambda: result_of(held))
        gate.inside.wait()

        async def use():
            async with wanted.lease():
                raise AssertionError("never entered")

        task = asyncio.create_task(use())
        while not mgr._core.registry._waiting:  # noqa: ASYNC110  other threads wait, too
            await asyncio.sleep(0.002)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.go.set()
        call()

    asyncio.run(scene())
    assert not wanted.in_use
    held.model.between = None
    assert len(result_of(wanted)) == 1


# ------------------------------------------------------------------------------------------------- order and room


def test_the_begin_of_a_call_counts_as_use(mgr, make):
    old, new = make("old", 2), make("new", 2)
    gate = old.model.between = Gate()
    call = started(lambda: old.model(X))
    gate.inside.wait()
    assert old._managed.last_used > new._managed.last_used
    gate.go.set()
    call()


def test_the_end_of_a_call_counts_as_use(mgr, make):
    long, short = make("long", 2), make("short", 2)
    gate = long.model.between = Gate()
    call = started(lambda: long.model(X))
    gate.inside.wait()
    short.model(X)
    gate.go.set()
    call()
    assert mgr.make_room(3 * UNIT) == UNIT
    assert (units(long), units(short)) == (2, 1)  # the long call ended last


def test_reserved_room_is_kept_from_other_threads(mgr, make):
    idle = make("idle", 3)
    with mgr.reserve(4 * UNIT):
        assert units(idle) == 2
        refused = started(lambda: of(5 * UNIT))()
        assert isinstance(refused, torch.OutOfMemoryError)
        mine = of(4 * UNIT)
        assert units(idle) == 2
    del mine
    assert mgr.make_room(4 * UNIT) == 0


def test_what_was_not_used_of_a_reserve_is_given_back(mgr):
    with mgr.reserve(5 * UNIT):
        mine = of(2 * UNIT)
        assert isinstance(started(lambda: of(2 * UNIT))(), torch.OutOfMemoryError)
    assert mgr.make_room(4 * UNIT) == 0  # 6 - 2
    with pytest.raises(vm.VRAMOutOfMemoryError):
        mgr.make_room(5 * UNIT)
    del mine
    assert mgr.make_room(6 * UNIT) == 0


def test_a_load_inside_a_reserve_never_passes_the_budget(mgr, make):
    handle, other = make("model", 3), make("other", 3)
    handle.evict()
    mgr.reset_peak()
    with mgr.reserve(3 * UNIT):
        result_of(handle)
        mine = of(3 * UNIT)
    assert (units(handle), units(other)) == (3, 0)
    assert mgr.peak_bytes <= mgr.budget_bytes
    del mine


def test_a_workspace_is_asked_first_and_only_while_short(mgr):
    class Caching(Stack):
        cache = None

    model, asked = Caching(2), []

    def give_back():
        asked.append(True)
        model.cache = None

    handle = mgr.register("model", model, workspace=give_back)
    model.cache = of(2 * UNIT)
    assert (mgr.make_room(2 * UNIT), asked) == (0, [])  # 6 - 2 - 2
    assert mgr.make_room(4 * UNIT) == 2 * UNIT
    assert (asked, units(handle)) == ([True], 2)
    step = mgr.journal[-1].left[0]
    assert (step.model, step.stage, step.bytes) == ("model", "workspace", 2 * UNIT)
    model.cache = of(2 * UNIT)
    assert mgr.make_room(5 * UNIT) == 3 * UNIT  # the cache was not enough
    assert [(s.stage, s.bytes) for s in mgr.journal[-1].left] == [("workspace", 2 * UNIT), ("pass 1", UNIT)]
    with pytest.raises(vm.VRAMOutOfMemoryError):
        mgr.make_room(7 * UNIT)
    assert asked == [True, True]  # not for what can never fit


def test_a_workspace_of_a_model_in_use_is_left_alone(mgr):
    model, asked = Stack(2), []
    handle = mgr.register("model", model, workspace=lambda: asked.append(True))
    with handle.lease(), pytest.raises(vm.VRAMOutOfMemoryError):
        mgr.make_room(5 * UNIT)
    assert asked == []


def test_a_workspace_that_raises_does_not_keep_others_from_leaving(mgr):
    model = Stack(2)
    mgr.register("model", model, workspace=lambda: 1 / 0)
    assert mgr.make_room(6 * UNIT) == 2 * UNIT
    assert "ZeroDivisionError" in mgr.journal[-1].left[0].reason


def test_a_plan_names_the_workspaces_that_would_be_asked(mgr):
    model = Stack(2)
    mgr.register("model", model, workspace=lambda: None)
    plan = mgr.plan(5 * UNIT)
    assert [(step.model, step.stage) for step in plan.steps] == [("model", "workspace"), ("model", "pass 1")]


@pytest.mark.timeout(180)
def test_a_lease_whose_thread_waits_for_the_asker_is_not_waited_for(mgr_for_patience, monkeypatch):
    monkeypatch.setattr("vram_magic.registry._PATIENCE_S", 0.5)
    mgr, first, second = mgr_for_patience
    caught = []

    def call_second() -> None:
        try:
            second(torch.ones(1, 512, device=DEVICE))
        except vm.VRAMOutOfMemoryError as error:
            caught.append(error)

    thread = threading.Thread(target=call_second)
    with mgr["first"].lease():
        thread.start()
        thread.join()
    assert len(caught) == 1
    call_second()
    assert len(caught) == 1
    assert first is not None


@pytest.fixture
def mgr_for_patience(tmp_path):
    """Two models of 2 MiB, room for three."""
    manager = vm.VRAMManager(device=DEVICE, budget="1GiB", block_bytes="1MiB", spill_dir=tmp_path)
    models = [Stack(2) for _ in range(2)]
    for name, model in zip(("first", "second"), models, strict=True):
        manager.register(name, model)
    manager["second"].evict()
    manager.budget_bytes = manager.used_bytes + (1 << 20)
    yield manager, *models
    manager.close()
