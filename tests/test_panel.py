"""The live panel, on the kernel's side.

Without these, the panel may keep a deleted model's memory, print an error under somebody's cell, flood the browser with
messages that change nothing, do a click twice or never, or go on running after its manager is gone.
"""

import asyncio
import gc
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
from place import DEVICE, until
from torch import nn

import vram_magic as vm
from vram_magic.notebook.panel import close_panel, live, open_panel, widget
from vram_magic.notebook.panel.clicks import Click

MIB = 2**20
EVIL = "<img src=x onerror=alert(1)>"


@pytest.fixture
def manager():
    with_panel = vm.VRAMManager(device=DEVICE, budget="64MiB", host_budget=0, block_bytes="1MiB")
    if with_panel.used_bytes:
        gc.collect()  # what an earlier test's traceback held would be freed in the middle of this one
    yield with_panel
    close_panel()
    with_panel.close()


@pytest.fixture(autouse=True)
def alone():
    """The threads of the test before end by themselves, soon."""
    assert until(lambda: not threads() and not threads("vram-magic-clicks"))


@pytest.fixture
def net(manager):
    """A model of three blocks, registered as ``net``."""
    net = build()
    manager.register("net", net)
    return net


def build(layers=3):
    return nn.Sequential(*[nn.Linear(512, 512, bias=False, device=DEVICE) for _ in range(layers)])


def threads(name="vram-magic-panel"):
    return [thread for thread in threading.enumerate() if thread.name == name]


def row(shown, name="net"):
    return next((row for row in shown.state.get("models", []) if row[0] == name), None)


def by_hand():
    """The open panel, without the thread that refreshes it."""
    (thread,) = threads()
    panel = sys.modules["vram_magic.notebook.panel"]._panel
    panel._ended.set()
    thread.join()
    return panel


def say(shown, **content):
    """What a front end sends."""
    shown._handle_custom_msg(content, [])


def answered(shown, number):
    """The text of the answer to a click, once there."""
    seen = []
    shown.observe(lambda change: seen.append(change.new), "notice")
    seen.append(shown.notice)
    assert until(lambda: any(number in notice.get("ids", []) for notice in seen))
    return next(notice["text"] for notice in seen if number in notice.get("ids", []))


@pytest.fixture
def wire(monkeypatch):
    """Starts to write down what a widget sends."""

    def tap(shown):
        sent, publish = [], shown.comm.publish_msg

        def publish_and_note(kind, **content):
            sent.append(content["data"])
            publish(kind, **content)

        monkeypatch.setattr(shown.comm, "publish_msg", publish_and_note)
        return sent

    return tap


# ---------------------------------------------------------------------------------------------------------- showing


def test_there_is_one_widget_however_often_it_is_shown(manager):
    assert open_panel(manager) is open_panel(manager)
    assert len(threads()) == 1


def test_its_text_is_constant(manager):
    shown = open_panel(manager)
    before = repr(shown)
    net = build()
    manager.register("net", net)
    assert until(lambda: row(shown))
    assert repr(shown) == before
    assert shown._repr_mimebundle_()[0]["text/plain"] == before
    assert len(before) <= 110  # ipywidgets cuts the text of a widget there


def test_it_opens_with_the_figures_in_it(manager, net):
    shown = open_panel(manager)
    assert row(shown) == ["net", "llm", "d", 3 * MIB, 3 * MIB, "d3"]
    assert shown.about["device"] == manager.device


def test_it_follows_the_manager(manager, net):
    shown = open_panel(manager)
    manager["net"].evict()
    assert until(lambda: row(shown)[2] == "h")
    assert row(shown)[4:6] == [0, "h3"]
    net(nn.Linear(1, 512, device=DEVICE).weight.T)
    assert until(lambda: row(shown)[5] == "d3")


