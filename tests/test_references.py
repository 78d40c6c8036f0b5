"""References that keep memory alive: the notebook's own, a handler's, and ours.

Without this a model that was shown once stays on the device for ever, a retry fails for the tensors of the first
attempt, memory that nobody freed is reported as freed, or one of our own callbacks keeps what the user has deleted.
"""

import gc
import re
import sys
import types
import weakref

import pytest
import torch
from place import DEVICE

import vram_magic as vm
from vram_magic.notebook import doctor

MIB = 2**20


@pytest.fixture(autouse=True)
def without_the_garbage_of_other_tests():
    gc.collect()


def used_bytes():
    return vm.manager().used_bytes


# ------------------------------------------------------------------------------------------------------ Out and _


def test_a_model_that_was_shown_leaves_the_device_although_out_still_has_it(notebook):
    notebook.run("%load_model llm build")
    notebook.run("llm")
    before = used_bytes()
    assert notebook.run("%vram evict llm") == "freed 4.0 MiB\n"
    assert before - used_bytes() == 4 * MIB
    assert vm.manager()["llm"].device_bytes == 0
    assert notebook["Out"][max(notebook["Out"])] is notebook["llm"]


def test_a_model_that_was_shown_and_deleted_can_still_be_evicted(notebook):
    notebook.run("%load_model llm build")
    notebook.run("llm")
    notebook.run("del llm")
    assert notebook.run("%vram evict llm") == "freed 4.0 MiB\n"
    assert vm.manager()["llm"].device_bytes == 0


def test_once_forgotten_the_doctor_names_the_result_that_keeps_it(notebook):
    notebook.run("%load_model llm build")
    notebook.run("llm")
    number = max(notebook["Out"])
    notebook.run("%vram forget llm\ndel llm")
    shown = notebook.run("%vram doctor")
    assert f"4.0 MiB  Out[{number}]" in shown
    before = used_bytes()
    notebook.run(f"%xdel _{number}")
    assert before - used_bytes() == 4 * MIB


def test_loading_and_reporting_put_no_module_into_out(notebook):
    notebook.run("%load_model llm build")
    for line in ("%vram", "%vram doctor", "%vram why llm", "vram_magic.manager()['llm']"):
        notebook.run(f"import vram_magic\n{line}")
    assert len(notebook["Out"]) >= 2
    assert not any(isinstance(value, torch.nn.Module) for value in notebook["Out"].values())
    model = weakref.ref(notebook["llm"])
    notebook.run("del llm")
    assert model() is None


def test_eviction_does_not_depend_on_the_references_that_reset_leaves(notebook):
    notebook.run("%load_model llm build")
    before = used_bytes() - 4 * MIB
    notebook.run("llm")
    notebook.run("del llm\n%reset -f out")
    gc.collect()
    assert any(isinstance(value, torch.nn.Module) for value in notebook.shell.user_ns_hidden.values())
    notebook.run("%vram evict llm")
    assert used_bytes() == before


# ----------------------------------------------------------------------------------------------------- failed calls


def test_the_last_traceback_is_measured_and_dropped_only_when_asked(notebook):
    notebook.run(
        "import weakref\ndef step():\n    global seen\n    batch = torch.ones(2**20, device=DEVICE)\n"
        "    seen = weakref.ref(batch)\n    raise ValueError('no')"
    )
    notebook.fail("step()")
    notebook.run("import gc; gc.collect();")
    assert notebook["seen"]() is not None
    assert sys.last_value.args == ("no",)
    assert re.search(r"4\.0 MiB  the failed step\(\): batch +%vram doctor --free", notebook.run("%vram doctor"))
    assert notebook["seen"]() is not None
    assert notebook.run("%vram doctor --free").startswith("freed 4.0 MiB")
    assert notebook["seen"]() is None


def test_our_own_retry_runs_outside_the_handler_of_the_first_attempt(mgr, monkeypatch):
    """The memory for a load is refused once, as by a fragmented device."""
    model = torch.nn.Linear(512, 512, bias=False, device=DEVICE)
    handle = mgr.register("model", model)
    handle.evict()
    attempts = []
    allocate = mgr._core.device.allocate

    def once_refused(size_bytes, reservation):
        attempts.append((sys.exc_info(), [seen() for seen in first]))
        if len(attempts) == 1:
            batch = torch.empty(2**18)
            first.append(weakref.ref(batch))
            raise torch.OutOfMemoryError("fragmented")
        return allocate(size_bytes, reservation)

    first = []
    monkeypatch.setattr(mgr._core.device, "allocate", once_refused)
    handle.load()
    assert attempts == [((None, None, None), []), ((None, None, None), [None])]
    assert handle.state == "device"


