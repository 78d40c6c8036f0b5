"""Weights that an operation is using stay where they are.

Without this a convolution, an LSTM or a matmul in another thread reads freed memory: wrong values, or a dead kernel.
The weights are used directly here, outside any lease, which is how libraries and impatient people use them.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from place import DEVICE, loaded, same_values

import vram_magic as vm
from vram_magic.residency import swap

MIB = 1 << 20


def idle_model(mebibytes: int) -> torch.nn.Module:
    """Linear layers of 1 MiB each that nobody uses."""
    return torch.nn.Sequential(*[torch.nn.Linear(512, 511, device=DEVICE) for _ in range(mebibytes)])


def tighten(mgr: vm.VRAMManager, slack_bytes: int = 0) -> None:
    """Everything resident, and no more free than the slack."""
    for handle in mgr.models.values():
        handle.load()
    mgr.budget_bytes = mgr.used_bytes + slack_bytes
    mgr.reset_peak()


def lstm_of(lstm: torch.nn.LSTM, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    return torch.lstm(x, (state, state), lstm._flat_weights, True, 2, 0.0, False, False, False)[0]


def cases() -> dict[str, tuple[torch.nn.Module, Callable[[torch.nn.Module], torch.Tensor]]]:
    """Operations that allocate while they read a weight."""
    image, sound = torch.randn(2, 64, 64, 64, device=DEVICE), torch.randn(50, 4, 128, device=DEVICE)
    rows, state = torch.randn(2048, 512, device=DEVICE), torch.zeros(2, 4, 256, device=DEVICE)
    return {
        "conv2d": (torch.nn.Conv2d(64, 64, 5, device=DEVICE), lambda m: F.conv2d(image, m.weight, m.bias)),
        "conv_transpose2d": (
            torch.nn.ConvTranspose2d(64, 64, 5, device=DEVICE),
            lambda m: F.conv_transpose2d(image, m.weight, m.bias),
        ),
        "lstm": (torch.nn.LSTM(128, 256, 2, device=DEVICE), lambda m: lstm_of(m, sound, state)),
        "matmul": (torch.nn.Linear(512, 512, device=DEVICE), lambda m: rows @ m.weight),
        "sum of a method": (torch.nn.Linear(512, 512, device=DEVICE), lambda m: m.weight.sum(0)),
    }


@pytest.mark.parametrize("name", list(cases()))
@pytest.mark.parametrize("slack", [0, MIB, 4 * MIB])
def test_an_operation_on_the_weight_of_an_evictable_model_gives_the_right_value(mgr, name, slack):
    torch.manual_seed(0)
    model, operation = cases()[name]
    idle = idle_model(24)
    with torch.no_grad():
        expected = operation(model)
        mgr.register("model", model)
        mgr.register("idle", idle)
        mgr["idle"].load()
        tighten(mgr, slack)
        got = operation(model)
    assert torch.equal(got, expected)
    assert mgr.peak_bytes <= mgr.budget_bytes


@pytest.mark.parametrize("name", list(cases()))
def test_when_only_the_used_weight_is_left_the_allocation_is_refused_and_the_weight_is_whole(mgr, name):
    torch.manual_seed(0)
    model, operation = cases()[name]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        expected = operation(model)
        mgr.register("model", model)
        del expected
        tighten(mgr)
        with contextlib.suppress(torch.OutOfMemoryError):  # right too: what is in use does not leave
            operation(model)
    assert all(same_values(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.timeout(300)
def test_a_matmul_in_another_thread_never_reads_freed_memory(mgr):
    torch.manual_seed(0)
    model, rows = torch.nn.Linear(512, 512, device=DEVICE), torch.randn(256, 512, device=DEVICE)
    with torch.no_grad():
        expected = rows @ model.weight
        mgr.register("model", model)
        mgr.register("idle", idle := idle_model(8))
        tighten(mgr, 4 * MIB)
        wrong: list[object] = []
        done, may_compute = threading.Event(), threading.Event()
        may_compute.set()

        def compute() -> None:
            with torch.no_grad():
                while not done.is_set():
                    if not may_compute.wait(0.1):
                        continue
                    try:
                        if not torch.equal(rows @ model.weight, expected):
                            wrong.append("values")
                    except RuntimeError as error:  # an accelerator's evicted weight lies elsewhere, and torch says so
                        if DEVICE == "cpu" or "same device" not in str(error):
                            wrong.append(error)

        threads = [threading.Thread(target=compute, daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(15):
                taken = torch.empty(8 * MIB, dtype=torch.uint8, device=DEVICE)
                del taken
                mgr["idle"].load()
                loaded(mgr["model"], may_compute)
        finally:
            done.set()
            for thread in threads:
                thread.join()
    assert not wrong
    assert idle is not None


def test_a_live_autograd_graph_keeps_its_weights_and_gives_right_gradients(mgr):
    torch.manual_seed(0)
    model, x = torch.nn.Linear(512, 511, device=DEVICE), torch.randn(4, 512, device=DEVICE)
    model(x).relu().sum().backward()
    expected = model.weight.grad.clone()
    model.weight.grad = model.bias.grad = None
    mgr.register("model", model)
    loss = model(x).relu().sum()
    mgr["model"].evict()
    assert "autograd" in mgr["model"].why()
    loss.backward()
    assert torch.equal(model.weight.grad, expected)
    del loss
    if DEVICE != "cpu":  # a weight elsewhere than its gradient is a trap for optimizers
        mgr["model"].evict()
        assert "it has a gradient" in mgr["model"].why()
        model.zero_grad()
    mgr["model"].evict()
    assert mgr["model"].device_bytes == 0


def test_backward_makes_room_by_itself(mgr):
    model = torch.nn.Linear(1024, 1024, device=DEVICE)  # 4 MiB of weight, so 4 MiB of gradient
    x = torch.randn(64, 1024, device=DEVICE)
    mgr.register("idle", idle := idle_model(8))
    loss = model(x).sum()
    tighten(mgr, MIB)
    loss.backward()
    assert model.weight.grad is not None
    assert mgr["idle"].state == "partial"
    assert mgr.peak_bytes <= mgr.budget_bytes
    assert idle is not None


def test_an_allocation_in_a_thread_makes_room_by_itself(mgr):
    mgr.register("idle", idle := idle_model(8))
    tighten(mgr)
    made: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: made.append(torch.empty(3 * MIB, dtype=torch.uint8, device=DEVICE)))
    thread.start()
    thread.join()
    assert made[0].numel() == 3 * MIB
    assert mgr["idle"].device_bytes < mgr["idle"].total_bytes
    assert idle is not None


def test_an_alias_that_we_do_not_know_keeps_its_block(mgr):
    model = idle_model(2)
    mgr.register("model", model)
    alias = model[0].weight.data
    freed = mgr["model"].evict()
    assert 0 < freed < mgr["model"].total_bytes
    assert mgr["model"].state == "partial"
    assert "another tensor shares its memory" in mgr["model"].why()
    alias.fill_(7)
    assert torch.all(model[0].weight == 7)


def test_an_optimizer_that_rests_does_not_keep_the_weights(mgr):
    model = torch.nn.Linear(512, 511, device=DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mgr.register("model", model)
    assert mgr["model"].evict() == mgr["model"].total_bytes
    assert optimizer.param_groups[0]["params"][0] is model.weight


def test_a_local_variable_keeps_the_weight_from_an_allocation_only(mgr):
    model = torch.nn.Linear(512, 511, device=DEVICE)
    mgr.register("model", model)
    weight = model.weight
    tighten(mgr)
    with pytest.raises(torch.OutOfMemoryError):  # for all that can be known, an operation reads it now
        torch.empty(MIB // 2, dtype=torch.uint8, device=DEVICE)
    assert "Python code" in mgr["model"].why()
    assert mgr["model"].evict() == mgr["model"].total_bytes  # no operation is in progress
    assert weight is model.weight


def test_a_thread_that_wakes_up_for_a_moment_keeps_no_named_weight(mgr, monkeypatch):
    """As the monitor of tqdm, or a kernel's heartbeat, does."""
    model = torch.nn.Linear(512, 511, device=DEVICE)
    weight = model.weight
    awake, calm = threading.Event(), threading.Event()

    def for_a_moment():
        while not calm.is_set():
            awake.set()

    def explained(spans):
        calm.set()  # it was seen awake
        return looked(spans)

    looked = swap.explained
    monkeypatch.setattr(swap, "explained", explained)
    mgr.register("model", model)
    thread = threading.Thread(target=for_a_moment)
    thread.start()
    try:
        assert awake.wait(60)
        assert mgr["model"].evict() == mgr["model"].total_bytes, mgr["model"].why()
    finally:
        woke, _ = calm.is_set(), calm.set()
        thread.join()
    assert woke
    assert weight is model.weight


