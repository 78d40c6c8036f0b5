"""What the panel sends and what the browser draws from it.

Without these, a refresh may grow until the panel slows the notebook down, a block map may tell a wrong place, a name
may be run as a script, or a refresh may take the focus and the text that somebody is typing.
"""

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from place import DEVICE
from torch import nn

import vram_magic as vm
from vram_magic.journal import Arrival, Journal, Record, StepTaken
from vram_magic.notebook.current import managed_models
from vram_magic.notebook.panel.timeline import MOST_SENT, SHOWN_S, Timeline
from vram_magic.notebook.panel.view import MOST_RUNS, about_of, blocks_of, row_of, state_of
from vram_magic.notebook.story import CellStory

MIB, GIB = 2**20, 2**30
NAMES = ["llm", "tts", "asr", "draft", "embedder", "reranker", "whisper", "vocoder", "vision", "sdxl"]
EVIL = "<img src=x onerror=\"window.ran = 'script'\">"


def model(name="llm", homes=("device",), **fields):
    """What `view` reads of a model."""
    plain = {
        "name": name,
        "tier": "llm",
        "rank": 0,
        "state": "device",
        "leases": set(),
        "pinned": False,
        "moving": "",
        "residency": "auto",
        "demoted": False,
        "total_bytes": MIB,
        "device_bytes": MIB,
        "block_homes": homes,
        "leaving_blocks": 0,
        "used_at": 100.9,
        "working": SimpleNamespace(bytes=0),
    }
    return SimpleNamespace(**(plain | fields))


def manager(outside=None):
    return SimpleNamespace(
        device="cuda:0",
        guard="native",
        tiers={"llm": 0},
        budget_bytes=79 * GIB,
        used_bytes=70 * GIB + 1,
        peak_bytes=78 * GIB + 1,
        outside=lambda: outside,
    )


# -------------------------------------------------------------------------------------------------------- the figures


def test_a_row_names_its_figures_once_and_leaves_out_what_is_nothing():
    assert row_of(model(), since=100) == ["llm", "llm", "d", MIB, MIB, "d1"]
    assert row_of(model(used_at=107.2), since=100) == ["llm", "llm", "d", MIB, MIB, "d1", 7]
    row = row_of(model(working=SimpleNamespace(bytes=4 * MIB + 1), tier=None, rank=3), since=100, asked="evict")
    assert row == ["llm", "3", "d", MIB, MIB, "d1", 0, 5, "evict"]


def test_marks_begin_with_the_state():
    marked = model(
        state="partial", leases={1}, pinned=True, moving="leaving", residency="device", demoted=True, leaving_blocks=0
    )
    assert row_of(marked, 0)[2] == "pupvDx"
    assert [row_of(model(state=state), 0)[2] for state in ("device", "host", "disk")] == ["d", "h", "k"]


def test_blocks_are_run_length_coded():
    homes = ("device",) * 30 + ("host",) * 20 + ("disk",)
    assert blocks_of(model(homes=homes)) == "d30h20k1"
    assert blocks_of(model(homes=())) == ""


def test_blocks_that_move_are_in_transit():
    homes = ("device", "disk", "host", "device", "device")
    assert blocks_of(model(homes=homes, moving="loading")) == "d1t2d2"
    assert blocks_of(model(homes=homes, moving="leaving", leaving_blocks=2)) == "d1k1h1t2"


def test_a_long_patchwork_is_merged_and_still_adds_up():
    homes = ("device", "host", "device") * 1000
    runs = blocks_of(model(homes=homes))
    assert runs == "d3000"
    homes = ("device",) * 40 + ("host", "disk") * 500
    runs = blocks_of(model(homes=homes))
    letters = [letter for letter in runs if letter.isalpha()]
    assert len(letters) <= MOST_RUNS
    assert sum(map(int, runs.translate(str.maketrans("dhkt", "    ")).split())) == len(homes)
    assert runs.startswith("d")


def test_ages_are_no_change():
    shown = [state_of(manager(), [model(leases={1})], 100, {}) for _ in range(2)]
    assert shown[0] == shown[1]
    assert "100" not in json.dumps(shown[0]["models"])


