"""The live panel in a real JupyterLab, driven in Chromium.

Without this, the panel may stand still while a cell runs, which is when it is looked at, or the browser may show
nothing at all where every test in the kernel passes.
"""

import os
from pathlib import Path

import pytest

pytest.importorskip("jupyterlab", reason="JupyterLab is not installed")
pytest.importorskip("playwright", reason="playwright is not installed")

from playwright.sync_api import expect, sync_playwright

pytestmark = pytest.mark.cpu_only("kernel")

CELLS = [
    """\
%load_ext vram_magic
import time
from pathlib import Path
from torch import nn
import vram_magic as vm

def wait_for(name):
    end = time.monotonic() + 30
    while not Path(name).exists() and time.monotonic() < end:
        time.sleep(0.05)

%vram budget 64MiB""",
    "%load_model net nn.Linear(2048, 2048)",
    "%vram panel",
    "%vram",
    "wait_for('seen'); vm.manager()['net'].evict(); wait_for('followed')",
]
PANEL, REPORT, LAST = 2, 3, 4
RUN_MS = 30_000  # from Lab's page to the last cell
FOLLOW_MS = 5_000  # the panel looks four times a second


@pytest.fixture
def lab(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "docs")
    import screenshot

    with sync_playwright() as playwright:
        if not os.path.exists(screenshot.browser_path(playwright)):
            pytest.skip("there is no Chromium")
    return screenshot


@pytest.mark.browser
def test_the_panel_follows_while_a_cell_runs_and_the_report_is_seen(lab, tmp_path):
    with lab.lab(tmp_path, CELLS) as page:
        panel, report = (page.locator(".jp-CodeCell").nth(n).locator(".jp-OutputArea") for n in (PANEL, REPORT))
        lab.run_all(page)
        expect(panel).to_contain_text("16.0 MiB of 16.0 MiB", timeout=RUN_MS)
        expect(lab.prompt(page, LAST)).to_have_text("[*]:")
        (tmp_path / "seen").touch()
        expect(panel).to_contain_text("0 B of 16.0 MiB", timeout=FOLLOW_MS)
        expect(lab.prompt(page, LAST)).to_have_text("[*]:")  # it runs while the panel follows
        (tmp_path / "followed").touch()
        expect(lab.prompt(page, LAST)).to_have_text("[5]:", timeout=FOLLOW_MS)
        expect(report).to_be_visible()
        expect(report).to_contain_text("16.0 MiB of 16.0 MiB")  # a report is of its moment
        expect(report).to_contain_text("of 64.0 MiB used")
