"""Handing models back, and threads of ours that wait: what is done at the end must not hang, lose or take anything.

Without these one failure while the manager closes leaves every other model waiting for threads that are gone, an edit
made in that moment is lost, RAM that is not there is taken, or the panel's waiting thread keeps models from leaving.
"""

import os
import threading
import time

import pytest
import torch
from place import DEVICE, same_values
from torch import nn

from vram_magic.core import Core
from vram_magic.notebook.panel.clicks import Clicks
from vram_magic.residency import leaving
from vram_magic.residency.swap import frames_rest

MIB = 2**20


@pytest.fixture
def manager_options():
    return {"block_bytes": "1MiB", "host_budget": 0}


def stack(layers=2):
    return nn.Sequential(*[nn.Linear(512, 512, bias=False, device=DEVICE) for _ in range(layers)]).requires_grad_(
        requires_grad=False
    )


def answered(clicks):
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if answers := clicks.answers():
            return answers
        time.sleep(0.01)
    raise AssertionError("no answer")


def test_a_thread_that_waits_for_clicks_rests(mgr):
    model = stack()
    handle = mgr.register("model", model)
    clicks = Clicks(lambda: mgr)
    clicks.take({"id": 1, "kind": "pin", "name": "model"})
    clicks.take({"id": 2, "kind": "unpin", "name": "model"})
    numbers = []
    while 2 not in numbers:
        numbers += [answer.id for answer in answered(clicks)]
    end = time.monotonic() + 60
    while not frames_rest() and time.monotonic() < end:
        time.sleep(0.01)
    weight = model[0].weight  # named by a frame that rests
    assert handle.evict() == 2 * MIB, handle.why()
    assert weight is model[0].weight
    clicks.close()


def test_a_failure_while_one_model_is_handed_back_keeps_no_other_from_it(mgr, monkeypatch):
    models = {name: stack() for name in "abc"}
    values = {name: [p.cpu().clone() for p in model.parameters()] for name, model in models.items()}
    for name, model in models.items():
        mgr.register(name, model).evict()
    forget = Core.forget

    def failing(core, model):
        if model.name == "a":
            raise KeyboardInterrupt
        forget(core, model)

    with monkeypatch.context() as patch:
        patch.setattr(Core, "forget", failing)
        with pytest.raises(KeyboardInterrupt):
            mgr.close()
    for name, model in models.items():
        x = torch.ones(1, 512, device=model[0].weight.device)
        assert model(x).isfinite().all()  # and does not wait for threads that are gone
        assert all(same_values(p, value) for p, value in zip(model.parameters(), values[name], strict=True))
    assert not mgr._guard or not mgr._guard.installed


@pytest.mark.simulation_only
def test_what_is_written_while_a_weight_gets_ram_of_its_own_stays(mgr, monkeypatch):
    model = stack(1)
    handle = mgr.register("model", model, residency="disk")
    handle.evict()
    replace, written = leaving.replace, []

    def and_write(*args, **more):
        done = replace(*args, **more)
        if done and not written:
            written.append(1)
            thread = threading.Thread(target=lambda: model[0].weight.fill_(7.0))
            thread.start()
            thread.join()
        return done

    monkeypatch.setattr(leaving, "replace", and_write)
    handle.forget()
    assert written
    assert (model[0].weight == 7).all()


@pytest.mark.simulation_only
def test_without_ram_what_is_handed_back_stays_in_its_mapping(mgr, monkeypatch):
    model = stack(2)
    values = [p.cpu().clone() for p in model.parameters()]
    handle = mgr.register("model", model, residency="disk")
    handle.evict()
    monkeypatch.setattr(leaving, "available_ram_bytes", lambda: 0)
    made = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: made.append(a) or empty(*a, **k))
    handle.forget()
    assert (MIB,) not in made
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), values, strict=True))


def test_a_branch_that_two_models_share_stays_a_way_in_when_one_is_forgotten(mgr):
    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(512, 512, device=DEVICE)

        def forward(self, x):
            seen.append(mgr["b"].in_use if "b" in mgr else None)
            return self.layer(x)

    class Model(nn.Module):
        def __init__(self, branch):
            super().__init__()
            self.branch, self.head = branch, nn.Linear(512, 8, device=DEVICE)

        def forward(self, x):
            return self.head(self.branch(x))

    seen, branch = [], Branch()
    a, b = Model(branch), Model(branch)
    mgr.register("a", a)
    handle = mgr.register("b", b)
    mgr["a"].forget()
    x = torch.ones(1, 512, device=DEVICE)
    expected = branch(x)
    handle.evict()
    assert same_values(branch(x), expected)
    assert seen == [True, True]
    assert a is not b


@pytest.mark.cpu_only("fork")
def test_a_forked_child_waits_for_no_lock_of_peaks(mgr):
    held, go = threading.Event(), threading.Event()

    def hold():
        with mgr.peaks._lock:
            held.set()
            go.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    pid = os.fork()
    if pid == 0:
        _ = mgr.peak_bytes
        os._exit(0)
    end = time.monotonic() + 30
    while not (ended := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < end:
        time.sleep(0.01)
    if not ended[0]:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    go.set()
    thread.join()
    assert ended == (pid, 0)


def test_a_new_model_takes_nothing_over_from_one_that_died(mgr):
    first = nn.Sequential(nn.Linear(512, 512, bias=False, device=DEVICE))
    handle = mgr.register("model", first, residency="disk")
    handle.evict()
    handle.load()
    del first
    again = mgr.load("model", lambda: nn.Sequential(nn.Linear(512, 512, bias=False, device=DEVICE)))
    assert mgr.spilled_bytes == 0
    again.evict()
    assert mgr["model"].total_bytes == MIB