def test_the_drivers_trembling_is_no_change():
    def outside(more):
        return SimpleNamespace(total_bytes=80 * GIB, free_bytes=5 * GIB + more, foreign_bytes=3 * GIB + more)

    shown = [state_of(manager(outside(more)), [], 0, {}) for more in (0, 4096)]
    assert shown[0] == shown[1]
    assert shown[0]["outside"] == [80 * 1024, 5 * 1024, 3 * 1024]


def test_a_refresh_of_ten_large_models_is_below_a_thousand_bytes():
    from jupyter_client.session import Session

    big = {"total_bytes": 15 * GIB + 1, "device_bytes": 12 * GIB + 1, "working": SimpleNamespace(bytes=GIB)}
    homes = ("device",) * 180 + ("disk",) * 60
    models = [model(name, homes, state="partial", pinned=True, used_at=99_999, **big) for name in NAMES]
    outside = SimpleNamespace(total_bytes=80 * GIB, free_bytes=5 * GIB, foreign_bytes=3 * GIB)
    state = state_of(manager(outside), models, 0, {"sdxl": "evict"})
    content = {"comm_id": "0" * 32, "data": {"method": "update", "state": {"state": state}, "buffer_paths": []}}
    assert 500 < len(Session().pack(content)) < 1000


def test_a_real_models_row_tells_where_its_blocks_are(mgr):
    net = nn.Sequential(*[nn.Linear(512, 512, bias=False, device=DEVICE) for _ in range(3)])
    handle = mgr.register("net", net, tier="asr")
    (managed,) = managed_models(mgr)
    since = int(time.time())
    row = row_of(managed, since)
    assert row[:6] == ["net", "asr", "d", 3 * MIB, 3 * MIB, "d3"]
    handle.evict()
    assert row_of(managed, since)[:6] == ["net", "asr", "h", 3 * MIB, 0, "h3"]
    with handle.lease():
        assert row_of(managed, since)[2:6] == ["du", 3 * MIB, 3 * MIB, "d3"]
    assert abs(managed.used_at - time.time()) < 60  # seconds
    assert about_of(mgr, since) == {"device": mgr.device, "guard": mgr.guard, "tiers": dict(mgr.tiers), "since": since}


def test_a_model_that_left_in_part_shows_its_head_on_the_device(mgr):
    net = nn.Sequential(*[nn.Linear(512, 512, bias=False, device=DEVICE) for _ in range(4)])
    mgr.register("net", net)
    mgr.make_room(mgr.free_bytes + 2 * MIB)
    assert row_of(managed_models(mgr)[0], 0)[2:6] == ["p", 4 * MIB, 2 * MIB, "d2h2"]


# ------------------------------------------------------------------------------------------------------- the timeline


def departure(asked_by="loading llm", ago=0.0, stage="pass 1", name="tts"):
    step = StepTaken(name, 3, 3 * MIB, stage, "tier 1, least recently used", 12.4)
    return Record(asked_by, 4 * MIB, MIB, 3 * MIB, (step,), reason="made room", time=time.time() - ago)


def test_a_departure_tells_who_how_much_and_for_whom():
    journal = Journal()
    journal.append(departure())
    ((number, second, kind, name, text),) = Timeline().look(journal)
    assert (number, kind, name) == (1, "out", "tts")
    assert second == int(journal[0].time)
    assert text == "tts left: 3.0 MiB in 3 blocks, 12 ms, for loading llm (pass 1: tier 1, least recently used)"


def test_what_the_user_asked_for_says_so():
    journal = Journal()
    journal.append(departure("evict tts", stage="asked"))
    assert Timeline().look(journal)[0][4].endswith("12 ms, asked for by the user")


def test_a_refusal_is_told_too():
    journal = Journal()
    journal.append(Record("an allocation", 9 * MIB, MIB, 0, reason="not enough, even with everything that may leave"))
    ((_, _, kind, name, text),) = Timeline().look(journal)
    assert (kind, name) == ("no", "an allocation")
    assert "needed 9.0 MiB, had 1.0 MiB: not enough" in text


def test_each_record_is_told_once_and_numbers_count_on():
    journal, timeline = Journal(maxlen=2), Timeline()
    journal.append(departure())
    assert [event[0] for event in timeline.look(journal)] == [1]
    assert timeline.look(journal) == []
    for _ in range(3):  # one more than the journal holds
        journal.append(departure())
    assert [event[0] for event in timeline.look(journal)] == [2, 3]
    assert [event[0] for event in timeline.history()] == [1, 2, 3]


