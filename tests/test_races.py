"""Operations on weights in other threads, outside any lease, while the model is moved, forgotten or closed.

Each of these killed the kernel or lost an edit once: a method of a tensor (`w.add_`, `w.sort`) shows in no use count.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from place import DEVICE, same_values
from torch import nn

import vram_magic as vm

MIB = 1 << 20


@pytest.mark.timeout(60)
def test_no_edit_of_another_thread_is_lost_between_evictions_and_loads(mgr):
    model = nn.Linear(1024, 1024, bias=False, device=DEVICE).requires_grad_(requires_grad=False)
    model.weight.zero_()
    handle = mgr.register("model", model)
    done, edits = threading.Event(), [0]

    def edit() -> None:
        while not done.is_set():
            model.weight.add_(1)
            edits[0] += 1

    thread = threading.Thread(target=edit)
    thread.start()
    for _ in range(40):
        handle.evict()
        handle.load()
    done.set()
    thread.join()
    assert (model.weight.min().item(), model.weight.max().item()) == (edits[0], edits[0])


@pytest.mark.timeout(60)
@pytest.mark.parametrize("end", ["load", "forget", "close"])
def test_a_reader_of_an_evicted_weight_survives_what_becomes_of_it(mgr, end):
    model = nn.Linear(1024, 1024, bias=False, device=DEVICE).requires_grad_(requires_grad=False)
    expected = model.weight.lgamma().cpu()  # an accelerator's evicted weight lies there
    handle = mgr.register("model", model)
    for _ in range(3):
        handle.evict()
        got = []
        thread = threading.Thread(target=lambda got=got: got.append(model.weight.lgamma()))
        thread.start()
        if end == "load":
            handle.load()
        thread.join()
        assert torch.equal(got[0].cpu(), expected)
    handle.evict()
    thread = threading.Thread(target=lambda: got.append(model.weight.lgamma()))
    thread.start()
    if end == "close":
        mgr.close()
    else:
        handle.forget()
    thread.join()
    assert torch.equal(got[-1].cpu(), expected)
    assert torch.equal(model.weight.lgamma().cpu(), expected)


def shadowed(model):
    """Whether calls of the module still go through a manager."""
    return [name for module in model.modules() for name in vars(module) if name in ("forward", "_call_impl")]


def before_the_look(mgr, monkeypatch, job):
    """Does the job once, in the middle: after somebody wanted a look at a model, and before it is taken."""
    decide, look = mgr._core.workers.decide, mgr._core.reclaimer.look

    def late(wanted, *args):
        if wanted == look:
            monkeypatch.undo()
            job()
        return decide(wanted, *args)

    monkeypatch.setattr(mgr._core.workers, "decide", late)


@pytest.mark.parametrize("end", ["forget", "close"])
def test_a_look_that_comes_too_late_leaves_the_model_to_its_user(mgr, monkeypatch, end):
    model = nn.Linear(8, 8, device=DEVICE)
    handle = mgr.register("model", model)
    handle.evict()
    before_the_look(mgr, monkeypatch, handle.forget if end == "forget" else mgr.close)
    assert handle.total_bytes
    assert not shadowed(model)


def test_an_eviction_and_a_wish_that_come_too_late_say_that_the_model_is_forgotten(mgr):
    model = nn.Linear(8, 8, device=DEVICE)
    handle = mgr.register("model", model)
    marked, go = threading.Event(), threading.Event()

    def late(job) -> BaseException | None:
        with mgr._core.registry.moving(handle._managed, "loading"):
            marked.set()
            go.wait()
        return None

    with ThreadPoolExecutor(3) as pool:
        pool.submit(late, None)
        marked.wait()
        jobs = [pool.submit(handle.forget), pool.submit(handle.evict)]
        while len(mgr._core.registry._waiting) < 2:
            time.sleep(0.001)
        go.set()
        jobs[0].result()
        assert jobs[1].exception() is None or isinstance(jobs[1].exception(), vm.UnknownModelError)
    handle.residency = "disk"
    assert not shadowed(model)


@pytest.mark.parametrize("name", ["model", "another"])
def test_an_object_that_two_register_at_once_is_managed_once(mgr, monkeypatch, name):
    model, found = nn.Linear(8, 8, device=DEVICE), []
    before_the_look(mgr, monkeypatch, lambda: found.append(mgr.register(name, model)))
    if name == "model":
        assert mgr.register("model", model)._managed is found[0]._managed
    else:
        with pytest.raises(vm.VRAMError, match="managed as 'another' already"):
            mgr.register("model", model)
    assert list(mgr.models) == [name]
    found[0].forget()
    assert not shadowed(model)


def test_a_name_that_two_register_at_once_is_the_last_ones(mgr, monkeypatch):
    first, second = nn.Linear(8, 8, device=DEVICE), nn.Linear(8, 8, device=DEVICE)
    before_the_look(mgr, monkeypatch, lambda: mgr.register("model", first))
    assert mgr.register("model", second).model is second
    assert [handle.model for handle in mgr.models.values()] == [second]
    assert not shadowed(first)


def test_a_model_that_is_called_while_it_is_registered_has_its_size(mgr, monkeypatch):
    model, x = nn.Linear(1024, 1024, device=DEVICE), torch.zeros(1, 1024, device=DEVICE)
    before_the_look(mgr, monkeypatch, lambda: model(x))
    handle = mgr.register("model", model)
    with mgr._core.registry.moving(handle._managed, "loading"):  # nobody looks meanwhile
        assert (handle.total_bytes, handle.device_bytes) == (4 * 1024 * 1025,) * 2


@pytest.mark.timeout(60)
def test_a_method_that_a_pool_calls_directly_keeps_its_weight(mgr):
    model = nn.Linear(1024, 1024, bias=False, device=DEVICE).requires_grad_(requires_grad=False)
    expected = model.weight.sort(1).values
    handle = mgr.register("model", model)
    with ThreadPoolExecutor(1) as pool:
        for _ in range(5):
            future = pool.submit(model.weight.sort, 1)
            handle.evict()
            assert same_values(future.result().values, expected)  # an accelerator may have let go of it before
            handle.load()


def test_reserves_of_two_coroutines_end_in_any_order(mgr):
    async def main() -> None:
        first, second = mgr.reserve("4MiB"), mgr.reserve("4MiB")
        await first.__aenter__()
        await second.__aenter__()
        await first.__aexit__(None, None, None)
        await second.__aexit__(None, None, None)

    asyncio.run(main())
    meter = mgr._core.device.meter
    assert meter.credit_bytes == 0
    assert meter.committed_bytes == meter.live_bytes


def test_threads_that_ask_for_the_manager_get_one():
    barrier, found = threading.Barrier(6), []

    def ask() -> None:
        barrier.wait()
        found.append(vm.manager())

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1
    found[0].close()


def test_a_refused_call_keeps_no_tensor_of_its_caller(mgr):
    mgr.budget_bytes = mgr.used_bytes + 4 * MIB
    gc.collect()
    gc.disable()
    try:

        def call() -> weakref.ref:
            big = torch.empty(MIB, dtype=torch.uint8, device=DEVICE)
            with pytest.raises(vm.VRAMOutOfMemoryError):
                mgr.make_room("1GiB")
            return weakref.ref(big)

        assert call()() is None
    finally:
        gc.enable()


def test_a_method_of_a_dead_model_says_so(mgr):
    class Speaker(nn.Linear):
        def speak(self):
            return 1

    model = Speaker(4, 4)
    mgr.register("model", model)
    speak = model.speak
    assert speak.__self__ is model
    del model
    gc.collect()
    with pytest.raises(vm.UnknownModelError, match="Keep the model in a variable"):
        speak()
    assert "model" not in mgr
