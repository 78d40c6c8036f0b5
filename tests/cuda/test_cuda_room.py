"""Out of memory, idle models leave, and the very same call succeeds: whoever allocates, by whatever way into torch.

Without this a library's backward, a worker thread or an operator's workspace still fails while idle models fill the
device. Each way is tried with a budget that is too small and with a device that is truly full.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from helpers import MIB, contents, stack, take, warm_up

import vram_magic as vm

LAYERS, NEED = 20, 12 * MIB

pytestmark = [pytest.mark.timeout(100), pytest.mark.usefixtures("watchdog")]


class _Allocating(torch.autograd.Function):
    """Its backward allocates, in autograd's own thread of the device."""

    @staticmethod
    def forward(ctx, x, found):
        ctx.found = found
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.found += [threading.get_ident(), take(NEED)]
        return gradient, None


def in_backward():
    found = []
    x = torch.ones(4, device="cuda", requires_grad=True)
    _Allocating.apply(x, found).sum().backward()
    thread, taken = found
    assert thread != threading.get_ident()
    return taken


def in_a_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(take(NEED)))
    thread.start()
    thread.join()
    return found[0]


def by_resize():
    return take(16).resize_(NEED)


def by_copying_to_the_device():
    return torch.empty(NEED, dtype=torch.uint8).cuda()


def on_another_stream():
    with torch.cuda.stream(torch.cuda.Stream()):
        return take(NEED)


def under_inference_mode():
    with torch.inference_mode():
        return take(NEED)


def under_autocast():
    with torch.autocast("cuda"):
        return take(NEED)


def from_a_pool():
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        return pool, take(NEED)


class _Raw:
    """Memory without a tensor, as extensions take it."""

    def __init__(self) -> None:
        self.address = torch.cuda.caching_allocator_alloc(NEED)

    def __del__(self) -> None:
        torch.cuda.caching_allocator_delete(self.address)


WAYS: list[Callable[[], object]] = [
    lambda: take(NEED), in_a_thread, in_backward, by_resize, by_copying_to_the_device, on_another_stream,
    under_inference_mode, under_autocast, from_a_pool, _Raw,
]  # fmt: skip


@pytest.fixture(params=["budget", "device"])
def full(request, standin, open_manager):
    """A manager, and a model that leaves 4 MiB: of the budget, or of the device itself."""
    warm_up()
    model = stack(LAYERS)
    room = 4 * MIB
    torch.cuda.empty_cache()
    if request.param == "budget":
        mgr = open_manager(budget=torch.cuda.memory_allocated() + room)
    else:
        mgr = open_manager(budget="10GiB")
        standin.capacity_bytes = standin.used_bytes + room
    return mgr, model


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__.strip("<>_"))
def test_the_same_call_succeeds_and_the_weights_come_back_whole(full, standin, way):
    mgr, model = full
    x = torch.randn(2, 512).cuda()
    before, expected = contents(model), model(x).cpu()
    handle = mgr.register("idle", model)
    ooms = standin.counts()["ooms"]
    taken = way()
    assert handle.state == "partial", handle.why()
    assert all(map(torch.equal, contents(model), before))
    assert mgr.used_bytes == torch.cuda.memory_allocated()
    record = mgr.journal[-1]
    assert [(step.model, step.stage) for step in record.left] == [("idle", "pass 1")] * len(record.left)
    assert record.freed_bytes == LAYERS * MIB - handle.device_bytes
    if mgr.budget_bytes > standin.capacity_bytes:
        assert standin.counts()["ooms"] > ooms
    del taken
    assert torch.equal(model(x).cpu(), expected)
    assert handle.state == "device"
    assert all(map(torch.equal, contents(model), before))


