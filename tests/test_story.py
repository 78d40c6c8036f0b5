"""The story of a cell, as `%vram log` tells it, and the peaks of several spans at once.

Without these, nobody can tell which cell took the memory, the peak of a cell would be the highest of the day, asking
for it would reset the figures that users read, or the stories would keep models alive.
"""

import asyncio
import gc
import re
import weakref

import pytest
import torch
from place import DEVICE
from torch import nn

import vram_magic as vm
from vram_magic.notebook.story import stories_of
from vram_magic.peaks import Peaks

MIB = 2**20


@pytest.fixture(autouse=True)
def without_the_garbage_of_other_tests():
    gc.collect()  # it would be freed in the middle of what is measured


def tensor_of(size_bytes):
    return torch.zeros(size_bytes, dtype=torch.uint8, device=DEVICE)


# --- peaks ------------------------------------------------------------------------------------------------------------


def test_each_span_has_its_own_peak(mgr):
    peaks, start = mgr.peaks, mgr.used_bytes
    outer = peaks.begin()
    kept = tensor_of(8 * MIB)
    inner = peaks.begin()
    del kept
    other = tensor_of(2 * MIB)
    assert (peaks.end(inner) - start, peaks.end(outer) - start) == (8 * MIB, 8 * MIB)
    last = peaks.begin()
    del other
    assert peaks.end(last) - start == 2 * MIB
    assert mgr.peak_bytes - start == 8 * MIB  # the manager's goes on
    mgr.reset_peak()
    assert mgr.peak_bytes == mgr.used_bytes


def test_a_reset_of_the_whole_leaves_spans_alone(mgr):
    lap, start = mgr.peaks.begin(), mgr.used_bytes
    tensor_of(4 * MIB)
    mgr.reset_peak()
    assert mgr.peaks.end(lap) - start == 4 * MIB
    assert mgr.peak_bytes == mgr.used_bytes


def test_a_ledger_has_spans_too():
    ledger = vm.VRAMManager(total_vram_gb=1.0)
    meter = ledger._core.device.meter
    peaks, lap = Peaks(meter), None
    lap = peaks.begin()
    room = meter.reserve(5 * MIB)
    room.spend(5 * MIB)
    meter.give_back(5 * MIB)
    assert peaks.end(lap) == 5 * MIB
    assert peaks.peak_bytes == 5 * MIB


class Engine:
    async def load(self, model_id):
        self.loaded = True

    async def unload(self, model_id):
        raise OSError("no way")


def test_what_engines_declare_is_in_the_peaks(tmp_path):
    options = {"device": DEVICE, "budget": "1GiB", "spill_dir": tmp_path / "spill"}
    with vm.VRAMManager(**options) as mgr:
        start = mgr.used_bytes
        before = mgr.peaks.begin()
        tensor_of(16 * MIB)
        asyncio.run(mgr.load_model("engine", vram_gb=4 / 1024, backend=Engine()))
        assert mgr.peaks.end(before) - start == 16 * MIB  # it came when that was gone
        lap = mgr.peaks.begin()
        tensor_of(24 * MIB)
        assert mgr.peaks.end(lap) - start == (24 + 4) * MIB
    with vm.VRAMManager(**options) as mgr:  # though it would not go
        assert mgr.used_bytes == start


def test_a_span_that_is_never_ended_is_forgotten(mgr):
    lap = weakref.ref(mgr.peaks.begin())
    assert lap() is None
    mgr.peaks.end(mgr.peaks.begin())


# --- cells ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def cells(notebook):
    notebook.run("%vram budget 40MiB")
    notebook.run("import vram_magic as vm")
    return notebook


def told(notebook):
    return stories_of(notebook.shell)[-1]


def test_a_cell_tells_use_before_after_and_at_most(cells):
    vm.manager().reset_peak()
    before = vm.manager().used_bytes
    cells.run("t = torch.zeros(8 << 20, dtype=torch.uint8, device=DEVICE); del t\n"
              "u = torch.zeros(2 << 20, dtype=torch.uint8, device=DEVICE)")  # fmt: skip
    story = told(cells)
    assert (story.before_bytes, story.after_bytes - before, story.peak_bytes - before) == (before, 2 * MIB, 8 * MIB)
    assert re.match(r"cell \[\d+\], \d+\.\d s: .* in use before, .* after, peak ", str(story))


