"""The native guard: every allocation is counted and limited, exactly, and nothing of it stays after `close`.

Without this a tensor of exactly the free bytes would be refused, or one beyond the budget let through.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading

import pytest
import torch
from place import DEVICE, footprint

import vram_magic as vm
from vram_magic.decision import Room
from vram_magic.guard import forwarding, native
from vram_magic.guard.build import GuardUnavailable
from vram_magic.policy import Request
from vram_magic.pressure import Pressure

MIB = 1 << 20


def of(size_bytes: int) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8, device=DEVICE)


def test_the_guard_is_in(mgr):
    assert mgr.guard == "native"


def test_allocations_are_counted_to_the_byte(mgr):
    before = mgr.used_bytes
    taken = of(12345)
    assert mgr.used_bytes == before + footprint(12345)
    del taken
    assert mgr.used_bytes == before


def test_exactly_the_free_bytes_can_be_had_and_one_more_cannot(mgr):
    mgr.budget_bytes = mgr.used_bytes + 4 * MIB
    taken = of(mgr.free_bytes)
    assert mgr.free_bytes == 0
    with pytest.raises(torch.OutOfMemoryError):
        of(1)
    assert mgr.peak_bytes == mgr.budget_bytes
    del taken


def test_the_error_of_a_bare_allocation_is_torchs_own_with_our_four_lines(mgr):
    mgr.budget_bytes = mgr.used_bytes + 4 * MIB
    with pytest.raises(torch.OutOfMemoryError) as caught:
        of(5 * MIB)
    assert type(caught.value) is torch.OutOfMemoryError
    what, numbers, cause, remedy = str(caught.value).splitlines()
    assert "needs 5.0 MiB" in what
    assert "4.0 MiB of it are free" in numbers
    assert cause.startswith("Held by:")
    assert "%vram" in remedy
    assert mgr.last_error.needed_bytes == 5 * MIB
    assert mgr.last_error.budget_bytes == mgr.budget_bytes


@pytest.mark.cpu_only("allocator")
def test_weights_from_before_the_first_manager_are_adopted_when_registered():
    code = """
import torch
early = torch.nn.Linear(512, 512, bias=False)
import vram_magic as vm
mgr = vm.VRAMManager(device="cpu", budget="1GiB")
assert mgr.used_bytes == 0, mgr.used_bytes
handle = mgr.register("early", early)
assert mgr.used_bytes == handle.total_bytes == 512 * 512 * 4, mgr.used_bytes
assert handle.evict() == handle.total_bytes
assert mgr.used_bytes == 0, mgr.used_bytes
handle.load()
del early
assert mgr.used_bytes == 0, mgr.used_bytes
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_resize_and_factory_functions_are_limited_too(mgr):
    small = of(16)
    mgr.budget_bytes = mgr.used_bytes + MIB
    asks = (
        lambda: small.resize_(2 * MIB),
        lambda: torch.zeros(2 * MIB, device=DEVICE),
        lambda: torch.ones(4, device=DEVICE).repeat(MIB),
    )
    for ask in asks:
        with pytest.raises(torch.OutOfMemoryError):
            ask()
    assert small.untyped_storage().nbytes() == 16


