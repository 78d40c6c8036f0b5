"""The native guard: every allocation is counted and limited, exactly, and nothing of it stays after `close`.

Without this a tensor of exactly the free bytes would be refused, or one beyond the budget let through.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

import vram_magic as vm

MIB = 1 << 20


@pytest.fixture
def mgr(tmp_path) -> Iterator[vm.VRAMManager]:
    manager = vm.VRAMManager(device="cpu", budget="1GiB", block_bytes="1MiB", spill_dir=tmp_path)
    assert manager.guard == "native"
    yield manager
    manager.close()


def of(size_bytes: int) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8)


def test_allocations_are_counted_to_the_byte(mgr):
    before = mgr.used_bytes
    taken = of(12345)
    assert mgr.used_bytes == before + 12345
    del taken
    assert mgr.used_bytes == before


def test_exactly_the_free_bytes_can_be_had_and_one_more_cannot(mgr):
    mgr.budget_bytes = mgr.used_bytes + 4 * MIB
    taken = of(mgr.free_bytes)
    assert mgr.free_bytes == 0
    with pytest.raises(torch.OutOfMemoryError):
        of(1)
    assert mgr.peak_bytes == mgr.budget_bytes
    del taken


def test_the_error_of_a_bare_allocation_is_torchs_own_with_our_four_lines(mgr):
    mgr.budget_bytes = mgr.used_bytes + 4 * MIB
    with pytest.raises(torch.OutOfMemoryError) as caught:
        of(5 * MIB)
    assert type(caught.value) is torch.OutOfMemoryError
    what, numbers, cause, remedy = str(caught.value).splitlines()
    assert "needs 5.0 MiB" in what
    assert "4.0 MiB of it are free" in numbers
    assert cause.startswith("Held by:")
    assert "%vram" in remedy
    assert mgr.last_error.needed_bytes == 5 * MIB
    assert mgr.last_error.budget_bytes == mgr.budget_bytes


def test_weights_from_before_the_first_manager_are_adopted_when_registered():
    code = """
import torch
early = torch.nn.Linear(512, 512, bias=False)
import vram_magic as vm
mgr = vm.VRAMManager(device="cpu", budget="1GiB")
assert mgr.used_bytes == 0, mgr.used_bytes
handle = mgr.register("early", early)
assert mgr.used_bytes == handle.total_bytes == 512 * 512 * 4, mgr.used_bytes
assert handle.evict() == handle.total_bytes
assert mgr.used_bytes == 0, mgr.used_bytes
handle.load()
del early
assert mgr.used_bytes == 0, mgr.used_bytes
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_resize_and_factory_functions_are_limited_too(mgr):
    small = of(16)
    mgr.budget_bytes = mgr.used_bytes + MIB
    for ask in (lambda: small.resize_(2 * MIB), lambda: torch.zeros(2 * MIB), lambda: torch.ones(4).repeat(MIB)):
        with pytest.raises(torch.OutOfMemoryError):
            ask()
    assert small.untyped_storage().nbytes() == 16


def test_threads_never_pass_the_budget(mgr):
    mgr.budget_bytes = mgr.used_bytes + 16 * MIB
    mgr.reset_peak()

    def hammer() -> None:
        for _ in range(300):
            try:
                taken = of(3 * MIB)
                del taken
            except torch.OutOfMemoryError:
                pass

    threads = [threading.Thread(target=hammer) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert mgr.peak_bytes <= mgr.budget_bytes


def test_reserved_room_is_kept_for_the_body_and_given_back(mgr):
    mgr.budget_bytes = mgr.used_bytes + 8 * MIB
    refused = []

    def other() -> None:
        try:
            of(6 * MIB)
        except torch.OutOfMemoryError:
            refused.append(True)

    with mgr.reserve("4MiB"):
        assert mgr.free_bytes >= 4 * MIB
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        taken = of(4 * MIB)
    assert refused == [True]
    more = of(4 * MIB)
    assert mgr.free_bytes == 0
    del taken, more


def test_after_close_torch_has_its_own_allocator_back(tmp_path):
    mgr = vm.VRAMManager(device="cpu", budget="8MiB", spill_dir=tmp_path)
    kept = of(MIB)
    mgr.close()
    assert of(64 * MIB).numel() == 64 * MIB
    used = mgr.used_bytes
    del kept
    assert mgr.used_bytes == used - MIB


def test_a_second_manager_puts_in_one_guard_not_two(tmp_path):
    for _ in range(3):
        mgr = vm.VRAMManager(device="cpu", budget="1GiB", spill_dir=tmp_path)
        before = mgr.used_bytes
        taken = of(1000)
        assert mgr.used_bytes == before + 1000
        del taken
        mgr.close()


def test_a_forked_child_runs_without_the_guard_and_with_true_weights(mgr):
    model, x = torch.nn.Embedding(256, 256), torch.tensor([3, 4])  # no BLAS: its threads do not survive a fork
    with torch.no_grad():
        expected = model(x)
    handle = mgr.register("model", model)
    handle.evict()
    mgr.budget_bytes = mgr.used_bytes + MIB
    child = os.fork()
    if child == 0:
        with torch.no_grad():
            right = torch.equal(model(x), expected) and of(2 * MIB).numel() == 2 * MIB
        os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert handle.state == "host"  # the child's end took no file of ours away
    handle.load()
    with torch.no_grad():
        assert torch.equal(model(x), expected)


def test_without_a_compiler_room_is_made_at_managed_calls_and_the_report_says_so(tmp_path):
    code = """
import torch
import vram_magic as vm
mgr = vm.VRAMManager(device="cpu", budget="9MiB", block_bytes="1MiB")
assert mgr.guard.startswith("none: no C++ compiler"), mgr.guard
a, b = (torch.nn.Sequential(*[torch.nn.Linear(512, 512, bias=False) for _ in range(6)]) for _ in range(2))
x = torch.randn(2, 512)
with torch.no_grad():
    expected = a(x), b(x)
    first = mgr.register("a", a)
    assert mgr.used_bytes == first.device_bytes == 6 << 20
    first.evict()
    assert mgr.used_bytes == 0
    second = mgr.load("b", b)
    assert torch.equal(a(x), expected[0])
    assert (first.state, second.state) == ("device", "partial")
    assert mgr.used_bytes == 9 << 20
    assert torch.equal(b(x), expected[1])
    with mgr.reserve("4MiB"):
        assert mgr.free_bytes >= 4 << 20
del a
assert "a" not in mgr
mgr["b"].evict()
assert mgr.used_bytes == 0, mgr.used_bytes
mgr.close()
"""
    environment = dict(os.environ, PATH="", XDG_CACHE_HOME=str(tmp_path), TMPDIR=str(tmp_path))
    environment.pop("CXX", None)
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
