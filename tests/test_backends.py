"""Outside engines whose backends do what they should not: call the manager from `unload`, exit, interrupt, stop a loop.

Without these one such backend costs the kernel: the deciding thread waits for ever for an unload that waits for it, or
for a loop that has ended, and with it waits every cell that allocates.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading

import pytest
import torch
from place import DEVICE

import vram_magic as vm

pytestmark = pytest.mark.timeout(300)

MIB = 1 << 20
ENGINE = 4 * MIB
user = contextvars.ContextVar("user", default="nobody")


class Backend:
    """What it does is set from outside, by verb; it notes the calls that went through."""

    def __init__(self) -> None:
        self.doing = {}
        self.done: list[tuple[str, str]] = []

    async def load(self, model_id: str) -> None:
        await self._do("load", model_id)

    async def unload(self, model_id: str) -> None:
        await self._do("unload", model_id)

    async def _do(self, verb: str, model_id: str) -> None:
        if verb in self.doing:
            await self.doing[verb]()
        self.done.append((verb, model_id))


def ended(job):
    """What the job returns or raises. In a thread of its own: one that never ends must not hold up the other tests."""
    results = []

    def run():
        try:
            results.append((job(), None))
        except BaseException as error:
            results.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(50)
    assert results, "it waits for ever"
    value, error = results[0]
    if error is not None:
        raise error
    return value


@pytest.fixture
def mgr(tmp_path):
    options = {"budget": "1GiB", "block_bytes": "1MiB", "spill_dir": tmp_path}
    gc.collect()  # what an earlier test's traceback held would be freed in the middle of this one
    manager = vm.VRAMManager(device=DEVICE, **options)
    yield manager
    ended(manager.close)


@pytest.fixture
def backend(mgr):
    """That of the engine "e", which is loaded."""
    backend = Backend()
    load(mgr, "e", backend)
    return backend


@pytest.fixture
def layer(mgr):
    """A layer of 1 MiB, managed as "layer"."""
    layer = torch.nn.Linear(512, 512, bias=False, device=DEVICE).requires_grad_(False)
    mgr.register("layer", layer, tier="asr")
    return layer


def load(mgr, name, backend):
    job = mgr.load_model(name, vram_gb=ENGINE / 2**30, backend=backend)
    return ended(lambda: asyncio.run(job))


def unload(mgr, name):
    ended(lambda: asyncio.run(mgr.unload_model(name)))


def more_than_free(mgr):
    """So much that the engine has to leave, and nothing else."""
    return mgr.free_bytes + MIB


def in_thread(function):
    return lambda: asyncio.to_thread(function)


# ------------------------------------------------------------------------------------- an unload that asks the manager


async def in_executor(mgr):
    await asyncio.get_running_loop().run_in_executor(None, mgr["layer"].evict)


async def closes(mgr):
    mgr.close()


async def in_a_lease(mgr):
    async with mgr["layer"].lease():
        pass


async def directly(mgr):
    mgr["layer"].evict()


async def in_a_task(mgr):
    await asyncio.create_task(mgr["layer"].aevict())


async def load_other(mgr):
    await mgr.load_model("other", vram_gb=ENGINE / 2**30, backend=Backend())


ASKING = {
    "evicts another model": lambda mgr: mgr["layer"].aevict(),
    "evicts itself": lambda mgr: mgr["e"].aevict(),
    "unloads itself": lambda mgr: mgr.unload_model("e"),
    "makes room": lambda mgr: mgr.amake_room("1MiB"),
    "loads another engine": load_other,
    "leases a model that is away": in_a_lease,
    "evicts in a task": in_a_task,
    "evicts in an executor's thread": in_executor,
    "reads a state in a thread": lambda mgr: asyncio.to_thread(lambda: mgr["layer"].state),
    "evicts in its own thread": directly,
    "closes the manager": closes,
    "closes the manager in a thread": lambda mgr: asyncio.to_thread(mgr.close),
}


@pytest.mark.parametrize("how", ASKING)
def test_an_unload_that_asks_the_manager_is_told_so_and_the_engine_stays(mgr, backend, layer, how):
    if how == "leases a model that is away":
        mgr["layer"].evict()
    backend.doing["unload"] = lambda: ASKING[how](mgr)
    with pytest.raises(vm.VRAMError, match="unload would wait for itself") as told:
        unload(mgr, "e")
    _, numbers, cause, remedy = str(told.value).splitlines()
    assert "amake_room" not in remedy  # it waits as well
    assert ("Nothing was moved." in numbers, "unload" in cause, "afterwards" in remedy) == (True, True, True)
    assert mgr.is_loaded("e")
    assert "other" not in mgr
    assert backend.done == [("load", "e")]
    backend.doing.clear()
    unload(mgr, "e")
    assert mgr["layer"].load().state == "device"
    assert layer.weight.device.type == DEVICE


def test_a_request_whose_victim_asks_the_manager_in_its_unload_fails_with_that_reason(mgr, backend, layer):
    backend.doing["unload"] = lambda: mgr.amake_room(1)
    mgr["layer"].pin()
    with pytest.raises(vm.VRAMError, match="unload would wait for itself"):
        ended(lambda: mgr.make_room(more_than_free(mgr)))
    mgr.budget_bytes = mgr.used_bytes
    with pytest.raises(torch.OutOfMemoryError, match="unload would wait for itself"):
        ended(lambda: torch.empty(MIB, dtype=torch.uint8, device=DEVICE))
    backend.doing.clear()
    assert ended(lambda: torch.empty(MIB, dtype=torch.uint8, device=DEVICE)).nbytes == layer.weight.nbytes
    assert not mgr.is_loaded("e")


def test_an_allocation_in_a_thread_that_an_unload_waits_for_is_refused_with_that_reason(mgr, backend, layer):
    seen = []

    def allocate():
        try:
            torch.empty(MIB, dtype=torch.uint8, device=DEVICE)
        except torch.OutOfMemoryError as error:
            seen.append(str(error))

    backend.doing["unload"] = in_thread(allocate)
    mgr.budget_bytes = mgr.used_bytes
    unload(mgr, "e")
    assert ["unload would wait for itself" in text for text in seen] == [True]
    assert layer.weight.nbytes == mgr["layer"].device_bytes


def test_what_an_unload_leaves_behind_may_ask_the_manager_when_it_has_ended(mgr, backend, layer):
    go, results = threading.Event(), []

    async def later():
        await asyncio.to_thread(go.wait)
        results.append(await mgr["layer"].aevict())

    tasks = []

    async def begin():
        tasks.append(asyncio.create_task(later()))

    backend.doing["unload"] = begin
    unload(mgr, "e")
    go.set()
    loop = tasks[0].get_loop()

    async def end():
        await tasks[0]

    ended(asyncio.run_coroutine_threadsafe(end(), loop).result)
    assert results == [layer.weight.nbytes]


def test_a_load_may_ask_the_manager_and_an_unload_that_follows_from_it_may_not(mgr, backend, layer):
    seen, told = [], []

    async def load_asking():
        seen.append(await mgr["layer"].aevict())
        seen.append(await asyncio.to_thread(lambda: mgr["layer"].state))
        seen.append(await mgr.amake_room(more_than_free(mgr) - ENGINE))  # what it itself will take is reserved

    async def unload_asking():
        try:
            await mgr["layer"].aload()
        except vm.VRAMError as error:
            told.append(str(error))

    backend.doing["unload"] = unload_asking
    other = Backend()
    other.doing["load"] = load_asking
    load(mgr, "other", other)
    evicted, state, made = seen
    assert (evicted, made) == (layer.weight.nbytes, ENGINE)
    assert state in {"host", "disk"}
    assert ["unload would wait for itself" in text for text in told] == [True]


def test_a_load_that_asks_for_more_room_than_can_ever_be_is_refused(mgr, backend, layer):
    other = Backend()
    other.doing["load"] = lambda: mgr.amake_room(mgr.budget_bytes - ENGINE)  # where it has taken its own part already
    mgr["layer"].pin()
    with pytest.raises(vm.VRAMOutOfMemoryError, match="layer"):
        load(mgr, "other", other)
    assert "other" not in mgr
    assert mgr["layer"].device_bytes == layer.weight.nbytes


def test_a_load_that_asks_for_its_own_engine_is_told_so(mgr):
    other = Backend()

    async def again():
        await mgr["other"].aload()

    other.doing["load"] = again
    with pytest.raises(vm.VRAMError, match="load would wait for itself"):
        load(mgr, "other", other)
    assert "other" not in mgr
    other.doing.clear()
    load(mgr, "other", other)
    assert other.done == [("load", "other")]


def test_an_allocation_whose_victims_engine_exits_takes_another_one(mgr, backend, layer, error):
    backend.doing["unload"] = raising(error, "itself")
    mgr.budget_bytes = mgr.used_bytes
    assert ended(lambda: torch.empty(MIB // 2, dtype=torch.uint8, device=DEVICE)).nbytes == MIB // 2
    assert mgr.is_loaded("e")
    assert mgr["layer"].device_bytes == 0
    backend.doing.clear()


def test_an_allocation_whose_only_victims_engine_exits_is_told_why(mgr, backend, layer, error):
    backend.doing["unload"] = raising(error, "itself")
    mgr["layer"].pin()
    mgr.budget_bytes = mgr.used_bytes
    with pytest.raises(torch.OutOfMemoryError, match=f"{type(error).__name__}: enough"):
        ended(lambda: torch.empty(MIB, dtype=torch.uint8, device=DEVICE))
    assert mgr.is_loaded("e")
    assert mgr["layer"].device_bytes == layer.weight.nbytes
    backend.doing.clear()


def test_the_context_of_who_calls_comes_along_to_the_backend(mgr, backend):
    seen = []

    async def note():
        seen.append(user.get())
        await asyncio.to_thread(lambda: seen.append(user.get()))

    async def scene():
        user.set("somebody")
        backend.doing["load"] = note
        await mgr.load_model("other", vram_gb=ENGINE / 2**30, backend=backend)

    ended(lambda: asyncio.run(scene()))
    assert seen == ["somebody", "somebody"]


# ---------------------------------------------------------------------------------- a coroutine that would end the loop


def raising(error, where):
    """A coroutine function that raises it, itself or in a task that it waits for."""

    async def fall():
        await asyncio.sleep(0)
        raise error

    async def fall_in_a_task():
        await asyncio.gather(fall(), asyncio.sleep(0))

    return fall if where == "itself" else fall_in_a_task


@pytest.fixture(params=[SystemExit, KeyboardInterrupt], ids=lambda kind: kind.__name__)
def error(request):
    return request.param("enough")


where = pytest.mark.parametrize("where", ["itself", "in a task"])


@where
def test_a_load_that_exits_tells_its_caller_and_the_next_one_works(mgr, backend, error, where):
    other = Backend()
    other.doing["load"] = raising(error, where)
    used = mgr.used_bytes
    with pytest.raises(type(error)) as told:
        load(mgr, "other", other)
    assert told.value is error
    assert "other" not in mgr
    assert mgr.used_bytes == used
    other.doing.clear()
    load(mgr, "other", other)
    unload(mgr, "e")
    assert list(mgr.get_loaded_models()) == ["other"]


@where
def test_an_unload_that_exits_tells_its_caller_and_the_engine_stays(mgr, backend, layer, error, where):
    mgr["layer"].pin()  # else it leaves in place of the engine
    backend.doing["unload"] = raising(error, where)
    makes_room = lambda: mgr.make_room(more_than_free(mgr))  # noqa: E731
    for ask in (lambda: asyncio.run(mgr.unload_model("e")), makes_room, mgr["e"].evict):
        with pytest.raises(type(error)) as told:
            ended(ask)
        assert told.value is error
        assert mgr.is_loaded("e")
        assert not mgr["e"]._managed.moving
    backend.doing.clear()
    assert ended(makes_room) == ENGINE
    assert mgr["layer"].device_bytes == layer.weight.nbytes


def test_a_manager_whose_engine_exits_at_its_unload_closes(mgr, backend, layer, error):
    backend.doing["unload"] = raising(error, "itself")
    mgr["layer"].evict()
    others = mgr.used_bytes - ENGINE  # what tests before this one have left
    with pytest.raises(type(error)):
        ended(mgr.close)
    assert layer.weight.any()
    with vm.VRAMManager(device=DEVICE, budget="1GiB") as other:  # there is one open manager per device
        assert other.used_bytes == others + (layer.weight.nbytes if layer.weight.device.type == DEVICE else 0)


def test_a_backend_that_stops_the_loop_it_runs_in_is_waited_for_all_the_same(mgr, backend):
    async def stop():
        asyncio.get_running_loop().stop()
        await asyncio.sleep(0)

    backend.doing["unload"] = backend.doing["load"] = stop
    unload(mgr, "e")
    load(mgr, "e", backend)
    assert backend.done == [("load", "e"), ("unload", "e"), ("load", "e")]


def test_no_later_thread_is_taken_for_that_of_a_loop_which_has_ended(mgr, backend):
    workers = mgr._core.workers
    thread = next(t for t in threading.enumerate() if t.ident == workers._loop_thread)
    ended(mgr.close)
    thread.join(50)
    assert not thread.is_alive()
    assert workers._loop_thread == 0
