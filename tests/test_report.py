"""The report: text, HTML, and what it keeps.

Without these, a model's name may run as script in the notebook, a saved report may differ from run to run, or keep the
models alive that it tells of.
"""

import gc
import re
import weakref
from html.parser import HTMLParser

import pytest
from place import DEVICE
from torch import nn

import vram_magic as vm
from vram_magic.notebook.report import Report, Row, shortened

MIB = 2**20
EVIL = "<img src=x onerror=\"alert('1')\">&amp;"


def row(name="llm", **changes):
    fields = {
        "name": name,
        "tier": "llm",
        "state": "partial",
        "device_bytes": 1 * MIB,
        "total_bytes": 4 * MIB,
        "blocks": (1, 4),
        "marks": (),
    }
    return Row(**fields | changes)


def report(*rows, used=3 * MIB):
    return Report("cpu", "native", 64 * MIB, used, 64 * MIB - used, 9 * MIB, rows)


@pytest.fixture
def manager():
    with_models = vm.VRAMManager(device=DEVICE, budget="64MiB", host_budget=0)
    yield with_models
    with_models.close()


def test_the_text_has_the_device_one_row_a_model_and_everything_else():
    shown = repr(report(row(marks=("in use", "pinned")), row("asr", tier="asr", device_bytes=0, blocks=(0, 1))))
    assert shown.splitlines() == [
        "cpu: 3.0 MiB of 64.0 MiB used, 61.0 MiB free, peak 9.0 MiB (guard: native)",
        "  model  tier  state    on the device       blocks",
        "  llm    llm   partial  1.0 MiB of 4.0 MiB  1 of 4  in use, pinned",
        "  asr    asr   partial  0 B of 4.0 MiB      0 of 1",
        "other tensors: 2.0 MiB",  # 3 - 1
    ]


def test_without_models_the_text_says_how_to_load_one():
    assert "no models yet; load one with: %load_model NAME SOURCE" in repr(report())


def test_models_that_share_weights_leave_no_negative_rest():
    assert report(row(), row("b"), used=1 * MIB).other_bytes == 0


def test_a_long_name_is_cut_in_text_and_whole_in_html():
    name = "a" * 100 + "b" * 100
    assert max(map(len, repr(report(row(name))).splitlines())) <= 120
    assert name in report(row(name))._repr_html_()
    assert shortened(name) == "a" * 19 + "…" + "b" * 19
    assert shortened("short") == "short"


def test_everything_of_the_users_is_escaped_in_html():
    html = report(row(EVIL, tier=EVIL, marks=(EVIL,)))._repr_html_()
    tags = Tags()
    tags.feed(html)
    assert tags.seen <= {"div", "table", "tr", "th", "td"}
    assert "onerror" not in " ".join(tags.attributes)
    assert html.count("&lt;img src=x onerror=&quot;alert(&#x27;1&#x27;)&quot;&gt;&amp;amp;") == 3


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.seen, self.attributes = set(), set()

    def handle_starttag(self, tag, attributes):
        self.seen.add(tag)
        self.attributes |= {name for name, _ in attributes}


def test_every_colour_follows_the_theme_of_the_lab_and_has_a_fallback():
    html = report(row())._repr_html_()
    colours = re.findall(r"(?<![-\w])(?:color|background): ([^;']+)", html)
    assert colours
    assert all(re.fullmatch(r"var\(--jp-[\w-]+, .+\)|inherit", colour) for colour in colours)


def test_bars_tell_their_share_in_words_too():
    assert "aria-label='25% on the device'" in report(row())._repr_html_()
    assert "aria-label='100% on the device'" in report(row(device_bytes=9 * MIB))._repr_html_()
    assert "aria-label='0% on the device'" in report(row(device_bytes=0, total_bytes=0))._repr_html_()


def test_rows_go_by_rank_then_name(manager):
    models = {name: nn.Linear(8, 8, device=DEVICE) for name in ("zz", "aa", "mm")}
    for name, model in models.items():
        manager.register(name, model, tier="asr" if name == "aa" else "llm")
    assert [r.name for r in Report.of(manager, fresh=True).rows] == ["mm", "zz", "aa"]


def test_the_figures_are_the_managers(manager):
    net = nn.Linear(512, 512, bias=False, device=DEVICE)
    handle = manager.register("net", net, residency="host", pin=True)
    (shown,) = Report.of(manager).rows
    assert (shown.device_bytes, shown.total_bytes, shown.blocks) == (MIB, MIB, (1, 1))
    assert shown.marks == ("pinned", "residency host")
    handle.unpin()
    handle.evict()
    (shown,) = Report.of(manager).rows
    assert (shown.state, shown.device_bytes, shown.blocks) == ("host", 0, (0, 1))
    assert shown.marks == ("residency host", "1.0 MiB spilled")
    with handle.lease():
        assert Report.of(manager).rows[0].marks[0] == "in use"


def test_a_fresh_report_sees_what_the_user_changed(manager):
    net = nn.Sequential(nn.Linear(512, 512, bias=False, device=DEVICE))
    manager.register("net", net)
    net.append(nn.Linear(512, 512, bias=False, device=DEVICE))
    assert Report.of(manager, fresh=True).rows[0].total_bytes == 2 * MIB


def test_the_same_state_gives_the_same_text(manager):
    net = nn.Linear(8, 8, device=DEVICE)
    manager.register("net", net)
    first, second = Report.of(manager, fresh=True), Report.of(manager, fresh=True)
    assert repr(first) == repr(second)
    assert first == second


def test_a_report_keeps_no_model(manager):
    net = nn.Linear(8, 8, device=DEVICE)
    manager.register("net", net)
    kept = Report.of(manager, fresh=True)
    gone = weakref.ref(net)
    del net
    gc.collect()
    assert gone() is None
    assert kept.rows[0].name == "net"
    assert Report.of(manager).rows == ()