def test_an_interrupt_during_an_eviction_leaves_all_whole_and_arrives(mgr):
    import _thread

    model = idle_model(4)
    before = [p.detach().clone() for p in model.parameters()]
    mgr.register("model", model, residency="disk")
    tighten(mgr)
    # An idle model's workspace is not asked here, so interrupt from the eviction itself: from its spill.
    store = mgr._torch_models.store
    write = store.write

    def interrupting(parts):
        _thread.interrupt_main()
        return write(parts)

    store.write = interrupting
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012  it arrives at the end of the operation, or soon after
        taken = torch.empty(2 * MIB, dtype=torch.uint8, device=DEVICE)
        assert taken is not None
        for _ in range(10_000):
            pass
    assert all(same_values(a, b) for a, b in zip(model.parameters(), before, strict=True))


def test_a_decision_keeps_no_frame_of_the_user_alive(mgr):
    import weakref

    mgr.register("idle", idle := idle_model(2))

    def local() -> weakref.ref:
        model = torch.nn.Linear(8, 8, device=DEVICE)
        mgr["idle"].evict()
        mgr["idle"].load()
        mgr.plan("1MiB")
        return weakref.ref(model)

    assert local()() is None
    assert idle is not None


@pytest.mark.timeout(180)
def test_a_look_at_all_threads_survives_a_collection_of_thread_locals():
    code = """
import gc, threading
from vram_magic.residency.swap import frames_rest
gc.set_threshold(1)
for _ in range(3000):
    cycle = [threading.local()]
    cycle[0].own = cycle
    cycle.append(cycle)
    del cycle
    frames_rest()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=50)