def test_threads_never_pass_the_budget(mgr):
    mgr.budget_bytes = mgr.used_bytes + 16 * MIB
    mgr.reset_peak()

    def hammer() -> None:
        for _ in range(300):
            try:
                taken = of(3 * MIB)
                del taken
            except torch.OutOfMemoryError:
                pass

    threads = [threading.Thread(target=hammer) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert mgr.peak_bytes <= mgr.budget_bytes


def test_reserved_room_is_kept_for_the_body_and_given_back(mgr):
    mgr.budget_bytes = mgr.used_bytes + 8 * MIB
    refused = []

    def other() -> None:
        try:
            of(6 * MIB)
        except torch.OutOfMemoryError:
            refused.append(True)

    with mgr.reserve("4MiB"):
        assert mgr.free_bytes >= 4 * MIB
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        taken = of(4 * MIB)
    assert refused == [True]
    more = of(4 * MIB)
    assert mgr.free_bytes == 0
    del taken, more


def test_after_close_torch_has_its_own_allocator_back(tmp_path):
    mgr = vm.VRAMManager(device=DEVICE, budget="8MiB", spill_dir=tmp_path)
    kept = of(MIB)
    mgr.close()
    assert of(64 * MIB).numel() == 64 * MIB
    used = mgr.used_bytes
    del kept
    assert mgr.used_bytes == used - MIB


def test_a_second_manager_puts_in_one_guard_not_two(tmp_path):
    for _ in range(3):
        mgr = vm.VRAMManager(device=DEVICE, budget="1GiB", spill_dir=tmp_path)
        before = mgr.used_bytes
        taken = of(1000)
        assert mgr.used_bytes == before + footprint(1000)
        del taken
        mgr.close()


@pytest.mark.cpu_only("fork")
def test_a_forked_child_runs_without_the_guard_and_with_true_weights(mgr):
    model, x = torch.nn.Embedding(256, 256), torch.tensor([3, 4])  # no BLAS: its threads do not survive a fork
    with torch.no_grad():
        expected = model(x)
    handle = mgr.register("model", model)
    handle.evict()
    mgr.budget_bytes = mgr.used_bytes + MIB
    child = os.fork()
    if child == 0:
        with torch.no_grad():
            right = torch.equal(model(x), expected) and of(2 * MIB).numel() == 2 * MIB
        os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert handle.state == "host"  # the child's end took no file of ours away
    handle.load()
    with torch.no_grad():
        assert torch.equal(model(x), expected)


@pytest.mark.cpu_only("allocator")
def test_without_a_compiler_room_is_made_at_managed_calls_and_the_report_says_so(tmp_path):
    code = """
import torch
import vram_magic as vm
mgr = vm.VRAMManager(device="cpu", budget="9MiB", block_bytes="1MiB")
assert mgr.guard.startswith("none: no C++ compiler"), mgr.guard
a, b = (torch.nn.Sequential(*[torch.nn.Linear(512, 512, bias=False) for _ in range(6)]) for _ in range(2))
x = torch.randn(2, 512)
with torch.no_grad():
    expected = a(x), b(x)
    first = mgr.register("a", a)
    assert mgr.used_bytes == first.device_bytes == 6 << 20
    first.evict()
    assert mgr.used_bytes == 0
    second = mgr.load("b", b)
    assert torch.equal(a(x), expected[0])
    assert (first.state, second.state) == ("device", "partial")
    assert mgr.used_bytes == 9 << 20
    assert torch.equal(b(x), expected[1])
    with mgr.reserve("4MiB"):
        assert mgr.free_bytes >= 4 << 20
del a
assert "a" not in mgr
mgr["b"].evict()
assert mgr.used_bytes == 0, mgr.used_bytes
mgr.close()
"""
    environment = dict(os.environ, PATH="", XDG_CACHE_HOME=str(tmp_path), TMPDIR=str(tmp_path))
    environment.pop("CXX", None)
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


# ---------------------------------------------------------------------------------------------- the answer to it


def test_while_a_graph_is_captured_nothing_leaves_and_the_error_says_so(mgr, monkeypatch):
    model = torch.nn.Linear(512, 512, bias=False, device=DEVICE)
    handle = mgr.register("model", model)
    mgr.budget_bytes = mgr.used_bytes + MIB
    monkeypatch.setattr(mgr._core.device, "capturing", lambda: True)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        of(2 * MIB)
    what, numbers, cause, remedy = str(caught.value).splitlines()
    assert "needs 2.0 MiB while a CUDA graph is being captured" in what
    assert "1.0 MiB of it are free" in numbers
    assert "Nothing may leave during a capture" in cause
    assert "mgr.make_room(2097152)" in remedy
    assert "%vram evict" in remedy
    assert handle.state == "device"
    assert mgr.last_error.needed_bytes == 2 * MIB
    monkeypatch.undo()
    assert of(2 * MIB).numel() == 2 * MIB
    assert handle.state != "device"


def test_where_the_allocator_itself_has_no_memory_all_of_the_request_must_be_found(mgr, monkeypatch):
    asked = []

    def make_room(request: Request, **options: object) -> Room:
        asked.append((request.need_bytes, options))
        return Room(mgr._guard.reserve(0))

    monkeypatch.setattr(mgr._core.reclaimer, "make_room", make_room)
    answer = Pressure(mgr._core, mgr._guard)(3 * MIB, native.OUT_OF_MEMORY, 5 * MIB)
    assert answer == native.GRANTED
    options = {"user_code": False, "flushed": True, "credit_bytes": 2 * MIB, "spare_bytes": 0}
    assert asked == [(5 * MIB, options)]


def test_where_it_fails_again_although_there_was_room_more_is_found_each_time(mgr, monkeypatch):
    asked, freed, before = [], [0, 0, MIB], mgr._guard.committed_bytes

    def make_room(request: Request, **options: object) -> Room:
        asked.append((request.need_bytes // MIB, request.asked_by))
        return Room(mgr._guard.reserve(5 * MIB), freed_bytes=freed.pop(0))

    monkeypatch.setattr(mgr._core.reclaimer, "make_room", make_room)
    answer = Pressure(mgr._core, mgr._guard)(3 * MIB, native.OUT_OF_MEMORY + 1, 3 * MIB)
    assert answer == native.GRANTED
    assert asked == [(size, "an allocation of 3.0 MiB") for size in (20, 40, 60)]
    if DEVICE == "cpu":
        mgr._guard.give_back(5 * MIB)  # granted, and never allocated
    assert mgr._guard.committed_bytes == before


# ------------------------------------------------------- the guard of accelerators, on an allocator without memory


without_device = pytest.mark.cpu_only("no device")


@pytest.fixture(scope="module")
def standin_process():
    environment = {name: value for name, value in os.environ.items() if name != "VRAM_MAGIC_TEST_DEVICE"}
    command = [sys.executable, "-X", "faulthandler", "-c", "import standin_allocator; standin_allocator.serve()"]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, env=environment, stdin=pipe, stdout=pipe, text=True, start_new_session=True
    ) as process:
        yield process
        process.stdin.close()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:  # a script of a failed test hangs
            os.killpg(process.pid, signal.SIGKILL)  # with the children that it forked


@pytest.fixture
def on_standin(standin_process):
    """Runs a script in the process that has two devices of a stand-in allocator."""

    def run(code: str) -> None:
        standin_process.stdin.write(json.dumps(code) + "\n")
        standin_process.stdin.flush()
        answer = standin_process.stdout.readline()
        assert answer, "the process died"
        assert not json.loads(answer), json.loads(answer)

    return run


@without_device
def test_a_request_over_an_accelerators_budget_asks_and_the_same_one_succeeds(on_standin):
    on_standin("""
with limited(8 * MIB) as (guard, pressure):
    pressure.idle = [Block(MIB) for _ in range(6)]
    big = Block(5 * MIB)
    assert pressure.asked == [(5 * MIB, native.OVER_BUDGET, 5 * MIB)], pressure.asked
    assert (guard.live_bytes, guard.committed_bytes) == (8 * MIB, 8 * MIB)
    assert guard.peak_bytes == 8 * MIB
""")


@without_device
def test_exactly_the_free_bytes_of_an_accelerator_can_be_had_and_no_grain_more(on_standin):
    on_standin("""
with limited(4 * MIB + 100, text="four lines") as (guard, pressure):
    held = [Block(MIB) for _ in range(3)] + [Block(MIB)]
    assert pressure.asked == []
    try:
        Block(1)
    except RefusalError as error:
        assert str(error) == "four lines", error
        assert pressure.asked == [(512, native.OVER_BUDGET, 512)], pressure.asked
    else:
        raise AssertionError("it was let through")
    held.pop()
    held.append(Block(MIB - 1))
    assert len(pressure.asked) == 1  # what was freed is seen, without asking
""")


@without_device
def test_a_request_that_the_allocator_refuses_is_tried_again_when_room_was_made(on_standin):
    on_standin("""
standin.set_capacity(0, 4 * MIB)
with limited(100 * MIB) as (guard, pressure):
    pressure.idle = [Block(MIB) for _ in range(4)]
    block = Block(2 * MIB)
    again = native.OUT_OF_MEMORY + 1
    assert pressure.asked == [(2 * MIB, why, 2 * MIB) for why in (native.OUT_OF_MEMORY, again)], pressure.asked
    assert len(pressure.idle) == 2
    assert guard.committed_bytes == 4 * MIB
    pressure.idle.clear()
    for pressure.text, expected in (("explained", "explained"), ("", "the stand-in has no 9437184 bytes")):
        try:
            Block(9 * MIB)
        except RefusalError as error:
            assert expected in str(error), error
        else:
            raise AssertionError("it was let through")
    assert guard.committed_bytes == guard.live_bytes == 2 * MIB
    guard.uninstall()
    guard.install(lambda need, why, size: guard.reserve(need + MIB).transfer() or native.GRANTED)
    before = guard.asks[1]
    try:
        Block(9 * MIB)  # room is granted again and again, and is never there
    except RefusalError as error:
        assert "stand-in" in str(error)
    assert guard.committed_bytes == 2 * MIB
    assert guard.asks[1] == before + 16, guard.asks
""")


@without_device
def test_a_reservation_pays_first_and_gets_back_what_a_failed_request_drew(on_standin):
    on_standin("""
standin.set_capacity(0, 6 * MIB)
with limited(100 * MIB) as (guard, pressure):
    room = guard.reserve(4 * MIB)
    with room.draw():
        assert guard.credit_bytes == 4 * MIB
        first = Block(3 * MIB)
        assert (room.left_bytes, guard.live_bytes, guard.committed_bytes) == (MIB, 3 * MIB, 4 * MIB)
        try:
            Block(5 * MIB)
        except RefusalError:
            assert pressure.asked == [(4 * MIB, native.OUT_OF_MEMORY, 5 * MIB)], pressure.asked
        assert (room.left_bytes, guard.committed_bytes) == (MIB, 4 * MIB)
        guard.limit_bytes = 5 * MIB
        pressure.asked.clear()
        try:
            Block(3 * MIB)
        except RefusalError:
            assert pressure.asked == [(2 * MIB, native.OVER_BUDGET, 3 * MIB)], pressure.asked
        assert (room.left_bytes, guard.committed_bytes) == (MIB, 4 * MIB)
    room.release()
    assert guard.committed_bytes == guard.live_bytes == 3 * MIB
    lost = guard.reserve(MIB)
    del lost
    assert guard.committed_bytes == 3 * MIB
    assert guard.reserve(2 * MIB + 1) is None
""")


@without_device
def test_moves_of_our_own_never_ask_and_may_go_beyond_their_room(on_standin):
    on_standin("""
standin.set_capacity(0, 8 * MIB)
with limited(4 * MIB) as (guard, pressure):
    room = guard.reserve(MIB)
    with room.draw(own_move=True):
        with room.draw():  # inside it something may draw in the usual way, and end before
            pass
        moved = Block(5 * MIB)
        assert guard.live_bytes == 5 * MIB
        try:
            Block(4 * MIB)
        except RefusalError as error:
            assert "stand-in" in str(error)
    assert pressure.asked == []
""")


@without_device
def test_devices_are_limited_apart_and_draw_on_their_own_reservations_only(on_standin):
    on_standin("""
with limited(4 * MIB, 0) as (zero, asked_zero), limited(8 * MIB, 1, text="from one") as (one, asked_one):
    room = zero.reserve(4 * MIB)
    with room.draw():
        standin.set_device(1)
        assert one.credit_bytes == 0
        kept = Block(5 * MIB)
        assert room.left_bytes == 4 * MIB
        assert (zero.live_bytes, one.live_bytes) == (0, 5 * MIB)
        try:
            Block(4 * MIB)
        except RefusalError as error:
            assert str(error) == "from one"
        standin.set_device(0)
        drawn = Block(4 * MIB)
    assert (asked_zero.asked, len(asked_one.asked)) == ([], 1)
    one.uninstall()
    assert zero.installed
    standin.set_device(1)
    free = Block(50 * MIB)
    standin.set_device(0)
    asked_zero.text = "from zero"
    try:
        Block(512)
    except RefusalError as error:
        assert str(error) == "from zero"
    else:
        raise AssertionError("the first device is limited no more")
""")


@without_device
def test_bytes_of_outside_engines_count_until_they_are_given_back(on_standin):
    on_standin("""
with limited(4 * MIB) as (guard, pressure):
    room = guard.reserve(2 * MIB)
    room.spend(3 * MIB)
    assert (room.left_bytes, guard.live_bytes, guard.committed_bytes) == (0, 3 * MIB, 3 * MIB)
    room.release()
    try:
        Block(2 * MIB)
    except RefusalError:
        pass
    else:
        raise AssertionError("the engine's bytes do not count")
    guard.give_back(3 * MIB)
    assert Block(4 * MIB).address
""")


@without_device
def test_six_threads_never_pass_the_budget_of_an_accelerator_and_fill_it_to_the_last_grain(on_standin):
    on_standin("""
with limited(6 * MIB) as (guard, pressure):
    guard.reset_peak()
    refused, held = [], []

    def hammer(seed):
        refused.append(standin.hammer(seed, 5000, 30, 500))  # thirty at once of up to 250 KiB: six may want 45 MiB

    def fill(seed):
        try:
            while True:
                held.append(Block(512))
        except RefusalError:
            pass

    def disturb():
        while any(thread.is_alive() for thread in threads):
            guard.limit_bytes = 6 * MIB
            guard.committed_bytes
            room = guard.reserve(1000)
            if room:
                room.release()

    for work in (hammer, fill):
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        others = [threading.Thread(target=disturb)] if work is hammer else []
        for thread in [*threads, *others]:
            thread.start()
        for thread in [*threads, *others]:
            thread.join()
        assert guard.peak_bytes <= 6 * MIB, guard.peak_bytes
        if work is hammer:
            assert guard.live_bytes == guard.committed_bytes == standin.live(0) == 0
    assert len(refused) == 6
    assert standin.live(0) == guard.committed_bytes == 6 * MIB
    assert pressure.asked
""")


@without_device
def test_blocks_that_are_larger_than_asked_pass_the_budget_by_one_rest_at_most(on_standin):
    on_standin("""
standin.set_block(2 * MIB)
with limited(64 * MIB) as (guard, pressure):
    held = []
    try:
        while True:
            held.append(Block(2 * MIB + 512))
    except RefusalError:
        pass
    assert 64 * MIB <= standin.live(0) < 66 * MIB, standin.live(0)
    assert guard.live_bytes == standin.live(0)
""")


@without_device
def test_taken_out_the_allocator_is_as_it_was_and_put_in_again_there_is_one_guard_not_two(on_standin):
    on_standin("""
before = standin.table()
for _ in range(3):
    with limited(8 * MIB) as (guard, pressure):
        assert guard.installed
        ours = standin.table()
        assert ours != before
        calls = guard._library.vm_calls(0)
        Block(512)
        assert guard._library.vm_calls(0) == calls + 1
    assert not guard.installed
    assert standin.table() == before
    calls = guard._library.vm_calls(0)
    Block(64 * MIB)
    assert guard._library.vm_calls(0) == calls
with limited(8 * MIB) as (guard, pressure):
    assert standin.table() == ours
    standin.replace()
    assert not guard.installed
""")


@without_device
def test_the_peak_is_the_allocators_own_once_it_is_of_our_time(on_standin):
    on_standin("""
Block(80 * MIB)
with limited(100 * MIB) as (guard, pressure):
    assert guard.peak_bytes == 0
    Block(4 * MIB)
    Block(90 * MIB)
    assert guard.peak_bytes == 90 * MIB
    guard.reset_peak()
    assert guard.peak_bytes == 0
    kept = Block(2 * MIB)
    assert guard.peak_bytes == 2 * MIB
""")


@without_device
def test_an_interrupt_in_the_callback_is_raised_when_the_allocation_has_ended(on_standin):
    on_standin("""
def granted(need, why, size):
    guard.limit_bytes = MIB
    guard.reserve(need).transfer()
    return native.GRANTED | native.INTERRUPTED

def silent(need, why, size):
    asked.append(need)
    return 0

asked, refusals = [], []
for pressure in (granted, silent):
    with limited(0) as (guard, _):
        guard.uninstall()
        guard.install(pressure)
        guard.limit_bytes = 0
        try:
            refusals.append(standin.hammer(1, 1, 1, 1))  # one allocation, freed again
            for _ in range(100):
                pass
        except KeyboardInterrupt:
            continue
        raise AssertionError("no interrupt came")
assert asked == [512, 512, 512], asked
assert guard.committed_bytes == guard.live_bytes == 0
""")


@without_device
def test_a_forked_child_has_no_limit_and_waits_for_no_lock(on_standin):
    on_standin("""
import ctypes, os
with limited(MIB) as (guard, pressure):
    kept = Block(512 * 1024)
    without_gil, ended = ctypes.CDLL(guard._library._name), threading.Event()

    def look():  # holds the guard's lock most of the time, also while this process is forked
        while not ended.is_set():
            without_gil.vm_committed(0)

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(30):
        child = os.fork()
        if child == 0:
            guard.live_bytes, guard.committed_bytes, guard.peak_bytes
            room = guard.reserve(MIB)
            os._exit(0 if guard.limit_bytes == 2**63 - 1 and room else 1)
        assert os.waitpid(child, 0)[1] == 0
    ended.set()
    for thread in threads:
        thread.join()
    try:
        Block(MIB)
    except RefusalError:
        pass
    else:
        raise AssertionError("the parent is limited no more")
""")


# ----------------------------------------------------------------------------------------- what the headers tell

ALLOCATOR = """
struct C10_API Allocator {
  virtual ~Allocator() = default;
  virtual DataPtr allocate(size_t n) = 0;
  // A comment; with a virtual int in it();
  virtual bool is_simple(const DataPtr& ptr) const;
};
"""
DEVICE_ALLOCATOR = """
struct C10_API DeviceAllocator : public c10::Allocator {
  virtual void emptyCache(MempoolId_t mempool_id = {0, 0}) = 0;
  virtual std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) {
    return {0, 0};
  }
};
"""
CUDA_ALLOCATOR = """
class CUDAAllocator : public DeviceAllocator {
 public:
  virtual void* raw_alloc(size_t nbytes) = 0;
  virtual void* raw_alloc_with_stream(size_t nbytes, cudaStream_t stream) = 0;
  virtual void begin(c10::DeviceIndex /*device*/, std::function<bool(cudaStream_t)> filter = nullptr) {}
  void emptyCache(MempoolId_t mempool_id) override {}
  virtual int count(int) = 0;
};
"""


@pytest.fixture
def headers(tmp_path):
    texts = {"core/Allocator.h": ALLOCATOR, "core/CachingDeviceAllocator.h": DEVICE_ALLOCATOR}
    for name, text in {**texts, "cuda/CUDACachingAllocator.h": CUDA_ALLOCATOR}.items():
        path = tmp_path / "c10" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def handed_on(result: str, name: str, parameters: str, qualifiers: str, names: list[str]) -> str:
    given = ", ".join(f"std::forward<decltype({each})>({each})" for each in names)
    return f"{result} {name}({parameters}) {qualifiers} override {{ return base->{name}({given}); }}"


@without_device
class TestForwarding:
    """What is written into the second way from the installed headers."""

    def test_every_virtual_function_but_the_guarded_ones_is_handed_on(self, headers):
        assert forwarding.overrides(headers).splitlines() == [
            handed_on("bool", "is_simple", "const DataPtr& ptr", "const", ["ptr"]),
            handed_on("void", "emptyCache", "MempoolId_t mempool_id", "", ["mempool_id"]),
            handed_on("std::pair<size_t, size_t>", "getMemoryInfo", "c10::DeviceIndex device", "", ["device"]),
            handed_on(
                "void",
                "begin",
                "c10::DeviceIndex device, std::function<bool(cudaStream_t)> filter",
                "",
                ["device", "filter"],
            ),
            handed_on("int", "count", "int argument0", "", ["argument0"]),
        ]

    def test_raw_alloc_is_replaced_only_where_the_header_has_it_first(self, headers):
        assert forwarding.raw_alloc_comes_first(headers)
        header = headers / "c10/cuda/CUDACachingAllocator.h"
        header.write_text(CUDA_ALLOCATOR.replace("public:\n", "public:\n  virtual void init(int device_count) = 0;\n"))
        assert not forwarding.raw_alloc_comes_first(headers)
        header.unlink()
        assert not forwarding.raw_alloc_comes_first(headers)

    def test_a_header_that_is_not_as_expected_gives_no_guard_but_a_reason(self, headers):
        assert forwarding.has_device_allocator(headers)
        (headers / "c10/core/CachingDeviceAllocator.h").write_text("struct DeviceStats {\n};\n")
        assert not forwarding.has_device_allocator(headers)
        with pytest.raises(GuardUnavailable, match="is not as expected"):
            forwarding.overrides(headers)

    def test_the_installed_headers_are_understood(self):
        includes = forwarding.torch_includes()
        if not (includes / "c10/cuda/CUDACachingAllocator.h").is_file():
            pytest.skip("this torch brings no CUDA headers")
        assert forwarding.raw_alloc_comes_first(includes)
        text = forwarding.overrides(includes)
        for function in ("getDeviceStats", "emptyCache", "snapshot", "raw_delete", "beginAllocateToPool", "name"):
            assert f" {function}(" in text
