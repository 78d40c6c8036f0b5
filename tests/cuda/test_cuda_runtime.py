"""The stand-in itself does what the other tests of this folder rely on.

Without this they would pass on a device that is never full, that copies nothing, or whose freed memory can be read.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pynvml
import pytest
import torch
from helpers import MIB, take
from standin import environment


def test_copies_are_real_in_both_directions(standin):
    there = torch.randn(1000, 7)
    assert torch.equal(there.cuda().cpu(), there)
    assert torch.equal(there.cuda().clone().cpu(), there)


def test_products_of_matrices_are_computed(standin):
    x, layer = torch.randn(3, 4, 33), torch.nn.Linear(33, 19, bias=False)
    assert torch.allclose(layer.cuda()(x.cuda()).cpu(), layer.cpu()(x), atol=1e-5)


def test_a_full_device_fails_with_torchs_own_error_and_counts_it(standin):
    standin.capacity_bytes = standin.used_bytes + 20 * MIB
    before = standin.counts()
    kept = take(16 * MIB)
    with pytest.raises(torch.OutOfMemoryError):
        take(16 * MIB)
    after = standin.counts()
    assert after["mallocs"] - before["mallocs"] == 3  # torch flushes its cache and tries again
    assert after["ooms"] - before["ooms"] == 2
    assert standin.used_bytes <= standin.capacity_bytes
    del kept
    torch.cuda.empty_cache()
    assert standin.counts()["frees"] > before["frees"]


def test_memory_that_was_freed_cannot_be_touched():
    code = """
import ctypes, torch
x = torch.empty(32 << 20, dtype=torch.uint8, device="cuda")
address = x.data_ptr()
ctypes.memset(address, 1, 8)
del x
torch.cuda.empty_cache()
ctypes.memset(address, 1, 8)
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment(), check=False)
    assert done.returncode == -signal.SIGSEGV


def test_the_figures_of_torch_and_nvml_are_the_same_and_hold_what_others_have(standin):
    kept = take(30 * MIB)
    standin.set_foreign(50 * MIB, pid=4242, name="/usr/bin/greedy")
    free, total = torch.cuda.mem_get_info()
    assert total - free == standin.used_bytes + 50 * MIB
    pynvml.nvmlInit()
    device = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
    memory = pynvml.nvmlDeviceGetMemoryInfo(device)
    assert (memory.free, memory.total) == (free, total)
    users = {process.pid: process.usedGpuMemory for process in pynvml.nvmlDeviceGetComputeRunningProcesses(device)}
    assert users == {os.getpid(): standin.used_bytes, 4242: 50 * MIB}
    assert pynvml.nvmlSystemGetProcessName(4242) == "/usr/bin/greedy"
    pynvml.nvmlShutdown()
    del kept


def test_what_nvml_cannot_name_still_counts(standin):
    before = torch.cuda.mem_get_info()[0]
    standin.set_foreign(50 * MIB)
    assert torch.cuda.mem_get_info()[0] == before - 50 * MIB


def test_a_graph_is_captured_between_its_begin_and_end_only(standin):
    graph, static = torch.cuda.CUDAGraph(), torch.ones(1000, device="cuda")
    with torch.cuda.graph(graph):
        assert torch.cuda.is_current_stream_capturing()
        result = static * 2
        with pytest.raises(RuntimeError, match="operation not permitted when stream is capturing"):
            torch.cuda.current_stream().synchronize()
    assert not torch.cuda.is_current_stream_capturing()
    launched = standin.counts()["launches"]
    graph.replay()
    assert standin.counts()["launches"] == launched + 1
    del result


def test_a_pretended_capture_shows_in_every_stream(standin):
    standin.pretend_capture(on=True)
    assert torch.cuda.is_current_stream_capturing()
    with torch.cuda.stream(torch.cuda.Stream()):
        assert torch.cuda.is_current_stream_capturing()


def test_pinned_memory_is_known_as_such(standin):
    assert torch.empty(100).pin_memory().is_pinned()
    assert not torch.empty(100).is_pinned()


def test_a_forked_child_cannot_use_the_device(standin):
    kept = take(MIB)
    child = os.fork()
    if child == 0:
        try:
            kept.cpu()
        except RuntimeError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
