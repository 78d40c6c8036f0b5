"""While a CUDA graph is captured nothing leaves: a free or a wait would break the graph that the user is recording."""

from __future__ import annotations

import threading

import pytest
import torch
from helpers import MIB, stack, take

import vram_magic as vm

pytestmark = [pytest.mark.timeout(100), pytest.mark.usefixtures("watchdog")]


@pytest.fixture
def idle(open_manager):
    """A model of 20 MiB in a budget that has 4 more."""
    model = stack(20)
    mgr = open_manager(budget=torch.cuda.memory_allocated() + 4 * MIB)
    return mgr, mgr.register("idle", model), model


def test_an_allocation_during_a_capture_is_refused_and_told_so(idle, standin):
    _mgr, handle, _model = idle
    standin.pretend_capture(on=True)
    before = standin.counts()
    with pytest.raises(torch.OutOfMemoryError) as caught:
        take(12 * MIB)
    after = standin.counts()
    standin.pretend_capture(on=False)
    assert len(str(caught.value).splitlines()) == 4
    assert "captured" in str(caught.value)
    assert "make_room" in str(caught.value)
    assert handle.device_bytes == 20 * MIB
    assert (after["frees"], after["syncs"]) == (before["frees"], before["syncs"])
    taken = take(12 * MIB)
    assert handle.device_bytes == 12 * MIB
    del taken


def test_nobody_makes_room_while_another_thread_captures(idle):
    mgr, handle, _model = idle
    static, graph = torch.ones(1000, device="cuda"), torch.cuda.CUDAGraph()
    refused = []

    def ask() -> None:
        for attempt in (lambda: take(12 * MIB), lambda: mgr.make_room(12 * MIB)):
            try:
                attempt()
            except torch.OutOfMemoryError as error:
                refused.append(str(error))

    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = static * 2
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    assert len(refused) == 2
    assert all("captured" in text for text in refused)
    assert handle.device_bytes == 20 * MIB
    graph.replay()
    assert mgr.make_room(12 * MIB) == 20 * MIB - handle.device_bytes > 0
    assert mgr.free_bytes >= 12 * MIB
    del result


def test_evict_during_a_capture_moves_nothing(idle, standin):
    mgr, handle, _model = idle
    standin.pretend_capture(on=True)
    try:
        handle.evict()
    except vm.VRAMError as error:
        assert "captur" in str(error)  # noqa: PT017  either answer will do, as long as nothing moves
    standin.pretend_capture(on=False)
    assert handle.device_bytes == 20 * MIB
    used = mgr.used_bytes
    assert handle.evict() == 20 * MIB
    assert mgr.used_bytes == used - 20 * MIB


def test_a_capture_that_fits_is_recorded_under_a_manager_and_replayed(idle):
    _mgr, handle, _model = idle
    static, graph = torch.ones(1000, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = static * 2
    graph.replay()
    assert result.shape == static.shape
    assert handle.state == "device"
