"""The essential of the guard in one process, for the settings that a process gets only at its start.

Run by the tests with an allocator's options, or with the guard's second way, in the environment. Fails by an assertion;
its last line is the way in which allocations were noticed.

    python tests/cuda/standin.py python tests/cuda/scenario.py [early]     early: tensors from before the manager
"""

from __future__ import annotations

import faulthandler
import gc
import sys
import threading

import torch
from helpers import MIB, contents, stack, take, warm_up
from standin import Standin

import vram_magic as vm


def evicts_for_the_same_call(mgr: vm.VRAMManager, standin: Standin) -> None:
    """First because of the budget, then because the device is full."""
    model = stack(20)
    before, x = contents(model), torch.randn(2, 512).cuda()
    expected = model(x).cpu()
    handle = mgr.register("idle", model)
    mgr.budget_bytes = mgr.used_bytes + 4 * MIB
    taken = take(12 * MIB)
    assert handle.state == "partial", handle.why()
    assert all(map(torch.equal, contents(model), before))
    del taken
    handle.load()
    mgr.budget_bytes = "10GiB"
    torch.cuda.empty_cache()
    standin.capacity_bytes = standin.used_bytes + 4 * MIB
    taken = take(12 * MIB)
    assert handle.state == "partial", handle.why()
    assert standin.counts()["ooms"] > 0
    del taken
    standin.reset()
    assert torch.equal(model(x).cpu(), expected)
    assert all(map(torch.equal, contents(model), before))


def never_passes_the_budget(mgr: vm.VRAMManager) -> None:
    """With six threads that allocate, free and look."""
    mgr.budget_bytes = mgr.used_bytes + 12 * MIB
    mgr.reset_peak()

    def hammer() -> None:
        for _ in range(30):
            try:
                taken = take(3 * MIB)
                torch.cuda.memory_allocated()
                del taken
            except torch.OutOfMemoryError:
                pass

    threads = [threading.Thread(target=hammer) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert mgr.peak_bytes <= mgr.budget_bytes
    assert mgr.used_bytes == torch.cuda.memory_allocated()


def covers_what_was_made_before(mgr: vm.VRAMManager, early: torch.Tensor | None) -> None:
    """A tensor from before the manager grows under its limit."""
    if early is None:
        return
    mgr.budget_bytes = mgr.used_bytes + 4 * MIB
    try:
        early.resize_(64 * MIB)
    except torch.OutOfMemoryError:
        return
    raise AssertionError("resize_ of an older tensor went around the guard")


def leaves_nothing_behind(mgr: vm.VRAMManager) -> None:
    """After `close` there is no limit, and a manager that is opened again asks once."""
    mgr.budget_bytes = mgr.used_bytes + 4 * MIB
    mgr.close()
    taken = take(40 * MIB)
    del taken
    for _ in range(3):
        again = vm.VRAMManager(device="cuda", budget=torch.cuda.memory_allocated() + 4 * MIB)
        try:
            take(40 * MIB)
        except torch.OutOfMemoryError:
            assert len(again.journal) == 1
        else:
            raise AssertionError("the budget was passed")
        again.close()


def main() -> None:
    faulthandler.dump_traceback_later(100, exit=True)
    early = take(MIB) if "early" in sys.argv else None
    standin = Standin()
    mgr = vm.VRAMManager(device="cuda", budget="10GiB", block_bytes="1MiB")
    way = mgr.guard
    warm_up()
    evicts_for_the_same_call(mgr, standin)
    gc.collect()
    never_passes_the_budget(mgr)
    if "forwarding" not in way:  # tensors keep the allocator object that made them
        covers_what_was_made_before(mgr, early)
    leaves_nothing_behind(mgr)
    print(way)


if __name__ == "__main__":
    main()