def test_what_is_older_than_the_timeline_is_not_told():
    journal = Journal()
    journal.append(departure(ago=SHOWN_S + 2))
    journal.append(departure(ago=SHOWN_S - 30))
    assert len(Timeline().look(journal)) == 1


def test_arrivals_are_told_in_their_place_in_time():
    journal, timeline = Journal(), Timeline()
    journal.append(departure(ago=3))
    journal.arrivals.append(Arrival("llm", 4 * MIB, 7.6, time.time() - 2))
    journal.append(departure(name="asr", ago=1))
    assert [(event[0], event[2], event[3]) for event in timeline.look(journal)] == [
        (1, "out", "tts"),
        (2, "in", "llm"),
        (3, "out", "asr"),
    ]
    assert timeline.history()[1][4] == "llm came: 4.0 MiB, 8 ms"
    journal.arrivals.append(Arrival("tts", MIB, 1.0))
    assert [event[3] for event in timeline.look(journal)] == ["tts"]
    assert timeline.look(journal) == []


# --------------------------------------------------------------------------------------------------- in the browser

RENDER = """async ([js, values]) => {
    const blob = new Blob([js], {type: "text/javascript"});
    const {default: panel} = await import(URL.createObjectURL(blob));
    const handlers = {};
    window.sent = [];
    window.kernel = {
        get: (name) => values[name],
        on: (name, action) => { (handlers[name] ??= []).push(action); },
        off: (name, action) => { handlers[name] = handlers[name].filter((one) => one !== action); },
        send: (message) => { sent.push(message); },
        change: (changes) => {
            Object.assign(values, changes);
            for (const name in changes) for (const action of handlers[`change:${name}`] ?? []) action();
        },
        tell: (message) => { for (const action of handlers["msg:custom"] ?? []) action(message); },
        watched: () => Object.values(handlers).flat().length,
    };
    window.end = panel.render({model: kernel, el: document.querySelector("#panel")});
}"""