def test_it_tells_who_left_and_who_came_and_the_log_shows_it(cells):
    cells.run("%load_model a nn.Linear(2048, 2048, bias=False)")
    cells.run("%load_model b nn.Linear(2048, 2048, bias=False)")
    cells.run("c = torch.zeros(20 << 20, dtype=torch.uint8, device=DEVICE)")
    assert [step.model for record in told(cells).records for step in record.left] == ["a"]
    cells.run("del c")
    cells.run("_ = a(torch.zeros(1, 2048, device=DEVICE))")
    story = told(cells)
    assert [(arrival.model, arrival.bytes) for arrival in story.arrivals] == [("a", 16 * MIB)]
    assert story.arrivals[0].ms > 0
    log = cells.run("%vram log")
    assert "  came: a 16.0 MiB (" in log
    assert log.index("left: a") < log.rindex("came: a")
    assert len(re.findall(r"^cell \[", cells.run("%vram log -n 1"), re.MULTILINE)) == 1


def test_a_cell_in_which_nothing_happened_is_not_in_the_log(cells):
    log = cells.run("%vram log")
    cells.run("1 + 1")
    assert cells.run("%vram log") == log


def test_a_decision_outside_of_any_cell_stands_by_itself(cells):
    cells.run("%load_model a nn.Linear(2048, 2048, bias=False)")
    vm.manager()["a"].evict()  # as a thread or a click would
    assert cells.run("%vram log").splitlines()[-1].startswith("evict a: ")


def test_the_cell_that_makes_the_manager_has_a_story(notebook):
    vm.manager().close()
    notebook.run("%vram budget 64MiB\nt = torch.zeros(8 << 20, dtype=torch.uint8, device=DEVICE)")
    story = told(notebook)
    assert story.before_bytes is None
    assert story.peak_bytes >= story.after_bytes >= 8 * MIB


def test_stories_keep_no_model(cells):
    cells.run("%load_model a nn.Linear(2048, 2048, bias=False)")
    gone = weakref.ref(cells.shell.user_ns["a"])
    cells.run("vm.manager()['a'].evict(); a(torch.zeros(1, 2048, device=DEVICE)).sum().item()")
    cells.run("del a")
    cells.shell.run_line_magic("reset", "-f out")
    gc.collect()
    assert gone() is None


def test_stories_are_of_the_loaded_extension(cells):
    assert stories_of(cells.shell)
    cells.run("%unload_ext vram_magic")
    assert stories_of(cells.shell) == []
    assert stories_of(None) == []


# --- working memory ---------------------------------------------------------------------------------------------------


class Busy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(512, 512, device=DEVICE)

    def forward(self, x):
        scratch = torch.zeros(3 * MIB, dtype=torch.uint8, device=DEVICE)
        return self.layer(x) + scratch[0]


def test_what_calls_take_beside_the_weights_is_learned_and_told(mgr):
    net, x = Busy(), torch.zeros(1, 512, device=DEVICE)
    handle = mgr.register("net", net)
    working = handle._managed.working
    assert working.bytes == 0
    assert "beside the weights" not in handle.why()
    handle.evict()
    mgr.reset_peak()
    net(x)  # the weights arrive: before the call is measured
    assert 3 * MIB <= working.bytes < 4 * MIB
    assert f"up to {working.bytes / MIB:.1f} MiB beside the weights" in handle.why()


def test_a_call_in_which_other_weights_arrive_teaches_nothing(mgr):
    inner, x = nn.Linear(1024, 1024, device=DEVICE), torch.zeros(1, 1024, device=DEVICE)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.own = nn.Parameter(torch.zeros(4, device=DEVICE))

        def forward(self, x):
            return inner(x)

    outer = Outer()
    mgr.register("inner", inner).evict()
    handle = mgr.register("outer", outer)
    outer(x)
    assert mgr["inner"].state == "device"
    assert handle._managed.working.bytes == 0
