"""Makes docs/vram.png, the picture in the README, from a real JupyterLab: ``make screenshot``.

A small notebook and its models are made in a temporary folder, Lab runs there with settings of its own, and Chromium
(the system's, or else Playwright's) is driven by Playwright. Tests of the panel use the same helpers.
"""
# ruff: noqa: INP001  a script

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import Locator, Page, Playwright, expect, sync_playwright

PICTURE = Path(__file__).parent / "vram.png"
CELLS = [
    "%load_ext vram_magic\n%vram budget 480MiB",
    "%load_model llm models/llm\n%load_model tts models/tts\n%load_model asr models/asr",
    "%vram panel",
    "import torch\n\nprompt = torch.tensor([[1, 15, 27, 300, 42]])\nreply = llm.generate(prompt, max_new_tokens=8)",
]
REFRESH_S = 1  # the panel looks four times a second
PAGES = {"jupyterlab": "doc/tree", "notebook": "notebooks"}
START_S = 60  # for Lab, and for its page
RUN_S = 120  # for all cells
KERNEL_IS_IDLE = "window.jupyterapp.shell.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'"
PLAIN = """
.jp-cell-toolbar, .jp-Collapser { visibility: hidden }
.jp-Cell { border-color: transparent !important; box-shadow: none !important; outline: none !important }
"""
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def browser_path(playwright: Playwright) -> str:
    """Where Chromium is, or would be."""
    return shutil.which("chromium") or playwright.chromium.executable_path


@contextlib.contextmanager
def lab(
    folder: Path, cells: list[str], width: int = 900, height: int = 1200, app: str = "jupyterlab"
) -> Iterator[Page]:
    """A page that shows a notebook of these cells, none of them run, in a JupyterLab (or ``notebook``) of its own."""
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = new_notebook(cells=[new_code_cell(cell) for cell in cells], metadata={"kernelspec": kernel})
    nbformat.write(notebook, folder / "demo.ipynb")
    with _server(folder, app) as (address, token), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path(playwright), args=FLAGS)
        page = browser.new_page(viewport={"width": width, "height": height}, device_scale_factor=2)
        page.set_default_timeout(START_S * 1000)
        # Lab asks for a kernel when it does not find one at once.
        page.add_locator_handler(page.locator(".jp-Dialog"), lambda dialog: dialog.locator(".jp-mod-accept").click())
        page.goto(f"{address}/{PAGES[app]}/demo.ipynb?token={token}")
        expect(page.locator(".jp-CodeCell")).to_have_count(len(cells), timeout=START_S * 1000)
        page.wait_for_function(KERNEL_IS_IDLE)  # cells that are started before are not run at all
        yield page
        browser.close()


def run_all(page: Page) -> None:
    """Starts all cells; waits for none."""
    page.evaluate("void window.jupyterapp.commands.execute('notebook:run-all-cells')")


def prompt(page: Page, cell: int) -> Locator:
    """What stands before the cell: ``[*]:`` while it waits or runs, then its number."""
    return page.locator(".jp-CodeCell").nth(cell).locator(".jp-InputPrompt")


@contextlib.contextmanager
def _server(folder: Path, app: str) -> Iterator[tuple[str, str]]:
    home, token = folder / ".jupyter", secrets.token_hex()
    news = home / "settings" / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
    news.parent.mkdir(parents=True)
    news.write_text('{"fetchNews": "false", "checkForUpdates": false}')  # or Lab asks, in front of the notebook
    places = {
        "JUPYTER_CONFIG_DIR": "config",
        "JUPYTER_RUNTIME_DIR": "runtime",
        "JUPYTERLAB_SETTINGS_DIR": "settings",
        "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
        "IPYTHONDIR": "ipython",
    }
    env = os.environ | {name: str(home / place) for name, place in places.items()}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        host, port = free.getsockname()
    options = {"root_dir": folder, "ip": host, "port": port, "port_retries": 0}
    command = [sys.executable, "-m", app, "--no-browser", "--allow-root", "--expose-app-in-browser"]
    command += [f"--IdentityProvider.token={token}", *(f"--ServerApp.{key}={value}" for key, value in options.items())]
    with (folder / "lab.log").open("w") as log:
        process = subprocess.Popen(command, env=env, cwd=folder, stdout=log, stderr=log)  # noqa: S603  our own command
    try:
        _wait_for(host, port, process, folder / "lab.log")
        yield f"http://{host}:{port}", token
    finally:
        process.terminate()  # ends the kernels too
        process.wait()


def _wait_for(host: str, port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1):
            return
        time.sleep(0.1)
    raise RuntimeError(f"JupyterLab did not start:\n{log.read_text()}")


# ------------------------------------------------------------------------------------------------------- the picture


def save_models(folder: Path) -> None:
    """An LLM, a speech synthesiser and a speech recogniser, with random weights of 545 MiB together."""
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        VitsConfig,
        VitsModel,
        WhisperConfig,
        WhisperForConditionalGeneration,
    )

    llama = LlamaConfig(
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=8,
        vocab_size=32000,
        pad_token_id=0,
    )
    whisper = WhisperConfig(d_model=384, encoder_ffn_dim=1536, decoder_ffn_dim=1536)
    LlamaForCausalLM(llama).save_pretrained(folder / "llm")
    VitsModel(VitsConfig()).save_pretrained(folder / "tts")
    WhisperForConditionalGeneration(whisper).save_pretrained(folder / "asr")


def main() -> None:
    """Runs the demo and takes the picture."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_models(folder / "models")
        startup = folder / ".jupyter" / "ipython" / "profile_default" / "startup" / "quiet.py"
        startup.parent.mkdir(parents=True)
        startup.write_text("import logging\nlogging.disable(logging.WARNING)\n")  # what other libraries say at import
        with lab(folder, CELLS) as page:
            run_all(page)
            expect(prompt(page, len(CELLS) - 1)).to_have_text(f"[{len(CELLS)}]:", timeout=RUN_S * 1000)
            page.add_style_tag(content=PLAIN)
            page.wait_for_timeout(REFRESH_S * 1000)
            first, last = (page.locator(".jp-CodeCell").nth(n).bounding_box() for n in (0, -1))
            assert first is not None  # noqa: S101  both are on the page
            assert last is not None  # noqa: S101
            page.screenshot(path=PICTURE, clip=first | {"height": last["y"] + last["height"] - first["y"]})


if __name__ == "__main__":
    main()