@pytest.fixture(scope="module")
def chromium():
    pytest.importorskip("playwright", reason="playwright is not installed")
    from playwright.sync_api import sync_playwright

    sys.path.insert(0, str(Path(__file__).parent.parent / "docs"))
    try:
        import screenshot
    finally:
        del sys.path[0]
    with sync_playwright() as playwright:
        path = screenshot.browser_path(playwright)
        if not Path(path).exists():
            pytest.skip("there is no Chromium")
        browser = playwright.chromium.launch(executable_path=path, args=screenshot.FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(chromium):
    """A page with the panel of two models, and a kernel that only writes down what it is sent."""
    folder = Path(vm.__file__).parent / "notebook" / "panel"
    now = int(time.time())
    page = chromium.new_page(viewport={"width": 1200, "height": 900})
    errors = []
    page.on("pageerror", lambda error: errors.append(error))  # noqa: PLW0108  playwright marks its handlers
    page.set_content(f"<style>{(folder / 'panel.css').read_text()}</style><div id=panel></div>")
    values = {
        "about": {"device": "cuda:0", "guard": "native", "tiers": {"llm": 0, "tts": 1, "asr": 2}, "since": now},
        "state": state(["llm", "llm", "d", 4 * GIB, 4 * GIB, "d64", -12, 2], [EVIL, "7", "kp", GIB, 0, "k16", -90]),
        "events": [],
        "notice": {},
    }
    page.evaluate(RENDER, [(folder / "panel.js").read_text(), values])
    yield page
    assert not errors
    page.close()


def state(*rows):
    return {"budget": 8 * GIB, "used": 5 * GIB, "peak": 6 * GIB, "models": list(rows)}


def change(page, **changes):
    page.evaluate("(changes) => kernel.change(changes)", changes)


def sent(page, kind):
    return [message for message in page.evaluate("sent") if message["kind"] == kind]


browser = pytest.mark.browser
once = pytest.mark.cpu_only("no device")


@browser
@once
def test_a_name_is_text_and_no_script_runs(page):
    page.wait_for_timeout(100)  # for an image that would fail to load
    assert page.evaluate("window.ran") is None
    assert page.locator("#panel img").count() == 0
    assert page.locator("tbody .vmp-name").all_text_contents() == ["llm", EVIL]


@browser
@once
def test_the_figures_are_seen(page):
    text = page.locator("#panel").inner_text()
    for words in (
        "cuda:0: 5.0 GiB of 8.0 GiB used, 3.0 GiB free, peak 6.0 GiB",
        "other tensors",
        "1.0 GiB",
        "4.0 GiB of 4.0 GiB",
        "0 B of 1.0 GiB",
        "on the device",
        "out, in its file",
        "pinned",
        "1 min ago",
        "calls need 2.0 MiB more",
    ):
        assert words in text
    assert page.locator("tbody tr").nth(0).locator(".vmp-map .vmp-cell").count() == 60  # 64 blocks, merged
    assert page.locator("tbody tr").nth(1).locator(".vmp-map").get_attribute("aria-label") == "blocks: 16 in its file"


@browser
@once
def test_a_refresh_keeps_nodes_focus_and_typed_text(page):
    field = page.get_by_label("What would leave for")
    field.fill("3.5Gi")
    field.press("End")
    page.evaluate("window.row = document.querySelector('tbody tr')")
    change(page, state=state(["tts", "tts", "d", MIB, MIB, "d1"], ["llm", "llm", "p", 4 * GIB, 2 * GIB, "d32k32"]))
    field.press("B")
    assert field.input_value() == "3.5GiB"
    assert page.evaluate("window.row === document.querySelectorAll('tbody tr')[1]")
    evict = page.get_by_role("button", name="evict llm")
    evict.focus()
    change(page, state=state(["llm", "llm", "k", 4 * GIB, 0, "k64"], ["tts", "tts", "d", MIB, MIB, "d1"]))
    assert evict.evaluate("node => node === document.activeElement")


@browser
@once
def test_a_click_is_sent_once_and_shown_as_asked_until_it_is_answered(page):
    row = page.locator("tbody tr").first
    page.get_by_role("button", name="evict llm").press("Enter")
    (message,) = sent(page, "evict")
    assert (message["name"], message["value"]) == ("llm", "")
    assert "asked: evict" in row.inner_text()
    refusal = "'llm' stays where it is.\n0 B were freed.\nIt is in use."
    change(page, notice={"ids": [message["id"]], "text": refusal, "failed": True})
    assert "asked" not in row.inner_text()
    assert page.get_by_role("status").inner_text() == refusal


@browser
@once
def test_each_button_asks_for_its_own(page):
    change(page, state=state(["llm", "llm", "p", 4 * GIB, 2 * GIB, "d32k32"], [EVIL, "7", "kp", GIB, 0, "k16", -90]))
    page.get_by_role("button", name="load llm").click()
    page.get_by_role("button", name="pin llm", exact=True).click()
    page.get_by_role("button", name=f"unpin {EVIL}").click()
    page.get_by_label("tier of llm").select_option("asr")
    page.get_by_label("What would leave for").fill("3GiB")
    page.get_by_label("What would leave for").press("Enter")
    asked = [(m["kind"], m["name"], m["value"]) for m in page.evaluate("sent") if "id" in m]
    assert asked == [
        ("load", "llm", ""),
        ("pin", "llm", ""),
        ("unpin", EVIL, ""),
        ("tier", "llm", "asr"),
        ("plan", "", "3GiB"),
    ]
    assert len({m["id"] for m in page.evaluate("sent") if "id" in m}) == 5


@browser
@once
def test_what_is_on_the_device_cannot_be_loaded_and_what_is_out_cannot_be_evicted(page):
    load, evict = (page.get_by_role("button", name=f"{kind} llm") for kind in ("load", "evict"))
    evil_load, evil_evict = (page.get_by_role("button", name=f"{kind} {EVIL}") for kind in ("load", "evict"))
    off = [button.get_attribute("aria-disabled") for button in (load, evict, evil_load, evil_evict)]
    assert off == ["true", "false", "false", "true"]
    load.press("Enter")
    assert load.evaluate("node => node === document.activeElement")
    assert not sent(page, "load")
    evict.press("Enter")
    load.press("Enter")  # what was asked may be done by then
    assert [message["kind"] for message in page.evaluate("sent") if "id" in message] == ["evict", "load"]


@browser
@once
def test_a_plan_without_a_size_asks_for_one(page):
    page.get_by_label("What would leave for").fill(" ")
    page.get_by_role("button", name="plan").click()
    assert page.get_by_role("status").inner_text() == "type a size, such as 3GiB"
    assert not sent(page, "plan")


@browser
@once
def test_a_tier_that_was_refused_is_shown_as_it_is(page):
    select = page.get_by_label("tier of llm")
    select.select_option("asr")
    change(page, notice={"ids": [sent(page, "tier")[0]["id"]], "text": "no", "failed": True})
    assert select.input_value() == "llm"
    assert page.get_by_label(f"tier of {EVIL}").input_value() == "7"  # a bare priority


@browser
@once
def test_the_timeline_accumulates_asks_for_what_it_missed_and_tells_why(page):
    now = int(time.time())
    change(page, events=[[1, now - 60, "out", "tts", "tts left: for llm"]])
    assert len(sent(page, "history")) == 1  # at the start
    change(page, events=[[3, now, "in", "tts", "tts came back: 1.0 GiB"]])
    assert len(sent(page, "history")) == 2  # number 2 is missing
    missed = [2, now - 30, "no", "cell", "an allocation: refused"]
    page.evaluate("(events) => kernel.tell({kind: 'history', now: Date.now() / 1000, events})", [missed])
    marks = page.locator(".vmp-mark")
    assert [mark.get_attribute("title") for mark in marks.all()] == [
        "tts left: for llm",
        "an allocation: refused",
        "tts came back: 1.0 GiB",
    ]
    marks.last.focus()
    page.keyboard.press("ArrowLeft")
    assert page.locator(".vmp-why").inner_text() == "✕ an allocation: refused"


@browser
@once
def test_ages_go_by_the_kernels_clock(page):
    page.evaluate("kernel.tell({kind: 'history', now: Date.now() / 1000 + 3600, events: []})")
    assert page.locator(".vmp-age-cell").first.inner_text() == "1 h ago"


@browser
@once
def test_a_view_that_is_removed_stops_following(page):
    assert page.evaluate("kernel.watched()") == 5
    page.evaluate("end()")
    assert page.evaluate("kernel.watched()") == 0


@browser
@once
def test_a_closed_manager_leaves_nothing_to_click(page):
    change(page, state={"closed": 1})
    assert page.locator("#panel").inner_text().strip() == "The manager was closed."


@browser
@once
@pytest.mark.parametrize("width", [400, 1200])
def test_nothing_sticks_out(page, width):
    page.set_viewport_size({"width": width, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.get_by_role("columnheader", name="Blocks").count() == 1  # a table still, when rows are cards


@browser
@once
def test_sizes_are_written_as_in_python(page):
    from vram_magic.sizes import format_size

    sizes = [0, 1, 1023, 1024, 1075, 1536, 1047552, MIB - 1, MIB, 5 * GIB // 3, 2**60 * 3]
    code = "async (sizes) => { const m = await import(address); return sizes.map(m.formatSize); }"
    js = (Path(vm.__file__).parent / "notebook" / "panel" / "panel.js").read_text()
    page.evaluate("(js) => { window.address = URL.createObjectURL(new Blob([js], {type: 'text/javascript'})) }", js)
    assert page.evaluate(code, sizes) == [format_size(size) for size in sizes]


def test_a_burst_is_cut_to_the_newest():
    journal, timeline = Journal(), Timeline()
    for _ in range(MOST_SENT + 3):
        journal.append(departure())
    assert [event[0] for event in timeline.look(journal)[-MOST_SENT:]] == list(range(4, MOST_SENT + 4))


def test_a_cell_in_which_something_happened_is_an_event_once():
    quiet = CellStory(3, 0, 0, 0, started=time.time(), ended=time.time())
    busy = CellStory(4, 0, 8 * MIB, 9 * MIB, started=time.time() - 2, ended=time.time())
    timeline = Timeline()
    ((_, _, kind, name, text),) = timeline.look(Journal(), [quiet, busy])
    assert (kind, name) == ("cell", "cell [4]")
    assert text == "cell [4], 2.0 s: 0 B in use before, 8.0 MiB after, peak 9.0 MiB"
    assert timeline.look(Journal(), [quiet, busy]) == []
