"""What other processes hold of the device lowers what we may use, and whoever holds it is named.

Without this `auto` promises memory that is not there, and the error blames our own models for it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from helpers import MIB, stack, take

pytestmark = [pytest.mark.timeout(100), pytest.mark.usefixtures("watchdog")]

GIB = 1 << 30


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen]:
    """Another process; what it holds of the device is only pretended."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.communicate(b"\n")


def test_auto_is_what_the_driver_says_is_free_with_what_we_hold(open_manager, standin):
    standin.capacity_bytes = 4 * GIB
    mgr = open_manager(budget="auto")
    before = mgr.budget_bytes
    assert 3 * GIB < before < 4 * GIB
    kept = take(100 * MIB)
    mgr.make_room(0)
    assert mgr.budget_bytes == before
    standin.set_foreign(GIB)
    mgr.make_room(0)
    assert mgr.budget_bytes == before - GIB
    del kept


def test_room_is_made_when_others_take_the_device(open_manager, standin):
    model = stack(20)
    mgr = open_manager(budget="10GiB")
    handle = mgr.register("idle", model)
    torch.cuda.empty_cache()
    standin.set_foreign(standin.capacity_bytes - standin.used_bytes - 4 * MIB)
    taken = take(12 * MIB)
    assert handle.state == "partial"
    del taken


def test_the_error_names_the_process_that_holds_the_device(open_manager, standin, stranger):
    mgr = open_manager(budget="10GiB")
    torch.cuda.empty_cache()
    held = standin.capacity_bytes - standin.used_bytes - 4 * MIB
    standin.set_foreign(held, stranger.pid, "/usr/bin/python3")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        take(64 * MIB)
    cause, remedy = str(caught.value).splitlines()[2:]
    assert "other processes" in cause
    assert f"pid {stranger.pid}" in cause
    assert "processes" in remedy
    assert mgr.last_error.holders["other processes"] == held


def test_the_report_tells_of_others_by_name_and_without_one(open_manager, standin, stranger):
    mgr = open_manager()
    standin.set_foreign(50 * MIB, stranger.pid, "/usr/bin/python3")
    outside = mgr.outside(processes=True)
    assert outside.foreign_bytes == 50 * MIB
    assert outside.total_bytes - outside.free_bytes == standin.used_bytes + 50 * MIB
    (told,) = outside.processes
    assert str(stranger.pid) in told
    assert "50.0 MiB" in told
    standin.set_foreign(50 * MIB)
    assert mgr.outside(processes=True).foreign_bytes == 50 * MIB
    assert mgr.outside(processes=True).processes == ()
