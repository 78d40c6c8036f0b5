"""The tests of this folder run on the stand-in CUDA runtime, with torch's CUDA build: `make test-cuda`.

Anywhere else they are skipped: they set the driver's figures, which no real card lets them do.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
from standin import Standin, environment, is_preloaded

HERE = Path(__file__).parent
TIME_LIMIT = 120  # seconds for a script of its own; a hang prints all stacks and fails


def pytest_collection_modifyitems(items):
    if is_preloaded():
        return
    skip = pytest.mark.skip(reason="not on the stand-in CUDA runtime: make test-cuda")
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(skip)


@pytest.fixture
def standin():
    """The stand-in under this process, with nothing allocated."""
    import torch

    standin = Standin()
    standin.reset()
    gc.collect()
    torch.cuda.empty_cache()
    yield standin
    standin.reset()
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture
def open_manager(standin, tmp_path):
    """Opens a manager of the stand-in's device; it is closed after the test."""
    import vram_magic as vm

    opened = []

    def open_one(**options):
        options = {"budget": "64MiB", "block_bytes": "1MiB", "spill_dir": tmp_path} | options
        opened.append(vm.VRAMManager(device="cuda", **options))
        return opened[-1]

    yield open_one
    for manager in opened:
        manager.close()


@pytest.fixture
def watchdog(request):
    """Ends a test that hangs with the stacks of all threads; unlike pytest's own limit it needs no GIL for it."""
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        terminal = os.fdopen(os.dup(2), "w")  # what is captured is lost when the process ends
    faulthandler.dump_traceback_later(TIME_LIMIT, exit=True, file=terminal)
    yield
    faulthandler.cancel_dump_traceback_later()
    terminal.close()


@pytest.fixture
def run_script():
    """Runs a script in a process of its own on the stand-in, and returns what it printed; it must succeed."""

    def run(*arguments, **changes):
        command = [sys.executable, "-X", "faulthandler", *map(str, arguments)]
        options = {"env": environment(**changes), "cwd": HERE, "timeout": TIME_LIMIT}
        done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run
