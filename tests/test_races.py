"""Operations on weights in other threads, outside any lease, while the model is moved, forgotten or closed.

Each of these killed the kernel or lost an edit once: a method of a tensor (`w.add_`, `w.sort`) shows in no use count.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from place import DEVICE, loaded, same_values
from torch import nn

import vram_magic as vm

MIB = 1 << 20


@pytest.mark.timeout(300)
def test_no_edit_of_another_thread_is_lost_between_evictions_and_loads(mgr):
    model = nn.Linear(1024, 1024, bias=False, device=DEVICE).requires_grad_(requires_grad=False)
    model.weight.zero_()
    handle = mgr.register("model", model)
    done, may_edit, edits = threading.Event(), threading.Event(), [0]
    may_edit.set()

    def edit() -> None:
        while not done.is_set():
            if not may_edit.wait(0.1):
                continue
            model.weight.add_(1)
            edits[0] += 1

    thread = threading.Thread(target=edit, daemon=True)
    thread.start()
    try:
        for _ in range(40):
            handle.evict()
            loaded(handle, may_edit)
    finally:
        done.set()
        thread.join()
    assert (model.weight.min().item(), model.weight.max().item()) == (edits[0], edits[0])


@pytest.mark.timeout(180)
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


@pytest.mark.timeout(180)
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