@pytest.mark.parametrize("need", [MIB // 2, 3 * MIB, 9 * MIB], ids=lambda need: f"{need / MIB:g} MiB")
def test_on_a_full_device_enough_leaves_for_the_segment_that_torch_asks_the_driver_for(open_manager, standin, need):
    # torch asks for 2 MiB to give less than 1, and for 20 MiB to give less than 10.
    models = [stack(1) for _ in range(60)]  # of the same segments, as layers of one model
    model = torch.nn.ModuleList(models)
    before = contents(model)
    mgr = open_manager(budget="10GiB")
    handle = mgr.register("idle", model)
    torch.cuda.empty_cache()
    standin.capacity_bytes = standin.used_bytes
    kept = [take(need)]
    while handle.device_bytes == 60 * MIB:  # until what was left over in torch's segments is used up
        kept.append(take(need))
    assert handle.device_bytes > 0
    assert all(map(torch.equal, contents(model), before))


def test_only_as_much_leaves_as_the_budget_asks_for(open_manager):
    warm_up()
    model = stack(LAYERS)
    mgr = open_manager(budget=torch.cuda.memory_allocated() + 8 * MIB)
    handle = mgr.register("idle", model)
    taken = take(8 * MIB)
    assert handle.device_bytes == LAYERS * MIB
    more = take(10 * MIB)
    assert handle.device_bytes == (LAYERS - 10) * MIB
    assert mgr.free_bytes == 0
    del taken, more


def test_the_workspace_of_an_operator_finds_room(open_manager):
    n = 2 * MIB
    x, values, indices = take(4 * n).view(torch.float32), take(4 * n).view(torch.float32), take(8 * n).view(torch.int64)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.sort(x, out=(values, indices))
    workspace = torch.cuda.max_memory_allocated() - before
    assert workspace > 16 * MIB
    model = stack(40)
    kept = contents(model)
    mgr = open_manager(budget=torch.cuda.memory_allocated() + 2 * MIB)
    handle = mgr.register("idle", model)
    torch.sort(x, out=(values, indices))
    assert handle.state in {"partial", "host"}
    assert all(map(torch.equal, contents(model), kept))


def test_lowest_rank_leaves_first_and_what_is_in_use_stays(open_manager):
    warm_up()
    models = {name: stack(10) for name in ("llm", "tts", "asr")}
    mgr = open_manager(budget=torch.cuda.memory_allocated())
    handles = {name: mgr.register(name, model, tier=name) for name, model in models.items()}
    with handles["llm"].lease():
        taken = take(12 * MIB)
    assert {name: handle.device_bytes // MIB for name, handle in handles.items()} == {"llm": 10, "tts": 0, "asr": 8}
    del taken


def test_when_even_everything_would_not_do_nothing_moves_and_the_error_has_four_lines(full):
    mgr, model = full
    handle = mgr.register("idle", model)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        take(200 * MIB)
    assert type(caught.value) is torch.OutOfMemoryError
    what, numbers, cause, remedy = str(caught.value).splitlines()
    assert "cuda:0" in what
    assert "200.0 MiB" in what
    assert "The budget is" in numbers
    assert "idle 20.0 MiB" in cause
    assert remedy
    assert handle.state == "device"
    assert mgr.last_error.needed_bytes == 200 * MIB


def test_a_pinned_model_stays_and_the_error_tells_how_to_let_it_leave(full):
    mgr, model = full
    handle = mgr.register("idle", model, pin=True)
    with pytest.raises(torch.OutOfMemoryError, match="%vram unpin idle"):
        take(NEED)
    assert handle.state == "device"


def test_a_managed_call_brings_its_model_back_and_takes_room_from_others(open_manager):
    warm_up()
    first, second = stack(20), stack(20)
    mgr = open_manager(budget=torch.cuda.memory_allocated() - 10 * MIB + 2 * MIB, block_bytes="1MiB")
    handles = mgr.register("first", first), mgr.register("second", second)
    x = torch.randn(2, 512)
    expected = {}
    for name, model in (("first", first), ("second", second)) * 3:
        got = model(x).cpu()
        assert torch.equal(expected.setdefault(name, got), got)
    assert handles[1].state == "device"
    assert handles[0].state == "partial"
    assert mgr.used_bytes <= mgr.budget_bytes


def test_without_a_manager_torch_fails_as_ever(standin):
    mgr = vm.VRAMManager(device="cuda", budget="64MiB")
    mgr.close()
    standin.capacity_bytes = standin.used_bytes + 4 * MIB
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        take(200 * MIB)
