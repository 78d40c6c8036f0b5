"""The checks that `first_check.py` makes: each returns what to show in the table, and fails by any exception.

They use the public interface only. Sizes are bytes.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from card import (
    GIB,
    LAYER_BYTES,
    LAYERS,
    MIB,
    REHEARSAL,
    Skipped,
    contents,
    hogged,
    in_threads,
    inputs,
    manager,
    needs_kernels,
    refused,
    same,
    stack,
    take,
)
from torch import nn

import vram_magic as vm

__all__ = ["CHECKS"]

CHECKS: dict[str, Callable[[], str]] = {}
ESSENTIAL = ("same call", "full device", "values", "backward", "threads")  # again, with other allocators


def check(name: str) -> Callable[[Callable[[], str]], Callable[[], str]]:
    """Adds a check to the table."""

    def add(function: Callable[[], str]) -> Callable[[], str]:
        CHECKS[name] = function
        return function

    return add


@check("driver and NVML")
def figures_agree() -> str:
    """NVML counts what the driver keeps for itself differently, so a fiftieth of the card may lie between them."""
    import pynvml

    kept = take(4 * LAYER_BYTES)
    free, total = torch.cuda.mem_get_info()
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    pynvml.nvmlInit()
    device = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")
    memory = pynvml.nvmlDeviceGetMemoryInfo(device)
    pynvml.nvmlShutdown()
    assert abs(memory.free - free) < total / 50, f"free: driver {free}, NVML {memory.free}"
    with manager() as mgr:
        outside = mgr.outside(processes=True)
    assert outside.total_bytes == total
    assert abs(outside.free_bytes - free) < total / 50
    del kept
    others = ", ".join(outside.processes) or "none named"
    return f"{free / GIB:.2f} of {total / GIB:.2f} GiB free; foreign {outside.foreign_bytes / MIB:.0f} MiB ({others})"


@check("guard")
def the_guard_is_native() -> str:
    with manager() as mgr:
        assert mgr.guard.startswith("native"), mgr.guard
        return mgr.guard


@check("same call")
def the_same_call_succeeds_within_a_budget() -> str:
    model, x = stack(), inputs()
    before, expected = contents(model), model(x)
    with manager(2 * LAYER_BYTES) as mgr:
        handle = mgr.register("idle", model)
        start = time.perf_counter()
        taken = take(5 * LAYER_BYTES)
        ms = (time.perf_counter() - start) * 1e3
        assert handle.device_bytes == (LAYERS - 3) * LAYER_BYTES, handle.why()
        assert mgr.used_bytes == torch.cuda.memory_allocated() <= mgr.budget_bytes
        del taken
        assert same(model(x), expected), "the result is another after a round trip"
        assert all(map(torch.equal, contents(model), before)), "weights changed"
    return f"3 layers left within the call, {ms:.0f} ms"


@check("full device")
def the_same_call_succeeds_on_a_full_device() -> str:
    model = stack()
    before = contents(model)
    with hogged(2 * LAYER_BYTES), manager() as mgr:
        handle = mgr.register("idle", model)
        start = time.perf_counter()
        taken = take(5 * LAYER_BYTES)
        ms = (time.perf_counter() - start) * 1e3
        assert handle.state == "partial", handle.why()
        retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)
        assert all(map(torch.equal, contents(model), before)), "weights changed"
        del taken
    return (
        f"{LAYERS - handle.device_bytes // LAYER_BYTES or LAYERS} layers left, {ms:.0f} ms, {retries} retries of torch"
    )


@check("small request")
def a_small_request_succeeds_on_a_full_device() -> str:
    """Torch asks the driver for 20 MiB to give 3, so more has to leave than was asked for."""
    model = nn.ParameterList([nn.Parameter(take(MIB), requires_grad=False) for _ in range(60)])
    with hogged(0), manager(block_bytes=MIB) as mgr:
        handle = mgr.register("idle", model)
        kept = [take(3 * MIB)]
        while handle.state == "device":  # until what torch has left over is used up
            kept.append(take(3 * MIB))
    return f"{60 - handle.device_bytes // MIB} MiB left for {3 * len(kept)}"


@check("refused")
def what_cannot_fit_is_refused_in_four_lines() -> str:
    model = stack(2)
    with manager(2 * LAYER_BYTES) as mgr:
        handle = mgr.register("idle", model, pin=True)
        told = refused(lambda: take(5 * LAYER_BYTES))
        assert len(told.splitlines()) == 4, told
        assert handle.state == "device"
    return told.splitlines()[-1]


@check("values")
def values_are_bit_equal_after_round_trips() -> str:
    model, x = stack(3), inputs()
    before = contents(model)
    with torch.inference_mode():
        expected = model(x)
    done = []
    for residency in ("auto", "host", "disk"):
        with manager(LAYERS * LAYER_BYTES) as mgr:
            handle = mgr.register("model", model, residency=residency)
            for _ in range(2):
                handle.evict()
                assert handle.device_bytes == 0, handle.why()
                with torch.inference_mode():
                    assert same(model(x), expected), residency
            assert all(map(torch.equal, contents(model), before)), residency
        done.append(residency)
    return f"matrix products and bytes, under inference_mode: {', '.join(done)}"


@check("autocast")
def values_are_bit_equal_under_autocast() -> str:
    needs_kernels()
    model, x = stack(3), inputs()
    with torch.autocast("cuda", dtype=torch.float16), torch.no_grad():
        expected = model(x)
        with manager(LAYERS * LAYER_BYTES) as mgr:
            mgr.register("model", model).evict()
            assert same(model(x), expected)
            torch.clear_autocast_cache()
            mgr["model"].evict()
            assert same(model(x), expected)
    return "half precision, with and without autocast's cache"


@check("backward")
def autograd_finds_room_in_its_own_thread() -> str:
    class Allocating(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, found):
            ctx.found = found
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            ctx.found += [threading.get_ident(), take(5 * LAYER_BYTES).numel()]
            return gradient, None

    model, found = stack(), []
    with manager(2 * LAYER_BYTES) as mgr:
        handle = mgr.register("idle", model)
        Allocating.apply(torch.ones(4, device="cuda", requires_grad=True), found).sum().backward()
        assert found[0] != threading.get_ident()
        assert handle.state == "partial", handle.why()
    return "in a thread of autograd"


@check("threads")
def six_threads_never_hang_or_pass_the_budget() -> str:
    models, x = [stack(2) for _ in range(2)], inputs()
    expected, failed = [model(x) for model in models], []
    with manager(LAYER_BYTES) as mgr:
        for number, model in enumerate(models):
            mgr.register(f"m{number}", model)
        mgr.reset_peak()

        def work() -> None:
            for turn in range(20):
                try:
                    taken = take(2 * LAYER_BYTES)
                    own = nn.Parameter(take(MIB), requires_grad=False)
                    own.data = torch.empty(1)
                    torch.cuda.memory_allocated()
                    del taken
                    assert same(models[turn % 2](x), expected[turn % 2])
                except torch.OutOfMemoryError:
                    failed.append(turn)

        in_threads(work)
        assert mgr.peak_bytes <= mgr.budget_bytes, (mgr.peak_bytes, mgr.budget_bytes)
        assert mgr.used_bytes == torch.cuda.memory_allocated()
        assert all(same(model(x), y) for model, y in zip(models, expected, strict=True))
        return f"120 turns, {len(failed)} refused, {len(mgr.journal)} decisions"


@check("speed")
def bytes_move_fast() -> str:
    needs_kernels()
    told, layers = [], 16
    with tempfile.TemporaryDirectory() as folder, manager(layers * 2 * LAYER_BYTES) as mgr:
        model = stack(layers)
        for residency in ("host", "disk"):
            handle = mgr.register(residency, model, residency=residency)
            handle.evict()  # the first copy pays for its memory
            handle.load()
            seconds = []
            for move in (handle.evict, handle.load):
                torch.cuda.synchronize()
                start = time.perf_counter()
                move()
                torch.cuda.synchronize()
                seconds.append(time.perf_counter() - start)
            rates = [layers * LAYER_BYTES / second / 1e9 for second in seconds]
            told.append(f"{residency}: out {rates[0]:.1f}, in {rates[1]:.1f}")
            handle.forget()
        told.append(f"from a file: {_file_rate(mgr, model, Path(folder))}")
    return "GB/s, " + "; ".join(told)


def _file_rate(mgr: vm.VRAMManager, model: nn.Module, folder: Path) -> str:
    from safetensors.torch import save_file

    save_file({name: tensor.cpu() for name, tensor in model.state_dict().items()}, folder / "model.safetensors")
    handle = mgr.register("filed", model, source=folder / "model.safetensors")
    handle.evict()
    assert handle.state == "disk", handle.why()
    start = time.perf_counter()
    handle.load()
    torch.cuda.synchronize()
    return f"in {handle.total_bytes / (time.perf_counter() - start) / 1e9:.1f}"


@check("hot path")
def an_allocation_costs_no_more() -> str:
    """A number only: what it should be depends on the machine."""

    def nanoseconds(size_bytes: int, count: int = 20_000) -> float:
        start = time.perf_counter()
        for _ in range(count):
            torch.empty(size_bytes, dtype=torch.uint8, device="cuda")
        return (time.perf_counter() - start) / count * 1e9

    told = []
    for size_bytes in (64, 4 * MIB):
        bare, guarded = [], []
        for _ in range(5):
            bare.append(nanoseconds(size_bytes))
            with manager(64 * MIB):
                guarded.append(nanoseconds(size_bytes))
        plain, with_guard = statistics.median(bare), statistics.median(guarded)
        told.append(f"{size_bytes} B: {plain:.0f} ns, with guard {with_guard:.0f} ({with_guard / plain:.3f})")
    return "; ".join(told)


@check("graph capture")
def nothing_leaves_while_a_graph_is_captured() -> str:
    model, static, told = stack(), torch.ones(1000, device="cuda"), []
    with manager(2 * LAYER_BYTES) as mgr:
        handle = mgr.register("idle", model)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            result = static * 2 + 1
            in_threads(lambda: told.append(refused(lambda: mgr.make_room(5 * LAYER_BYTES))), 1)
        assert handle.state == "device"
        assert "captured" in told[0], told
        static.fill_(3)
        graph.replay()
        torch.cuda.synchronize()
        assert REHEARSAL or result.unique().tolist() == [7]
        assert mgr.make_room(5 * LAYER_BYTES) > 0
    return "refused with a reason; the graph replays" + (" (values: SKIP)" if REHEARSAL else "")


@check("convolution")
def the_workspace_of_a_convolution_finds_room() -> str:
    needs_kernels()
    model = stack()
    convolution, image = nn.Conv2d(64, 64, 5, padding=2).cuda(), torch.randn(8, 64, 256, 256, device="cuda")
    with torch.backends.cudnn.flags(enabled=True, benchmark=True), torch.no_grad():
        torch.cuda.reset_peak_memory_stats()
        used = torch.cuda.memory_allocated()
        expected = convolution(image)
        needed = torch.cuda.max_memory_allocated() - used
        del expected
        with manager(MIB) as mgr:
            handle = mgr.register("idle", model)
            result = convolution(image)
            assert torch.isfinite(result).all()
            assert handle.state != "device", handle.why()
    return f"{needed / MIB:.0f} MiB for result and workspace"


@check("torch.compile")
def a_compiled_model_works_managed() -> str:
    needs_kernels()
    model, x = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)).cuda(), torch.randn(8, 256).cuda()
    try:
        model.compile()
        with torch.no_grad():
            expected = model(x)
    except Exception as error:
        raise Skipped(f"torch.compile does not work here: {type(error).__name__}") from error
    with torch.no_grad(), manager(64 * MIB, block_bytes="64KiB") as mgr:
        handle = mgr.register("compiled", model)
        handle.evict()
        assert same(model(x), expected)
        assert handle.state == "device", handle.why()
    return "evicted, called, equal"


@check("fragmentation")
def a_large_tensor_fits_among_fragments() -> str:
    layers, piece = 34, 3 * MIB
    models = nn.ModuleList([nn.ParameterList(), nn.ParameterList()])
    for _ in range(layers):
        for model in models:
            model.append(nn.Parameter(take(piece), requires_grad=False))
    told = []
    with hogged(16 * MIB), manager(block_bytes=2 * piece) as mgr:
        handles = [mgr.register(f"m{number}", model) for number, model in enumerate(models)]
        for layout in ("as built", "after a round trip"):
            handles[0].evict()
            out = sum(handle.total_bytes - handle.device_bytes for handle in handles)
            taken = take(100 * MIB)
            more = sum(handle.total_bytes - handle.device_bytes for handle in handles) - out
            del taken
            told.append(f"{layout}: {more // MIB} MiB more had to leave")
            for handle in handles:
                handle.evict()
            torch.cuda.empty_cache()
            for handle in handles:
                handle.load()
    return "; ".join(told)


@check("forked child")
def a_forked_child_lives() -> str:
    model = stack(2)
    before = [weight.numpy().tobytes() for weight in contents(model)]
    with manager(LAYER_BYTES) as mgr:
        mgr.register("evicted", model).evict()
        child = os.fork()
        if child == 0:  # no operation of torch: its OpenMP threads are not here, and would be waited for
            os._exit([weight.detach().numpy().tobytes() for weight in model.parameters()] != before)
        assert os.waitpid(child, 0)[1] == 0, "it died, or read other weights"
    return "reads true weights"


@check("other allocators")
def the_essential_holds_with_other_allocators() -> str:
    for options in ("expandable_segments:True", "backend:cudaMallocAsync"):
        environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": options}
        command = [sys.executable, str(Path(__file__).with_name("first_check.py")), *ESSENTIAL]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90, check=False)
        assert done.returncode == 0, f"with {options}:\n{done.stdout}{done.stderr}"
    return "expandable_segments:True and backend:cudaMallocAsync"