def test_it_tells_what_left_and_what_came_back(manager, net):
    shown, told = open_panel(manager), []
    shown.observe(lambda change: told.extend(change.new), "events")
    manager.make_room(manager.free_bytes + 2 * MIB)
    assert until(lambda: told)
    manager["net"].load()
    assert until(lambda: len(told) == 2)
    assert [(event[0], event[2], event[3]) for event in told] == [(1, "out", "net"), (2, "in", "net")]
    assert "net left: 2.0 MiB in 2 blocks" in told[0][4]
    assert "for make_room(" in told[0][4]
    assert told[1][4].startswith("net came: 2.0 MiB, ")


def test_a_view_gets_the_older_events_when_it_asks(manager, net, wire):
    manager["net"].evict()
    manager["net"].load()
    manager["net"].evict()
    shown = open_panel(manager)
    sent = wire(shown)
    say(shown, kind="history")
    assert until(lambda: sent)
    (message,) = sent
    assert message["method"] == "custom"
    assert [event[2] for event in message["content"]["events"]] == ["out", "in", "out"]
    assert abs(message["content"]["now"] - time.time()) < 60  # seconds


def test_names_and_texts_go_as_they_are(manager):
    net = build()
    manager.register(EVIL, net)
    shown = open_panel(manager)
    say(shown, kind="evict", name=EVIL, id=1)
    assert answered(shown, 1) == f"{EVIL}: freed 3.0 MiB"
    assert row(shown, EVIL) is not None


# ---------------------------------------------------------------------------------------------------------- messages


def test_what_did_not_change_is_not_sent(manager, net, wire):
    shown = open_panel(manager)
    sent = wire(shown)
    panel = by_hand()
    for _ in range(5):
        panel.refresh()
    assert not sent


def test_a_change_is_one_message(manager, net, wire):
    shown = open_panel(manager)
    say(shown, kind="pin", name="net", id=1)
    answered(shown, 1)
    panel = by_hand()
    sent = wire(shown)
    say(shown, kind="unpin", name="net", id=2)
    say(shown, kind="evict", name="net", id=3)
    assert until(lambda: not panel._clicks.asked)
    panel.refresh()
    assert [set(message["state"]) for message in sent] == [{"state", "events", "notice"}]


def test_a_refresh_of_ten_models_is_below_a_thousand_bytes(manager, wire):
    from jupyter_client.session import Session

    names = ["llm", "tts", "asr", "draft", "embedder", "reranker", "whisper", "vocoder", "vision", "sdxl"]
    nets = {name: build(2) for name in names}
    for name, built in nets.items():
        manager.register(name, built)
    shown = open_panel(manager)
    sent = wire(shown)
    manager["sdxl"].pin()
    assert until(lambda: sent)
    (message,) = sent
    assert set(message["state"]) == {"state"}
    assert len(Session().pack({"comm_id": shown.comm.comm_id, "data": message})) < 1000


def test_it_is_one_widget_and_its_layout(manager, net):
    from ipywidgets.widgets.widget import _instances

    before = set(_instances)
    shown = open_panel(manager)
    made = {type(_instances[key]).__name__ for key in set(_instances) - before}
    assert made == {"PanelWidget", "Layout"}
    assert len(shown._esm) + len(shown._css) < 40_000


# ------------------------------------------------------------------------------------------------------------ clicks


def test_evict_and_load(manager, net):
    shown = open_panel(manager)
    say(shown, kind="evict", name="net", value="", id=1)
    assert answered(shown, 1) == "net: freed 3.0 MiB"
    assert manager["net"].device_bytes == 0
    say(shown, kind="load", name="net", value="", id=2)
    assert answered(shown, 2) == "net: 3.0 MiB on the device"
    assert manager["net"].device_bytes == 3 * MIB


def test_pin_and_unpin(manager, net):
    shown = open_panel(manager)
    say(shown, kind="pin", name="net", id=1)
    assert answered(shown, 1) == "net: pinned"
    assert manager["net"].pinned
    assert until(lambda: row(shown)[2] == "dp")
    say(shown, kind="unpin", name="net", id=2)
    assert answered(shown, 2) == "net: not pinned any more"
    assert not manager["net"].pinned


