"""The panel in Notebook 7, which shares JupyterLab's parts and is another page all the same: ``make test-kernels``.

Without this, the panel may be blank, or deaf, for those who use it. The release is put into a folder under build/, so
that the environment stays as it is. Prints one line; fails when something does not appear.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import expect

REPOSITORY = Path(__file__).parents[2]
FOLDER = REPOSITORY / "build" / "kernels" / "notebook-7"
REQUIREMENTS = ["notebook>=7,<8", "notebook_shim"]
CELLS = [
    """\
%load_ext vram_magic
%vram budget 64MiB
import time
from torch import nn
import vram_magic as vm
net = nn.Linear(2048, 2048)
h = vm.manager().register("net", net)""",
    "%vram panel",
    "time.sleep(1); h.evict(); time.sleep(3)",
    "%vram",
]
BUSY = 2
RUN_MS, FOLLOW_MS = 30_000, 10_000


def check(lab, page) -> None:
    """Follows a busy cell, clicks in it, and types."""
    row, notice = page.locator(".vmp tbody tr").first, page.locator(".vmp").get_by_role("status")
    lab.run_all(page)
    expect(row).to_contain_text("16.0 MiB of 16.0 MiB", timeout=RUN_MS)
    expect(row).to_contain_text("0 B of 16.0 MiB", timeout=FOLLOW_MS)
    expect(lab.prompt(page, BUSY)).to_have_text("[*]:")
    row.get_by_role("button", name="load").press("Enter")
    expect(notice).to_have_text("net: 16.0 MiB on the device", timeout=FOLLOW_MS)
    field = page.get_by_label("What would leave for")
    field.fill("99GiB")
    field.press("Enter")
    expect(notice).to_contain_text("A request of 99.0 GiB: not enough room", timeout=FOLLOW_MS)


def main() -> None:
    """Checks the newest release of Notebook 7."""
    if not FOLDER.exists():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(FOLDER), *REQUIREMENTS]
        subprocess.run(command, check=True)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(FOLDER), str(REPOSITORY)])
    os.environ["JUPYTER_PATH"] = str(FOLDER / "share" / "jupyter")  # where its own front end lies
    sys.path.insert(0, str(REPOSITORY / "docs"))
    import screenshot

    with tempfile.TemporaryDirectory() as name, screenshot.lab(Path(name), CELLS, app="notebook") as page:
        check(screenshot, page)
    print("Notebook 7: the panel follows a busy cell, a click in it is done, what is typed arrives")


if __name__ == "__main__":
    main()
