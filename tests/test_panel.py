"""The live panel.

Without these, the panel may keep a deleted model's memory, print an error under somebody's cell, flood the browser
with messages that change nothing, or go on running after its manager is gone.
"""

import gc
import sys
import threading
import time
import weakref

import pytest
from place import DEVICE
from torch import nn

import vram_magic as vm
from vram_magic.notebook import panel
from vram_magic.notebook.panel import close_panel, open_panel


@pytest.fixture
def manager():
    with_panel = vm.VRAMManager(device=DEVICE, budget="64MiB", host_budget=0)
    yield with_panel
    close_panel()
    with_panel.close()


def until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "vram-magic-panel"]


def test_there_is_one_widget_however_often_it_is_shown(manager):
    assert open_panel(manager) is open_panel(manager)
    assert len(threads()) == 1


def test_its_text_is_constant(manager):
    net = nn.Linear(8, 8, device=DEVICE)
    widget = open_panel(manager)
    before = repr(widget)
    manager.register("net", net)
    assert until(lambda: "net" in widget.value)
    assert repr(widget) == before
    assert len(before) <= 110  # ipywidgets cuts the text of a widget there


def test_it_follows_the_manager(manager):
    net = nn.Linear(512, 512, device=DEVICE)
    widget = open_panel(manager)
    manager.register("net", net)
    assert until(lambda: "device" in widget.value and "net" in widget.value)
    manager["net"].evict()
    assert until(lambda: "spilled" in widget.value)


def test_what_did_not_change_is_not_sent(manager):
    net = nn.Linear(8, 8, device=DEVICE)
    manager.register("net", net)
    widget, sent = open_panel(manager), []
    widget.observe(sent.append, "value")
    time.sleep(0.8)
    assert not sent


def test_it_keeps_no_model_alive(manager):
    net = nn.Linear(8, 8, device=DEVICE)
    manager.register("net", net)
    widget = open_panel(manager)
    assert "net" in widget.value
    gone = weakref.ref(net)
    del net
    gc.collect()
    assert gone() is None
    assert until(lambda: "net" not in widget.value)


def test_closing_ends_its_thread_and_the_next_one_is_new(manager):
    first = open_panel(manager)
    close_panel()
    assert until(lambda: not threads())
    assert first.comm is None
    assert open_panel(manager) is not first


def test_it_ends_when_the_user_closes_the_widget(manager):
    open_panel(manager).close()
    assert until(lambda: not threads())


def test_it_ends_with_its_manager(manager):
    widget = open_panel(manager)
    manager.close()
    assert until(lambda: not threads())
    assert "closed" in widget.value


def test_it_does_not_keep_its_manager(manager):
    ledger = vm.VRAMManager(total_vram_gb=1.0)
    open_panel(ledger)
    gone = weakref.ref(ledger)
    del ledger
    assert until(lambda: (gc.collect(), gone() is None)[1])
    assert until(lambda: not threads())


def test_trouble_in_the_thread_reaches_nobody(manager, monkeypatch, capsys):
    widget, caught = open_panel(manager), []
    monkeypatch.setattr(threading, "excepthook", caught.append)
    with monkeypatch.context() as broken:
        broken.setattr(panel.Report, "of", lambda manager: 1 / 0)
        time.sleep(0.6)
    net = nn.Linear(8, 8, device=DEVICE)
    manager.register("net", net)
    assert until(lambda: "net" in widget.value)
    assert not caught
    assert capsys.readouterr() == ("", "")


def test_without_ipywidgets_it_says_what_to_install_and_the_report_still_works(notebook, monkeypatch):
    panel._widget_class.cache_clear()
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    shown = notebook.fail("%vram panel")
    assert shown.startswith("VRAMError: The panel cannot be shown.")
    assert "%pip install ipywidgets" in shown
    assert notebook.run("%vram").startswith(f"{vm.manager().device}: ")


def test_the_magic_shows_and_closes_it(notebook):
    assert notebook.run("%vram panel").startswith("<vram_magic panel")
    assert len(threads()) == 1
    assert notebook.run("%vram panel --close") == ""
    assert until(lambda: not threads())