@pytest.mark.parametrize(("value", "tier", "rank"), [("asr", "asr", 2), ("7", 7, 7), ("-1", -1, -1)])
def test_a_tier_is_a_name_or_a_number(manager, net, value, tier, rank):
    shown = open_panel(manager)
    say(shown, kind="tier", name="net", value=value, id=1)
    assert answered(shown, 1) == f"net: tier {value}"
    assert (manager["net"].tier, manager["net"].priority) == (tier, rank)


def test_an_unknown_tier_is_told(manager, net):
    shown = open_panel(manager)
    say(shown, kind="tier", name="net", value="boss", id=1)
    assert answered(shown, 1).startswith("no tier is called 'boss'")
    assert manager["net"].tier == "llm"


def test_a_plan_moves_nothing(manager, net):
    shown = open_panel(manager)
    say(shown, kind="plan", name="", value=f"{manager.free_bytes + MIB}", id=1)
    text = answered(shown, 1)
    assert text.startswith("A request of ")
    assert "would free 1.0 MiB:\n  1. net: 1 block, 1.0 MiB (pass 1: tier 0, least recently used)" in text
    assert manager["net"].device_bytes == 3 * MIB
    say(shown, kind="plan", name="", value="plenty", id=2)
    assert "'plenty' is not a size" in answered(shown, 2)


def test_evicting_a_model_in_use_gives_the_whole_error(manager, net):
    shown = open_panel(manager)
    with manager["net"].lease():
        say(shown, kind="evict", name="net", id=1)
        text = answered(shown, 1)
    assert text.startswith("'net' stays where it is.\n")
    assert text == refusal_of(manager["net"])
    assert len(text.splitlines()) == 4
    assert shown.notice["failed"]
    assert manager["net"].device_bytes == 3 * MIB


def refusal_of(handle):
    """What a caller is told while the model is in use; the error itself would keep the model's weights alive."""
    try:
        with handle.lease():
            handle.evict()
    except vm.ModelInUseError as error:
        return str(error)
    return "it was not refused"


def test_a_load_without_room_gives_the_whole_error(manager, net):
    shown = open_panel(manager)
    manager["net"].evict()
    manager.budget_bytes = manager.used_bytes + MIB
    say(shown, kind="load", name="net", id=1)
    text = answered(shown, 1)
    assert text == str(manager.last_error)
    assert len(text.splitlines()) == 4


def test_an_unknown_model_is_told(manager):
    shown = open_panel(manager)
    say(shown, kind="evict", name="nobody", id=1)
    assert answered(shown, 1).startswith("No model is called 'nobody'.")


def test_any_exception_of_a_backend_is_told(manager, capsys):
    class Stuck:
        async def load(self, model_id):
            pass

        async def unload(self, model_id):
            raise OSError("no way")

    handle = asyncio.run(manager.load_model("engine", vram_gb=0.001, backend=Stuck()))
    shown = open_panel(manager)
    say(shown, kind="evict", name="engine", id=1)
    assert answered(shown, 1) == "evict engine failed. OSError: no way"
    assert handle.device_bytes
    assert capsys.readouterr() == ("", "")


def test_a_number_counts_once(manager, net):
    shown, freed = open_panel(manager), []
    shown.observe(lambda change: freed.append(change.new["text"]), "notice")
    for _ in range(3):
        say(shown, kind="evict", name="net", id=1)
    assert answered(shown, 1) == "net: freed 3.0 MiB"
    manager["net"].load()
    say(shown, kind="evict", name="net", id=1)
    say(shown, kind="pin", name="net", id=2)
    answered(shown, 2)
    assert "\n".join(freed) == "net: freed 3.0 MiB\nnet: pinned"
    assert manager["net"].device_bytes == 3 * MIB


