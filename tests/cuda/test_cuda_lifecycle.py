"""The guard is there from `%load_ext` to `%unload_ext`, once, and never in a forked child.

Without this an unloaded extension would go on refusing memory, or a child would wait for a thread that it has not got.
"""

from __future__ import annotations

import os

import pytest
import torch
from helpers import MIB, contents, stack, take

import vram_magic as vm

pytestmark = [pytest.mark.timeout(100), pytest.mark.usefixtures("watchdog")]


def test_the_extension_takes_the_accelerator_and_gives_it_back(standin, bare_notebook):
    for _ in range(2):
        bare_notebook.run("%load_ext vram_magic")
        assert "cuda:0" in bare_notebook.run("%vram")
        bare_notebook.run(f"%vram budget {torch.cuda.memory_allocated() + 8 * MIB}")
        bare_notebook.run("import torch, vram_magic as vm")
        failed = bare_notebook.fail("torch.empty(20 << 20, dtype=torch.uint8, device='cuda')")
        assert "Not enough memory on cuda:0" in failed
        assert bare_notebook.run("print(len(vm.manager().journal))").strip() == "1"
        bare_notebook.run("%unload_ext vram_magic")
        bare_notebook.run("torch.empty(20 << 20, dtype=torch.uint8, device='cuda').numel()")


def test_a_cell_that_caused_an_eviction_says_so_in_one_line(standin, bare_notebook):
    standin.capacity_bytes = 4 << 30  # `auto` keeps a reserve
    bare_notebook.run("%load_ext vram_magic")
    bare_notebook.run("import torch\nfrom torch import nn")
    bare_notebook.run("model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(20)])")
    bare_notebook.run("%load_model model model")
    assert bare_notebook.run("print(model[0].weight.is_cuda)").strip() == "True"
    bare_notebook.run(f"%vram budget {torch.cuda.memory_allocated() + 4 * MIB}")
    told = bare_notebook.run("x = torch.empty(12 << 20, dtype=torch.uint8, device='cuda')")
    assert len(told.strip().splitlines()) == 1
    assert "model" in told
    bare_notebook.run("%vram evict model")
    bare_notebook.run("%unload_ext vram_magic")
    assert bare_notebook["model"][0].weight.shape == (512, 512)


def test_a_forked_child_runs_without_the_guard_and_reads_true_weights(open_manager):
    model = stack(4)
    before = contents(model)
    mgr = open_manager(budget=torch.cuda.memory_allocated() + 2 * MIB)
    handle = mgr.register("evicted", model)
    handle.evict()
    wanted = [tensor.numpy().tobytes() for tensor in before]
    child = os.fork()
    if child == 0:
        # Bytes, not tensors: torch's OpenMP hangs in a forked child.
        right = [p.detach().numpy().tobytes() for p in model.parameters()] == wanted
        try:
            take(64 * MIB)
        except torch.OutOfMemoryError:
            right = False  # nobody may refuse here; torch itself says that CUDA cannot be used
        except RuntimeError:
            pass
        os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0
    handle.load()
    assert all(map(torch.equal, contents(model), before))


def test_one_manager_for_the_accelerator_and_one_for_the_processor(open_manager, tmp_path):
    mgr = open_manager(budget=torch.cuda.memory_allocated() + 8 * MIB)
    with pytest.raises(vm.VRAMError, match="has a manager already"):
        open_manager()
    beside = vm.VRAMManager(device="cpu", budget="1GiB", spill_dir=tmp_path)
    used = mgr.used_bytes, beside.used_bytes
    here, there = torch.empty(MIB, dtype=torch.uint8), take(2 * MIB)
    assert (mgr.used_bytes - used[0], beside.used_bytes - used[1]) == (2 * MIB, MIB)
    beside.close()
    with pytest.raises(torch.OutOfMemoryError):
        take(20 * MIB)
    del here, there


def test_a_device_that_is_not_there_is_told_so(standin):
    with pytest.raises(vm.VRAMError, match="cuda:7"):
        vm.VRAMManager(device="cuda:7")
