"""Small cases of public bug reports: faults in the middle of a load, what never fits, and what becomes of cells.

Without these, an error leaves a model half loaded or a lock behind, everybody leaves for one that cannot fit, or a cell
that ended oddly spoils the ones after it. Each test names the report that it is about.
"""

from __future__ import annotations

import os
import threading

import pytest
import torch
from place import DEVICE
from torch import nn

import vram_magic as vm
from vram_magic.residency.arriving import Arriving

MIB = 1 << 20


@pytest.fixture
def manager_options():
    return {"block_bytes": "64KiB", "host_budget": 0}


def stack(layers: int) -> nn.Sequential:
    """Layers of 1 MiB."""
    return nn.Sequential(*[nn.Linear(512, 512, bias=False, device=DEVICE) for _ in range(layers)])


# case: failed-promote-unlock
@torch.no_grad()
@pytest.mark.parametrize(
    "fault", [torch.OutOfMemoryError("injected"), RuntimeError("injected"), OSError(5, "injected")], ids=repr
)
def test_a_load_that_fails_at_its_third_weight_leaves_the_model_out_and_tells_the_cause(mgr, monkeypatch, fault):
    model, x = stack(5), torch.ones(2, 512, device=DEVICE)
    expected = model(x)
    handle = mgr.register("model", model)
    handle.evict()
    used, fetch, calls = mgr.used_bytes, Arriving._fetch, []

    def failing(self, item):
        calls.append(1)
        if len(calls) >= 3:
            raise fault
        return fetch(self, item)

    with monkeypatch.context() as patch:
        patch.setattr(Arriving, "_fetch", failing)
        with pytest.raises(type(fault)) as raised:
            model(x)
        chain, error = [], raised.value
        while error is not None:
            chain.append(error)
            error = error.__cause__ or error.__context__
        assert fault in chain
        del chain, error, raised
    fault.__traceback__ = None
    assert len(calls) >= 3
    assert (handle.device_bytes, handle.in_use, handle._managed.moving) == (0, False, "")
    assert mgr.used_bytes == used
    assert torch.equal(model(x), expected)
    assert handle.state == "device"


# case: evict-deadlock
@torch.no_grad()
@pytest.mark.parametrize("move", ["evict", "load"])
def test_while_one_model_waits_for_the_disk_all_others_can_be_used(mgr, monkeypatch, move):
    slow, other, x = stack(2), stack(2), torch.ones(2, 512, device=DEVICE)
    expected = slow(x), other(x)
    handles = mgr.register("slow", slow), mgr.register("other", other)
    if move == "load":
        handles[0].evict()
    name = "pwrite" if move == "evict" else "preadv"
    started, go, access = threading.Event(), threading.Event(), getattr(os, name)

    def waiting(*call):
        started.set()
        assert go.wait(60)
        return access(*call)

    with monkeypatch.context() as patch:
        patch.setattr(os, name, waiting)
        mover = threading.Thread(target=getattr(handles[0], move))
        mover.start()
        try:
            assert started.wait(60)
            # On this thread: a lock that the mover holds would keep it here, until the test's time is over.
            assert torch.equal(other(x), expected[1])
            with handles[1].lease() as model:
                assert model is other
                assert handles[1].in_use
            assert not handles[1].in_use
            assert list(mgr.models) == ["slow", "other"]
            assert mover.is_alive()
        finally:
            go.set()
            mover.join(60)
    assert not mover.is_alive()
    assert handles[0].device_bytes == (0 if move == "evict" else 2 * MIB)
    assert torch.equal(slow(x), expected[0])


# case: too-big-model
@torch.no_grad()
def test_what_fits_alone_but_not_with_its_working_memory_is_refused_and_nobody_leaves(mgr):
    giant, large = stack(12), stack(9)
    for name, model in (("giant", giant), ("large", large)):
        mgr.register(name, model).evict()
    idle = stack(4)
    mgr.register("idle", idle)
    mgr.budget_bytes = mgr.used_bytes - 4 * MIB + 10 * MIB
    used = mgr.used_bytes
    with pytest.raises(vm.VRAMOutOfMemoryError) as refused:
        mgr["giant"].load()
    assert (refused.value.needed_bytes, refused.value.free_bytes) == (12 * MIB, 6 * MIB)
    del refused  # its traceback would keep the models for the tests that follow
    with mgr.reserve(2 * MIB):  # the working memory
        with pytest.raises(vm.VRAMOutOfMemoryError):
            mgr["large"].load()
        assert (mgr["idle"].state, mgr["large"].device_bytes, mgr.used_bytes) == ("device", 0, used)
    mgr["large"].load()
    assert (mgr["large"].state, mgr["idle"].device_bytes) == ("device", MIB)


LEAVES = "x = torch.empty(62 * 2**18, device=DEVICE)"
CELLS = {
    "empty": ("", True),
    "blank": ("   \n", True),
    "a syntax error": ("this is no Python", False),
    "an error": ("1 / 0", False),
    "an interrupt": ("raise KeyboardInterrupt", False),
    "an exit": ("raise SystemExit", False),
    "a nested cell": (f"_ = get_ipython().run_cell({LEAVES!r}); del _", True),
    "a nested error": ("_ = get_ipython().run_cell('1 / 0'); del _", True),
    "await": (f"import asyncio\nawait asyncio.sleep(0)\n{LEAVES}", True),
    "another's callback that raises": (
        "def bad(*_): raise ValueError('bad')\nget_ipython().events.register('post_run_cell', bad)", True
    ),
}  # fmt: skip


# case: cell-hook-semantics
@pytest.mark.filterwarnings("ignore:To exit. use")
@pytest.mark.parametrize("kind", CELLS)
def test_whatever_becomes_of_a_cell_the_next_ones_are_told_of_their_own_departures_only(notebook, kind):
    notebook.run("%load_model tiny build")
    cell, succeeds = CELLS[kind]
    shown = (notebook.run if succeeds else notebook.fail)(cell)
    assert shown.count("vram_magic: tiny left (") == (LEAVES in cell)
    notebook.shell.run_cell(
        "get_ipython().events.unregister('post_run_cell', bad)" if "bad" in notebook.shell.user_ns else "1;"
    )
    notebook.run("x = None\n%vram load tiny")
    assert "left" not in notebook.run("1;")
    assert notebook.run(LEAVES).count("vram_magic: tiny left (") == 1
    assert "left" not in notebook.run("1;")
    assert not vm.manager()["tiny"].in_use


# case: cell-hook-semantics
def test_an_empty_cell_repeats_nothing(notebook):
    notebook.run("%load_model tiny build")
    assert notebook.run(LEAVES).count("vram_magic: tiny left (") == 1
    assert notebook.run("") == ""