def test_clicks_are_done_in_their_order_and_every_answer_arrives(manager, net):
    shown, answers = open_panel(manager), []
    shown.observe(lambda change: answers.append(change.new), "notice")
    for number in range(1, 7):
        say(shown, kind="evict" if number % 2 else "load", name="net", id=number)
    assert until(lambda: sum(len(notice["ids"]) for notice in answers) == 6)
    assert [number for notice in answers for number in notice["ids"]] == [1, 2, 3, 4, 5, 6]
    assert manager["net"].device_bytes == 3 * MIB


def test_what_was_asked_is_shown_until_it_is_done(manager, net):
    begun, go_on = threading.Event(), threading.Event()

    def give_back():
        begun.set()
        go_on.wait(120)

    other = nn.Linear(4, 4, device=DEVICE)
    manager.register("other", other, workspace=give_back, pin=True)
    manager["net"].evict()
    gc.collect()
    manager.budget_bytes = manager.used_bytes + 3 * MIB - 64  # without `other` it fits: a load asks for its workspace
    manager["other"].unpin()
    shown = open_panel(manager)
    try:
        say(shown, kind="load", name="net", id=1)
        assert until(begun.is_set)
        assert until(lambda: row(shown)[-1] == "load")
        assert row(shown)[2] == "hl"
        assert row(shown)[5] == "t3"
    finally:
        go_on.set()
    answered(shown, 1)
    assert until(lambda: row(shown)[-1] != "load")


@pytest.mark.parametrize(
    "content",
    [
        None,
        "evict",
        [],
        {},
        {"kind": "evict", "name": "net"},
        {"kind": "evict", "name": "net", "id": "1"},
        {"kind": "evict", "name": "net", "id": True},
        {"kind": "evict", "name": 3, "id": 1},
        {"kind": "evict", "name": "n" * 201, "id": 1},
        {"kind": "plan", "value": {"size": 3}, "id": 1},
        {"kind": "forget", "name": "net", "id": 1},
        {"kind": ["evict"], "name": "net", "id": 1},
        {"kind": "__init__", "name": "net", "id": 1},
    ],
)
def test_garbage_is_no_click_and_disturbs_nothing(manager, net, content, capsys):
    shown = open_panel(manager)
    assert Click.read(content) is None
    shown._handle_custom_msg(content, [])
    assert not threads("vram-magic-clicks")
    say(shown, kind="pin", name="net", id=7)
    assert answered(shown, 7) == "net: pinned"
    assert capsys.readouterr() == ("", "")


def test_the_handler_waits_for_nothing(manager, net):
    shown = open_panel(manager)
    panel = sys.modules["vram_magic.notebook.panel"]._panel
    core, go_on, begun = manager._core, threading.Event(), threading.Event()
    core.workers.decide(lambda: (begun.set(), go_on.wait(120)))  # the deciding thread is busy
    try:
        assert until(begun.is_set)
        say(shown, kind="evict", name="net", id=1)  # returns all the same
        assert panel._clicks.asked == {"net": "evict"}
    finally:
        go_on.set()
    assert answered(shown, 1) == "net: freed 3.0 MiB"


# ---------------------------------------------------------------------------------------------------------- the end


def test_it_keeps_no_model_alive(manager):
    net = build()
    manager.register("net", net)
    shown = open_panel(manager)
    say(shown, kind="evict", name="net", id=1)
    say(shown, kind="load", name="net", id=2)
    answered(shown, 2)
    gone = weakref.ref(net)
    del net
    gc.collect()
    assert gone() is None
    assert until(lambda: row(shown) is None)


def test_a_failed_click_keeps_no_model_alive(manager):
    net = build()
    manager.register("net", net, pin=True)
    shown = open_panel(manager)
    say(shown, kind="evict", name="net", id=1)
    assert "pinned" in answered(shown, 1)
    gone = weakref.ref(net)
    del net
    gc.collect()
    assert gone() is None


