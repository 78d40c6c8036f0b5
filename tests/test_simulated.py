"""The simulated GPU behaves like CUDA where this project looks.

Without these the other tests would prove on the simulation what fails on a card: an allocator that counts otherwise,
freed memory that still looks sound, copies that go nowhere.
"""

from __future__ import annotations

import copy
import io
import os
import threading

import pytest
import simulated
import torch
from torch import nn
from torch.nn import functional

pytestmark = pytest.mark.simulation_only

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _the_device_as_it_came():
    torch.cuda.empty_cache()
    yield
    simulated.set_capacity(simulated.CAPACITY_BYTES)
    simulated.set_foreign(0)
    simulated.set_integrated(False)
    simulated.set_capturing(False)


# --------------------------------------------------------------------------------------------------------------- memory


def test_sizes_are_rounded_up_to_512_bytes_and_counted():
    before = simulated.live_bytes()
    taken = torch.empty(513, dtype=torch.uint8, device="cuda")
    assert simulated.live_bytes() == before + 1024
    assert torch.cuda.memory_allocated() == torch.accelerator.memory_allocated() == before + 1024
    del taken
    assert torch.cuda.memory_allocated() == before


def test_freed_memory_stays_reserved_until_the_cache_is_emptied():
    reserved = torch.cuda.memory_reserved()
    taken = torch.empty(MIB, dtype=torch.uint8, device="cuda")
    del taken
    assert torch.cuda.memory_reserved() == torch.accelerator.memory_reserved() == reserved + MIB
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == reserved
    assert torch.cuda.memory_stats()["allocation.all.freed"] > 0


def test_beyond_the_capacity_the_cache_is_flushed_and_then_it_is_out_of_memory():
    free, total = torch.cuda.mem_get_info()
    simulated.set_capacity(total - free + 4 * MIB)
    cached = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
    del cached
    fits = torch.empty(4 * MIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_stats()["num_alloc_retries"] >= 1
    with pytest.raises(torch.OutOfMemoryError, match=r"CUDA out of memory. Tried to allocate 1 MiB"):
        torch.empty(MIB, dtype=torch.uint8, device="cuda")
    del fits
    assert torch.empty(MIB, dtype=torch.uint8, device="cuda").numel() == MIB


def test_what_other_processes_hold_is_not_free():
    free, total = torch.cuda.mem_get_info()
    simulated.set_foreign(free - MIB)
    assert torch.cuda.mem_get_info() == torch.accelerator.get_memory_info() == (MIB, total)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2 * MIB, dtype=torch.uint8, device="cuda")


def test_the_peak_is_kept_until_it_is_reset():
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    taken = torch.empty(MIB, dtype=torch.uint8, device="cuda")
    del taken
    assert torch.cuda.max_memory_allocated() == torch.accelerator.max_memory_allocated() == before + MIB
    torch.accelerator.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == before


def test_freed_and_fresh_memory_is_poisoned():
    taken = torch.zeros(64, dtype=torch.uint8, device="cuda")
    del taken
    assert torch.all(torch.empty(64, dtype=torch.uint8, device="cuda") == 0xEE)
    assert torch.all(torch.empty(12345, dtype=torch.uint8, device="cuda") == 0xEE)


def test_threads_allocate_and_free_without_losing_count():
    before = simulated.live_bytes()

    def hammer() -> None:
        for size in range(1, 400):
            torch.empty(size * 100, dtype=torch.uint8, device="cuda").fill_(1)

    threads = [threading.Thread(target=hammer) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert simulated.live_bytes() == before


def test_tensors_without_elements_take_no_memory():
    before = simulated.live_bytes()
    empty = torch.empty(0, 5, device="cuda")
    assert (empty.data_ptr(), empty.sum().item(), simulated.live_bytes()) == (0, 0.0, before)
    assert torch.equal(empty.cpu(), torch.empty(0, 5))


# --------------------------------------------------------------------------------------------------------------- copies

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool, torch.int8, torch.uint8,
    torch.int64, torch.uint16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu,
]  # fmt: skip


@pytest.mark.parametrize("non_blocking", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_goes_there_and_back_bit_for_bit(dtype, non_blocking):
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (6, 16), dtype=torch.uint8)
    values = raw.view(dtype)
    there = values.to("cuda", non_blocking=non_blocking)
    again = torch.empty_like(there).copy_(there, non_blocking=non_blocking)
    assert (there.device, there.dtype) == (torch.device("cuda:0"), dtype)
    assert torch.equal(again.cpu().view(torch.uint8), raw)
    assert torch.equal(torch.empty_like(values).copy_(there).view(torch.uint8), raw)


def test_copies_keep_strides_and_convert():
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    there = image.cuda()
    assert there.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(there.cpu(), image)
    assert torch.equal(there.half().cpu(), image.half())
    broadcast = torch.zeros(3, 4, device="cuda").copy_(torch.arange(4.0))
    assert broadcast.tolist() == [[0, 1, 2, 3]] * 3


