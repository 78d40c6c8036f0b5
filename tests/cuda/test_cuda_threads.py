"""Six threads allocate, free, call models, edit, evict, load and ask for figures at once: none hangs, nothing is lost.

Callbacks under the allocator's lock hang here within seconds, when another thread assigns `param.data` or asks
`memory_allocated()`. A hang prints all stacks.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

import pytest
import torch
from helpers import MIB, contents, stack, take, warm_up
from torch import nn

pytestmark = [pytest.mark.timeout(200), pytest.mark.usefixtures("watchdog")]

THREADS, ROUNDS = 6, 40


@pytest.fixture
def switching():
    """Threads are switched as often as Python can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def in_threads(work: Callable[[int], None], count: int = THREADS) -> None:
    """Runs ``work(number)`` in so many threads at once; the first error is raised."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(count)

    def run(number: int) -> None:
        barrier.wait()
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def allocated(number: int, rounds: int = ROUNDS) -> int:
    """Allocates and frees, the last few tensors held; returns how many were refused.

    The sizes are such that torch splits its blocks exactly: what it does not split, up to 1 MiB, it counts as used.
    """
    choose, refused, held = random.Random(number), 0, deque(maxlen=3)
    for _ in range(rounds):
        try:
            held.append(take(choose.choice([512, MIB // 2, 2 * MIB, 4 * MIB, 10 * MIB])))
            own = nn.Parameter(take(MIB), requires_grad=False)
            own.data = torch.empty(1)
            del own
        except torch.OutOfMemoryError:
            refused += 1
            held.clear()
        torch.cuda.memory_allocated()
    return refused


@pytest.mark.usefixtures("switching")
def test_six_threads_never_hang_and_the_ledger_is_torchs(open_manager):
    warm_up()
    models = [stack(8) for _ in range(3)]
    before = [contents(model) for model in models]
    x = torch.randn(2, 512).cuda()
    expected = [model(x).cpu() for model in models]
    budget = torch.cuda.memory_allocated() + 4 * MIB
    mgr = open_manager(budget=budget)
    handles = [
        mgr.register(f"m{i}", model, residency=r)
        for i, (model, r) in enumerate(zip(models, ("auto", "host", "disk"), strict=True))
    ]
    mgr.reset_peak()

    def work(number: int) -> None:
        if number < 3:
            allocated(number)
            return
        for turn in range(ROUNDS // 2):
            time.sleep(0.005)  # a model that is always in use can never leave
            try:
                assert torch.equal(models[number - 3](x).cpu(), expected[number - 3])
                if turn % 4 == 3:
                    handles[number - 3].evict()
            except torch.OutOfMemoryError:
                continue

    in_threads(work)
    assert mgr.used_bytes == torch.cuda.memory_allocated()
    assert mgr.peak_bytes <= budget
    assert any(step.stage == "pass 1" for record in mgr.journal for step in record.left)
    for model, values, y in zip(models, before, expected, strict=True):
        assert all(map(torch.equal, contents(model), values))
        assert torch.equal(model(x).cpu(), y)


@pytest.mark.usefixtures("switching")
def test_six_threads_on_a_full_device_all_get_their_memory_while_models_can_leave(open_manager, standin):
    models = [stack(6) for _ in range(THREADS)]
    before = [contents(model) for model in models]
    mgr = open_manager(budget="10GiB")
    handles = [mgr.register(f"m{i}", model) for i, model in enumerate(models)]
    torch.cuda.empty_cache()
    standin.capacity_bytes = standin.used_bytes + 2 * MIB
    standin.delay_mallocs(500)

    def work(number: int) -> None:
        kept = [take(MIB) for _ in range(4)]
        torch.cuda.memory_allocated()
        assert len(kept) == 4

    in_threads(work)
    assert sum(handle.device_bytes for handle in handles) < THREADS * 6 * MIB
    assert standin.counts()["ooms"] > 0
    for model, values in zip(models, before, strict=True):
        assert all(map(torch.equal, contents(model), values))


@pytest.mark.usefixtures("switching")
def test_threads_never_pass_the_budget(open_manager):
    budget = torch.cuda.memory_allocated() + 16 * MIB
    mgr = open_manager(budget=budget)
    mgr.reset_peak()
    refused = []
    in_threads(lambda number: refused.append(allocated(number, 4 * ROUNDS)))
    assert sum(refused) > 0
    assert mgr.peak_bytes <= budget
    assert mgr.used_bytes == torch.cuda.memory_allocated()


@pytest.mark.usefixtures("switching")
def test_edits_of_other_threads_survive_evictions(open_manager):
    model = stack(2)
    mgr = open_manager()
    handle = mgr.register("edited", model)
    last = torch.zeros(512, 512)
    done = threading.Event()

    def edit(number: int) -> None:
        if number:
            try:
                for _ in range(ROUNDS):
                    handle.evict()
                    handle.load()
            finally:
                done.set()
            return
        while not done.is_set():
            time.sleep(0.001)  # who writes all the time leaves no moment between a read and the replacement
            last.add_(1)
            model[0].weight.copy_(last)  # a copy: kernels do nothing here

    in_threads(edit, 2)
    assert torch.equal(model[0].weight.cpu(), last)
    assert last[0, 0] > 0