def test_a_refused_call_that_was_caught_leaves_nothing_behind(mgr):
    mgr.budget_bytes = mgr.used_bytes + 8 * MIB
    before = mgr.used_bytes

    def attempt():
        batch = torch.ones(2**20, device=DEVICE)
        seen.append(weakref.ref(batch))
        return torch.empty(2**24, device=DEVICE)

    seen, failed = [], False
    gc.disable()
    try:
        try:
            attempt()
        except torch.OutOfMemoryError:
            failed = True
        assert failed
        assert seen[0]() is None
        assert mgr.used_bytes == before
    finally:
        gc.enable()


# ------------------------------------------------------------------------------------------------- our own callbacks


def test_nothing_of_ours_keeps_a_model_that_the_user_deleted(notebook):
    notebook.run("%load_model llm build\nh = __import__('vram_magic').manager()['llm']")
    notebook.run("llm(torch.ones(1, 512, device=DEVICE)); import gc")
    for line in ("%vram", "%vram evict llm", "%vram load llm", "%vram plan 63MiB", "%vram doctor", "%vram log", "pass"):
        notebook.run(line)
    model = weakref.ref(notebook["llm"])
    notebook.run("del llm; gc.collect();")
    assert model() is None


def test_nothing_of_ours_keeps_a_model_that_was_forgotten(notebook):
    notebook.run("%load_model llm build\n%vram evict llm\n%vram forget llm")
    model = weakref.ref(notebook["llm"])
    notebook.run("del llm\nimport gc; gc.collect();")
    assert model() is None


def test_a_handler_of_the_users_that_closes_over_a_model_does_not_keep_its_bytes(notebook):
    notebook.run("%load_model llm build\nhandler = (lambda model: lambda: model)(llm); del llm")
    before = used_bytes()
    notebook.run("%vram evict llm")
    assert before - used_bytes() == 4 * MIB
    assert notebook["handler"]() is vm.manager()["llm"].model


def test_each_callback_runs_once_for_a_cell_however_often_the_extension_was_loaded(bare_notebook, monkeypatch):
    calls = []
    monkeypatch.setattr("vram_magic.notebook.events.open_manager", lambda: calls.append(1))
    for line in ("load_ext", "unload_ext", "load_ext", "reload_ext"):
        bare_notebook.run(f"%{line} vram_magic")
    calls.clear()
    bare_notebook.run("pass")
    assert len(calls) == 2  # one before and one after
    bare_notebook.run("%unload_ext vram_magic")
    calls.clear()
    bare_notebook.run("pass")
    assert not calls


# --------------------------------------------------------------------------------------------------- other holders


def test_what_is_reported_as_freed_is_what_came_free(notebook):
    notebook.run("%load_model llm lambda: build(3)\n%load_model tts build")
    notebook.run("alias = llm[1].weight.data")
    before = used_bytes()
    shown = notebook.run("%vram evict llm tts")
    freed = before - used_bytes()
    assert freed == 4 * MIB  # the layers of llm are one block, and a block leaves whole
    assert shown.splitlines() == ["freed 4.0 MiB", "llm keeps 3.0 MiB on the device; see: %vram why llm"]
    assert vm.manager()["llm"].device_bytes == 3 * MIB
    assert sum(step.bytes for record in vm.manager().journal for step in record.left) == freed
    assert "not everything went along" in notebook.run("%vram why llm")


def test_what_a_package_keeps_in_its_globals_is_unmanaged_and_the_sum_is_right(notebook, monkeypatch):
    package = types.ModuleType("speech")
    monkeypatch.setitem(sys.modules, "speech", package)
    code = """
import torch
_helpers = {}
class Speech(torch.nn.Module):
    def __init__(self, device):
        super().__init__()
        self.layer = torch.nn.Linear(512, 512, bias=False, device=device)
    def forward(self, x):
        if "vad" not in _helpers:
            _helpers["vad"] = torch.nn.Linear(512, 1024, bias=False, device=x.device)
        return self.layer(x)
"""
    exec(code, vars(package))
    notebook.run("import speech\n%load_model asr speech.Speech(DEVICE)")
    with torch.no_grad():
        notebook.run("asr(torch.ones(1, 512, device=DEVICE));")
    before = doctor.examine(notebook.shell, vm.manager())
    notebook.run("%vram evict asr")
    after = doctor.examine(notebook.shell, vm.manager())
    assert (before.managed_bytes, after.managed_bytes) == (MIB, 0)
    for found in (before, after):
        assert found.explained_bytes - found.used_bytes < MIB  # what other tests' modules made before the manager
        assert found.explained_bytes >= found.used_bytes
        assert any("512" in finding.holder and finding.size_bytes >= 2 * MIB for finding in found.findings)
    assert re.search(r"other tensors: [23]\.\d MiB", notebook.run("%vram"))  # and small change of other tests
    gone = weakref.ref(package.Speech)
    del before, after, found
    vars(package).clear()
    notebook.run("del asr, speech")
    gc.collect()
    assert gone() is None  # a class that nobody uses any more is not kept by us