def test_a_parameters_data_moves_both_ways_and_it_stays_the_same_object():
    layer = nn.Linear(4, 4)
    weight, values = layer.weight, layer.weight.detach().clone()
    layer.cuda()
    assert layer.weight is weight
    assert weight.is_cuda
    weight.data = weight.data.cpu()
    assert not weight.is_cuda
    weight.data = weight.data.to("cuda")
    assert weight.is_cuda
    assert torch.equal(weight.cpu(), values)
    with pytest.raises(RuntimeError, match="same device"):
        functional.linear(torch.randn(2, 4), weight)


def test_saving_loading_and_deepcopy_keep_values_and_device():
    layer = nn.Linear(4, 4).cuda()
    twin = copy.deepcopy(layer)
    assert twin.weight.is_cuda
    assert twin.weight.data_ptr() != layer.weight.data_ptr()
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    for place in ("cpu", "cuda"):
        file.seek(0)
        state = torch.load(file, map_location=place)
        assert state["weight"].device.type == place
        assert torch.equal(state["weight"].cpu(), twin.weight.cpu())


def test_storages_are_made_grown_and_emptied():
    storage = torch.UntypedStorage(1000, device="cuda")
    assert (storage.nbytes(), storage.device.type) == (1000, "cuda")
    before = simulated.live_bytes()
    tensor = torch.arange(10.0, device="cuda")
    tensor.untyped_storage().resize_(0)
    assert simulated.live_bytes() == before
    tensor.untyped_storage().resize_(40)
    tensor.copy_(torch.arange(10.0))
    assert tensor.tolist() == list(range(10))
    assert torch.equal(tensor.resize_(2, 20)[0, :10].cpu(), torch.arange(10.0))
    simulated.set_capacity(0)
    with pytest.raises(torch.OutOfMemoryError):
        tensor.untyped_storage().resize_(10 * MIB)
    with pytest.raises(torch.OutOfMemoryError):
        tensor.resize_(10 * MIB)


def test_pinned_memory_is_told_from_other_host_memory():
    pinned = torch.empty(10, pin_memory=True)
    assert pinned.is_pinned()
    assert pinned[3:].is_pinned()
    assert torch.randn(3).pin_memory().is_pinned()
    assert not torch.empty(10).is_pinned()
    assert torch.equal(torch.ones(3).pin_memory().to("cuda", non_blocking=True).cpu(), torch.ones(3))
    runtime, plain = torch.cuda.cudart(), torch.empty(1000)
    assert int(runtime.cudaHostRegister(plain.data_ptr(), 4000, 0)) == 0
    assert plain.is_pinned()
    assert int(runtime.cudaHostUnregister(plain.data_ptr())) == 0
    assert not plain.is_pinned()


# -------------------------------------------------------------------------------------------------------------- runtime


def test_streams_and_events_are_told_apart_and_are_done_at_once():
    one, other = torch.cuda.Stream(), torch.Stream(device="cuda")
    assert one.stream_id != other.stream_id
    default = torch.cuda.current_stream()
    with torch.cuda.stream(one):
        assert torch.cuda.current_stream() == one
        assert torch.accelerator.current_stream().stream_id == one.stream_id
        x = torch.ones(3, device="cuda")
    assert torch.cuda.current_stream() == default == torch.cuda.default_stream()
    x.record_stream(default)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    end.record(one)
    default.wait_event(end)
    default.wait_stream(one)
    one.synchronize()
    end.synchronize()
    assert one.query()
    assert end.query()
    assert begin.elapsed_time(end) >= 0
    assert torch.Event(device="cuda").record() is None
    torch.cuda.synchronize()
    torch.accelerator.synchronize()


def test_the_device_tells_what_it_is():
    assert torch.cuda.is_available()
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    assert (torch.cuda.device_count(), torch.cuda.current_device()) == (1, 0)
    assert torch.cuda.get_device_name() == "Simulated GPU"
    assert torch.cuda.get_device_capability() == (8, 0)
    assert torch.cuda.is_bf16_supported()
    simulated.set_capacity(3 << 30)
    simulated.set_integrated(True)
    properties = torch.cuda.get_device_properties("cuda")
    assert (properties.total_memory, properties.is_integrated) == (3 << 30, 1)
    assert len(str(properties.uuid)) == 36
    assert not torch.cuda.is_current_stream_capturing()
    simulated.set_capturing(True)
    assert torch.cuda.is_current_stream_capturing()


def test_there_is_no_second_device():
    with torch.cuda.device(0):
        torch.cuda.set_device(0)
    torch.cuda.ipc_collect()
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.cuda.set_device(1)
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.empty(1, device="cuda:1")


def test_a_forked_child_cannot_use_the_device():
    torch.cuda.init()
    child = os.fork()
    if child == 0:
        try:
            torch.cuda._lazy_init()
        except RuntimeError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
