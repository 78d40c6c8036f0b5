"""The live panel in a real JupyterLab, driven in Chromium.

Without this, the panel may stand still while a cell runs, which is when it is looked at, its buttons may do nothing or
everything twice, and the browser may show nothing at all where every test in the kernel passes.
"""

import os
import re
from pathlib import Path

import pytest

pytest.importorskip("jupyterlab", reason="JupyterLab is not installed")
pytest.importorskip("playwright", reason="playwright is not installed")

from playwright.sync_api import expect, sync_playwright

pytestmark = pytest.mark.cpu_only("kernel")

EVIL = "<img src=x onerror=\"window.ran='script'\">"
CELLS = [
    """\
%load_ext vram_magic
import time
from pathlib import Path
from torch import nn
import vram_magic as vm

def wait_for(name):
    end = time.monotonic() + 120
    while not Path(name).exists() and time.monotonic() < end:
        time.sleep(0.05)

%vram budget 64MiB""",
    "%load_model net nn.Linear(2048, 2048)",
    f"small = nn.Linear(4, 4)\nsmall_handle = vm.manager().register({EVIL!r}, small)",
    "%vram panel\n%vram panel",
    "%vram",
    "wait_for('seen'); vm.manager()['net'].evict(); wait_for('followed')",
    "print(vm.manager()['net'].device_bytes, 'bytes')",
]
PANEL, REPORT, BUSY, BYTES = 3, 4, 5, 6
RUN_MS = 90_000  # from Lab's page to the last cell
FOLLOW_MS = 30_000  # the panel looks four times a second
SIZE = 2048 * 2049 * 4


@pytest.fixture
def lab(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "docs")
    import screenshot

    with sync_playwright() as playwright:
        if not os.path.exists(screenshot.browser_path(playwright)):
            pytest.skip("there is no Chromium")
    return screenshot


class Notebook:
    """The page, and what the test looks at in it."""

    def __init__(self, lab, page):
        self.lab = lab
        self.page = page
        self.views = page.locator(".vmp")
        self.panel = self.views.first
        self.notice = self.panel.get_by_role("status")
        self.report = self.output(REPORT)

    def output(self, cell):
        return self.page.locator(".jp-CodeCell").nth(cell).locator(".jp-OutputArea")

    def row(self, name):
        return self.panel.locator("tbody tr").filter(has_text=name)

    def command(self, name, **arguments):
        self.page.evaluate("([name, args]) => window.jupyterapp.commands.execute(name, args)", [name, arguments])

    def run_again(self, cell):
        """Runs the cell once more; returns where its output appears."""
        self.page.locator(".jp-CodeCell").nth(cell).locator(".cm-content").click()
        self.command("notebook:run-cell")
        return self.output(cell)

    def reload(self):
        self.command("docmanager:save")
        self.page.reload()
        expect(self.page.locator(".jp-CodeCell")).to_have_count(len(CELLS), timeout=RUN_MS)


@pytest.mark.browser
def test_the_panel_lives_in_jupyterlab(lab, tmp_path):
    expect.set_options(timeout=FOLLOW_MS)
    with lab.lab(tmp_path, CELLS) as page:
        book = Notebook(lab, page)
        lab.run_all(page)
        expect(book.row("net")).to_contain_text("16.0 MiB of 16.0 MiB", timeout=RUN_MS)
        follows_while_a_cell_runs(book, tmp_path)
        a_click_in_the_middle_was_done_once(book)
        a_name_is_text(book)
        buttons_move_bytes(book)
        a_plan_is_told(book)
        it_follows_the_theme(book)
        it_comes_back_after_a_reload(book)
        without_its_kernel_the_report_stays(book)


def follows_while_a_cell_runs(book, folder):
    busy = book.lab.prompt(book.page, BUSY)
    expect(busy).to_have_text("[*]:")
    (folder / "seen").touch()
    expect(book.row("net")).to_contain_text("0 B of 16.0 MiB")
    expect(book.panel.locator(".vmp-mark-out")).to_have_count(1)
    expect(busy).to_have_text("[*]:")  # it runs while the panel follows
    book.row("onerror").get_by_role("button", name="pin").click()
    (folder / "followed").touch()
    expect(busy).to_have_text(f"[{BUSY + 1}]:")


def a_click_in_the_middle_was_done_once(book):
    expect(book.notice).to_have_text(f"{EVIL}: pinned")
    expect(book.views).to_have_count(2)
    for view in book.views.all():  # both show the same
        expect(view.get_by_role("button", name=f"unpin {EVIL}")).to_have_count(1)
    expect(book.row("onerror")).not_to_contain_text("asked")


def a_name_is_text(book):
    assert book.page.evaluate("window.ran ?? 'nothing ran'") == "nothing ran"
    assert book.page.locator(".vmp img").count() == 0


def buttons_move_bytes(book):
    expect(book.output(BYTES)).to_have_text("0 bytes")
    book.row("net").get_by_role("button", name="load").click()
    expect(book.notice).to_have_text("net: 16.0 MiB on the device")
    expect(book.run_again(BYTES)).to_have_text(f"{SIZE} bytes")
    book.row("net").get_by_role("button", name="evict").press("Enter")  # the keys are not Lab's
    expect(book.notice).to_have_text("net: freed 16.0 MiB")
    expect(book.run_again(BYTES)).to_have_text("0 bytes")
    expect(book.panel.locator(".vmp-mark-in")).to_have_count(1)
    expect(book.panel.locator(".vmp-mark-out")).to_have_count(2)


def a_plan_is_told(book):
    field = book.panel.get_by_label("What would leave for")
    field.fill("")
    field.press_sequentially("99GiB")
    field.press("Enter")
    expect(book.notice).to_contain_text("A request of 99.0 GiB: not enough room")


def it_follows_the_theme(book):
    def ink():
        return book.panel.evaluate("node => getComputedStyle(node).color")

    light = ink()
    book.command("apputils:change-theme", theme="JupyterLab Dark")
    expect(book.page.locator("body")).to_have_attribute("data-jp-theme-light", "false")
    book.page.wait_for_function(
        "light => getComputedStyle(document.querySelector('.vmp')).color !== light", arg=light, timeout=FOLLOW_MS
    )
    red, green, blue = map(int, re.findall(r"\d+", ink())[:3])
    assert min(red, green, blue) > 128  # a light ink on a dark page


def it_comes_back_after_a_reload(book):
    book.reload()
    expect(book.row("net")).to_contain_text("0 B of 16.0 MiB", timeout=RUN_MS)
    expect(book.panel.locator(".vmp-mark-out")).to_have_count(2)  # of before it was loaded
    book.row("net").get_by_role("button", name="load").click()
    expect(book.row("net")).to_contain_text("16.0 MiB of 16.0 MiB")


def without_its_kernel_the_report_stays(book):
    book.command("kernelmenu:shutdown")
    book.reload()
    expect(book.report).to_be_visible()
    expect(book.report).to_contain_text("16.0 MiB of 16.0 MiB")  # a report is of its moment
    expect(book.report).to_contain_text("of 64.0 MiB used")
    expect(book.views).to_have_count(0)