def test_closing_ends_its_threads_and_the_next_one_is_new(manager, net):
    first = open_panel(manager)
    say(first, kind="pin", name="net", id=1)
    answered(first, 1)
    assert len(threads("vram-magic-clicks")) == 1
    close_panel()
    assert until(lambda: not threads() and not threads("vram-magic-clicks"))
    assert first.comm is None
    assert open_panel(manager) is not first


def test_a_click_after_the_end_is_not_done(manager, net):
    shown = open_panel(manager)
    close_panel()
    say(shown, kind="pin", name="net", id=1)
    assert not threads("vram-magic-clicks")
    assert not manager["net"].pinned


def test_it_ends_when_the_user_closes_the_widget(manager):
    open_panel(manager).close()
    assert until(lambda: not threads())


def test_it_ends_with_its_manager(manager, net):
    shown = open_panel(manager)
    say(shown, kind="pin", name="net", id=1)
    answered(shown, 1)
    manager.close()
    assert until(lambda: not threads() and not threads("vram-magic-clicks"))
    assert shown.state == {"closed": 1}


def test_it_does_not_keep_its_manager(manager):
    ledger = vm.VRAMManager(total_vram_gb=1.0)
    shown = open_panel(ledger)
    say(shown, kind="plan", value="2GiB", id=1)
    answered(shown, 1)
    gone = weakref.ref(ledger)
    del ledger
    assert until(lambda: (gc.collect(), gone() is None)[1])
    assert until(lambda: not threads() and not threads("vram-magic-clicks"))


def test_trouble_in_the_thread_reaches_nobody(manager, monkeypatch, capsys):
    shown, caught, missed = open_panel(manager), [], []
    monkeypatch.setattr(threading, "excepthook", caught.append)

    def broken(*figures):
        missed.append(1)
        raise ZeroDivisionError

    with monkeypatch.context() as trouble:
        trouble.setattr(live, "state_of", broken)
        assert until(lambda: len(missed) >= 2)
    net = build()
    manager.register("net", net)
    assert until(lambda: row(shown))
    assert not caught
    assert capsys.readouterr() == ("", "")


# ------------------------------------------------------------------------------------------------------ the package


def test_a_wheel_carries_the_script_and_the_style():
    from hatchling.builders.wheel import WheelBuilder

    builder = WheelBuilder(str(Path(vm.__file__).parent.parent))
    carried = {file.distribution_path for file in builder.recurse_included_files()}
    assert {"vram_magic/notebook/panel/panel.js", "vram_magic/notebook/panel/panel.css"} <= carried


def test_the_script_and_the_style_are_files_of_the_package():
    folder = Path(live.__file__).parent
    script, style = (folder / "panel.js").read_text(), (folder / "panel.css").read_text()
    assert "export default" in script
    assert "innerHTML" not in script
    assert "import " not in script.replace("important", "")  # nothing is fetched from anywhere
    assert ".vmp" in style


@pytest.mark.parametrize("missing", ["anywidget", "ipywidgets"])
def test_without_its_libraries_it_says_what_to_install_and_the_report_still_works(notebook, monkeypatch, missing):
    widget.widget_class.cache_clear()
    monkeypatch.setitem(sys.modules, missing, None)
    shown = notebook.fail("%vram panel")
    assert shown.startswith("VRAMError: The panel cannot be shown.")
    assert "%pip install anywidget ipywidgets" in shown
    assert notebook.run("%vram").startswith(f"{vm.manager().device}: ")


def test_the_magic_shows_and_closes_it(notebook):
    assert notebook.run("%vram panel").startswith("<vram_magic panel")
    assert len(threads()) == 1
    assert notebook.run("%vram panel --close") == ""
    assert until(lambda: not threads())


def test_unloading_the_extension_ends_it(notebook):
    notebook.run("%vram panel")
    notebook.run("%unload_ext vram_magic")
    assert until(lambda: not threads())
