"""A fault at any step of a move leaves every model whole, and nothing partial behind; the next call works or says why.

Without this one full disk, one interrupt or one bad read costs a weight, room that nobody gives back, or the kernel.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from place import DEVICE, same_values
from safetensors.torch import save_file
from torch import nn

import vram_magic as vm
from vram_magic.residency import arriving, leaving
from vram_magic.residency.checkpoint import WeightFile
from vram_magic.residency.records import Records
from vram_magic.residency.spill import SpillStore

MIB = 1 << 20
KIB = 1 << 10
X = torch.arange(128.0, device=DEVICE)


@pytest.fixture
def manager_options():
    return {"block_bytes": "150KiB", "host_budget": 0}  # two weights a block, in spill files: a block can be torn


def files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]


class Scene:
    """Two models of three blocks each, one of them in a file of its own, and what must hold of them at any time."""

    def __init__(self, mgr: vm.VRAMManager, tmp_path: Path) -> None:
        torch.manual_seed(0)
        self.mgr, self.spill = mgr, tmp_path / "spill"
        self.before = mgr.used_bytes
        self.models = {name: self._model() for name in ("plain", "filed")}
        save_file(self.models["filed"].state_dict(), tmp_path / "filed.safetensors")
        self.path = tmp_path / "filed.safetensors"
        # On the processor the expected values are no tensors of the device.
        self.expected = {
            name: [p.detach().cpu().numpy().copy() for p in model.parameters()] for name, model in self.models.items()
        }
        mgr.register("plain", self.models["plain"])
        mgr.register("filed", self.models["filed"], source=self.path)

    @staticmethod
    def _model() -> nn.Module:
        return nn.Sequential(*[nn.Linear(128, 128, bias=False, device=DEVICE) for _ in range(6)]).requires_grad_(
            requires_grad=False
        )

    def check(self) -> None:
        """Nothing is torn, wrong, leaked or left over."""
        mgr = self.mgr
        for name, model in self.models.items():
            managed = mgr[name]._managed
            assert not managed.moving, name
            assert not managed.leases, name
            assert mgr[name].total_bytes == 6 * 64 * KIB
            for weight, right in zip(model.parameters(), self.expected[name], strict=True):
                assert same_values(weight.detach(), torch.from_numpy(right)), name
            blocks = [(block.resident_bytes, block.total_bytes) for block in managed.body.look()]
            assert not [sizes for sizes in blocks if sizes[0] not in (0, sizes[1])], f"{name}: a block is half here"
        assert not [path for path in files(self.spill) if path.suffix != ".weights"]
        meter = mgr._core.device.meter
        assert meter.committed_bytes == meter.live_bytes

    def check_next_calls(self) -> None:
        """All goes on, and at the end nobody holds anything."""
        for name in self.models:
            self.mgr[name].load()
            self.mgr[name].evict()
            assert self.mgr[name].device_bytes == 0, self.mgr[name].why()
            self.models[name](X)
            assert self.mgr[name].state == "device"
        self.check()
        assert self.mgr.used_bytes - self.before == 2 * 6 * 64 * KIB
        for name in list(self.models):
            self.mgr[name].evict()
            del self.models[name]
        assert not self.mgr.models
        assert (self.mgr.used_bytes, files(self.spill)) == (self.before, [])
        assert self.mgr._torch_models._host.used_bytes == 0


@pytest.fixture
def scene(mgr, tmp_path) -> Scene:
    return Scene(mgr, tmp_path)


# --- a fault at every step --------------------------------------------------------------------------------------------


class Step:
    """A function that a move goes through: the place where it is looked up, and a short name."""

    def __init__(self, holder: object, name: str) -> None:
        self.holder, self.name = holder, name

    def __repr__(self) -> str:
        return f"{getattr(self.holder, '__name__', self.holder).rpartition('.')[2]}.{self.name}"


LEAVING = [
    Step(leaving, "versions"), Step(leaving.Leaving, "_safe"), Step(leaving.Leaving, "_copied"),
    Step(leaving.Leaving, "_digest"), Step(SpillStore, "write"), Step(SpillStore, "_check_disk"),
    Step(os, "posix_fallocate"), Step(os, "pwrite"), Step(os, "replace"), Step(leaving, "harmless"),
    Step(leaving, "map_range"), Step(leaving, "replace"), Step(Records, "moved"),
]  # fmt: skip
ARRIVING = [
    Step(arriving, "versions"), Step(arriving.Arriving, "_check_file"), Step(arriving, "was_written"),
    Step(WeightFile, "read_into"), Step(os, "preadv"), Step(arriving, "harmless"), Step(arriving, "replace"),
    Step(arriving.Arriving, "_take_late_edits"), Step(Records, "moved"),
]  # fmt: skip


def failing(monkeypatch: pytest.MonkeyPatch, step: Step, nth: int, fault: Callable[[], None]) -> list[int]:
    """The step's n-th call, once, ends in the fault; the list fills when it has."""
    original, calls, fired = getattr(step.holder, step.name), [], []

    def stand_in(*args, **kwargs):
        calls.append(1)
        if len(calls) == nth:
            fired.append(nth)
            fault()
        return original(*args, **kwargs)

    monkeypatch.setattr(step.holder, step.name, stand_in)
    return fired


def raising(error: type[BaseException]) -> Callable[[], None]:
    def fault() -> None:
        raise error(errno.ENOSPC, os.strerror(errno.ENOSPC)) if error is OSError else error("injected")

    return fault


FAULTS = (OSError, KeyboardInterrupt)


def cases(steps: list[Step], counts: list[tuple]) -> list:
    """Each step with each count (its last item is which call fails) and each kind of fault."""
    return [pytest.param(step, *count, error) for step in steps for count in counts for error in FAULTS]


def named(value: object) -> str:
    return value.__name__ if isinstance(value, type) else str(value)


# cases: failed-promote-unlock, interrupt-mid-move, disk-full
@pytest.mark.parametrize(("step", "nth", "error"), cases(LEAVING, [(1,), (2,), (3,)]), ids=named)
def test_an_eviction_that_fails_at_any_step_leaves_all_whole(scene, monkeypatch, step, nth, error):
    with monkeypatch.context() as patch:
        fired = failing(patch, step, nth, raising(error))
        with contextlib.suppress(error):
            scene.mgr["plain"].evict()
            assert error is OSError  # a full disk is a reason to stay, the others are raised
    assert fired
    scene.check()
    scene.check_next_calls()


@pytest.mark.parametrize(
    ("step", "name", "nth", "error"),
    cases(ARRIVING, [("plain", 1), ("plain", 2), ("filed", 2), ("filed", 3)]),
    ids=named,
)
def test_a_load_that_fails_at_any_step_leaves_all_whole(scene, monkeypatch, step, name, nth, error):
    handle = scene.mgr[name]
    handle.evict()
    with monkeypatch.context() as patch:
        fired = failing(patch, step, nth, raising(error))
        with pytest.raises(vm.BackingLostError if step.name == "preadv" and error is OSError else error):
            scene.models[name](X)
    assert fired
    scene.check()
    scene.check_next_calls()


# --- interrupts in the caller -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def interruptible() -> Iterator[list[str]]:
    """SIGUSR1 interrupts the main thread as Ctrl-C would, and hits nobody else."""
    hits: list[str] = []

    def handler(*_: object) -> None:
        hits.append("hit")
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        yield hits
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("step", [*LEAVING, *ARRIVING], ids=repr)
def test_an_interrupt_of_who_waits_at_any_step_lets_the_move_end(scene, monkeypatch, step):
    move = "evict" if step in LEAVING else "load"
    handle = scene.mgr["plain"]
    if move == "load":
        handle.evict()
    with monkeypatch.context() as patch, interruptible() as hits:

        def interrupt() -> None:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

        fired = failing(patch, step, 2, interrupt)
        with pytest.raises(KeyboardInterrupt):
            getattr(handle, move)()
    assert (fired, hits) == ([2], ["hit"])
    scene.check()
    assert handle.state == ("host" if move == "evict" else "device")
    scene.check_next_calls()


@pytest.mark.parametrize("move", ["evict", "load"])
def test_an_interrupt_of_a_thread_that_waits_lets_the_move_end(scene, monkeypatch, move):
    handle, seen = scene.mgr["plain"], []
    if move == "load":
        handle.evict()

    def work() -> None:
        try:
            getattr(handle, move)()
        except KeyboardInterrupt:
            seen.append("interrupted")

    thread = threading.Thread(target=work)
    with monkeypatch.context() as patch:

        def interrupt() -> None:
            ident = ctypes.c_ulong(thread.ident)
            assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(KeyboardInterrupt)) == 1

        fired = failing(patch, Step(os, "pwrite" if move == "evict" else "preadv"), 2, interrupt)
        thread.start()
        thread.join(60)
    assert fired
    assert seen == ["interrupted"]
    scene.check()
    scene.check_next_calls()


# --- the disk ---------------------------------------------------------------------------------------------------------


# cases: slow-network-mmap
def test_reads_and_writes_that_come_in_small_pieces_are_put_together(scene, monkeypatch):
    read, write = os.preadv, os.pwrite
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: read(fd, [buffers[0][:1000]], offset))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: write(fd, data[:777], offset))
    for name in scene.models:
        scene.mgr[name].evict()
        scene.mgr[name].load()
    scene.check()
    assert scene.mgr["plain"].state == "device"


def test_a_load_reads_each_weight_once_and_in_one_piece(scene, monkeypatch):
    handle, reads, read = scene.mgr["filed"], [], os.preadv
    handle.evict()
    monkeypatch.setattr(os, "preadv", lambda *call: reads.append(len(call[1][0])) or read(*call))
    handle.load()
    assert reads == [64 * KIB] * 6


# cases: windows-file-lock
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the finaliser's own complaint
def test_files_that_cannot_be_removed_break_nothing_and_go_at_the_end(scene, tmp_path, monkeypatch):
    def locked(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "in use by another process")

    handle = scene.mgr["plain"]
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", locked)
        for _ in range(2):
            handle.evict()
            scene.models["plain"][0].weight.add_(1)
            handle.load()
        scene.models["plain"][0].weight.sub_(2)
        handle.evict()
    for weight, right in zip(scene.models["plain"].parameters(), scene.expected["plain"], strict=True):
        assert torch.allclose(weight.cpu(), torch.from_numpy(right), atol=1e-5)
    scene.mgr.close()
    assert not files(tmp_path / "spill")


def test_no_mapping_stays_after_a_load(scene, tmp_path):
    for handle in scene.mgr.models.values():
        handle.evict()
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    for handle in scene.mgr.models.values():
        handle.load()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("fate", ["deleted", "replaced", "unreadable", "written over"])
def test_what_becomes_of_the_file_behind_an_evicted_model(scene, fate):
    handle, path = scene.mgr["filed"], scene.path
    handle.evict()
    if fate == "deleted":
        path.unlink()
    elif fate == "replaced":
        other = path.with_suffix(".new")
        other.write_bytes(bytes(path.stat().st_size))
        other.replace(path)
    elif fate == "unreadable":
        path.chmod(0)
    else:
        whole = path.read_bytes()
        with path.open("r+b") as file:
            file.seek(-1000, os.SEEK_END)
            file.write(bytes(100))
        for _ in range(2):
            with pytest.raises(vm.BackingLostError, match=path.name):
                handle.load()
        assert handle.state == "disk"
        with path.open("r+b") as file:
            file.write(whole)  # brought back
    handle.load()
    scene.check()
    scene.check_next_calls()


# A mapping that is cut kills whoever reads it: so in a process of its own.
CUT_SPILL = """
import sys
from pathlib import Path
import os
from place import DEVICE
import torch
import vram_magic as vm

mgr = vm.VRAMManager(device=DEVICE, budget="64MiB", spill_dir=sys.argv[1], host_budget=0)
models = {name: torch.nn.Linear(256, 256, device=DEVICE) for name in ("a", "b")}
for name, model in models.items():
    mgr.register(name, model).evict()
first = min(Path(sys.argv[1]).rglob("*.weights"), key=lambda path: int(path.stem))
os.truncate(first, 100)
for _ in range(2):
    try:
        mgr["a"].load()
    except vm.BackingLostError as error:
        print(first.name in str(error) and str(error).count("\\n"))
models["b"](torch.ones(256, device=DEVICE))
print(mgr["b"].state, mgr["a"].device_bytes)
del models["a"], model
print(list(mgr.models))
mgr.close()
print(list(Path(sys.argv[1]).iterdir()))
"""


# cases: file-truncated-sigbus
def test_a_spill_file_that_was_cut_is_an_error_and_no_dead_kernel(tmp_path):
    command = [sys.executable, "-c", CUT_SPILL, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines() == ["3", "3", "device 0", "['b']", "[]"], done.stderr[-2000:]
    assert done.returncode == 0


FULL_DISK = """
import os, shutil, sys
from pathlib import Path
from place import DEVICE, same_values
import torch
import vram_magic as vm
from vram_magic.residency import spill

spill._DISK_RESERVE_BYTES = 0
root, limit = Path(sys.argv[1]), int(sys.argv[2])
if limit:
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
free = shutil.disk_usage(root)
shutil.disk_usage = lambda path: free  # the disk fills after it was looked at
mgr = vm.VRAMManager(device=DEVICE, budget="64MiB", block_bytes="4MiB", spill_dir=root, host_budget=0)
small, large = (torch.nn.Linear(size, size, bias=False, device=DEVICE) for size in (512, 1024))
values = [model.weight.detach().clone() for model in (small, large)]
mgr.register("small", small).evict()
before = sorted(path.name for path in root.rglob("*") if path.is_file())
print(mgr["small"].state, mgr.register("large", large).evict(), mgr["large"].state)
print("large" in mgr["large"].why() and mgr["large"].why().count("\\n") >= 0)
assert sorted(path.name for path in root.rglob("*") if path.is_file()) == before
assert all(same_values(model.weight.detach(), value) for model, value in zip((small, large), values, strict=True))
mgr["small"].load()
assert same_values(small.weight.detach(), values[0])
mgr.close()
print("alive")
"""


# cases: disk-full
@pytest.mark.parametrize("how", ["a full disk", "a limit on files"])
def test_a_disk_that_is_really_full_keeps_the_model_where_it_is(tmp_path, how):
    python = [sys.executable, "-c", FULL_DISK, str(tmp_path), "0" if how == "a full disk" else str(2 * MIB)]
    command = python
    if how == "a full disk":
        # In a mount namespace of its own: nothing of it is seen outside, or left.
        mounted = f"mount -t tmpfs -o size=3m tmpfs {tmp_path}"
        able = subprocess.run(["unshare", "-m", "sh", "-c", mounted], capture_output=True, check=False)
        if able.returncode:
            pytest.skip("mounting needs root")
        command = ["unshare", "-m", "sh", "-c", f'{mounted} && exec "$@"', "sh", *python]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines() == ["host 0 device", "True", "alive"], done.stderr[-2000:]


KILLED = """
import os, sys, time
from place import DEVICE
import torch
import vram_magic as vm

mgr = vm.VRAMManager(device=DEVICE, budget="64MiB", spill_dir=sys.argv[1], host_budget=0)
model = torch.nn.Linear(512, 512, device=DEVICE)
mgr.register("model", model)
write = os.pwrite

def stop(fd, data, offset):
    write(fd, data[:1000], offset)
    print("writing", flush=True)
    time.sleep(100)

os.pwrite = stop
mgr["model"].evict()
"""


# cases: orphan-spill
def test_what_a_kernel_that_was_killed_while_it_wrote_left_is_swept(tmp_path):
    kernel = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    with kernel:
        assert kernel.stdout.readline() == "writing\n"
        assert [path.suffix for path in files(tmp_path)] == [".partial"]
        kernel.kill()
    assert files(tmp_path)
    with contextlib.closing(vm.VRAMManager(device=DEVICE, budget="1GiB", spill_dir=tmp_path)):
        assert not files(tmp_path)


# --- forks ------------------------------------------------------------------------------------------------------------


@pytest.mark.cpu_only("fork")
@pytest.mark.parametrize("move", ["evict", "load"])
def test_a_child_that_is_forked_in_the_middle_of_a_move_has_true_weights(scene, monkeypatch, move):
    handle, started, go = scene.mgr["plain"], threading.Event(), threading.Event()
    if move == "load":
        handle.evict()

    def wait() -> None:
        started.set()
        go.wait(60)

    with monkeypatch.context() as patch:
        fired = failing(patch, Step(os, "pwrite" if move == "evict" else "preadv"), 2, wait)
        thread = threading.Thread(target=getattr(handle, move))
        thread.start()
        assert started.wait(60)
        pid = os.fork()
        if pid == 0:
            torch.set_num_threads(1)
            right = all(
                torch.equal(weight, torch.from_numpy(value))
                for name, model in scene.models.items()
                for weight, value in zip(model.parameters(), scene.expected[name], strict=True)
            )
            computed = scene.models["plain"](X).isfinite().all() and scene.models["filed"](X).isfinite().all()
            os._exit(0 if right and computed else 1)
        deadline = time.monotonic() + 60
        while not (ended := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < deadline:
            time.sleep(0.01)
        if not ended[0]:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        go.set()
        thread.join(60)
    assert fired
    assert ended == (pid, 0), "the child had wrong values, or did not end"
    scene.check()
    scene.check_next_calls()


# --- on an accelerator ------------------------------------------------------------------------------------------------


@pytest.mark.simulation_only
def test_a_load_that_a_user_of_one_weight_stops_leaves_no_block_half_here(scene, monkeypatch):
    monkeypatch.setattr(arriving, "_PATIENCE_ELSEWHERE_S", 0.05)
    handle = scene.mgr["plain"]
    handle.evict()
    graph = (scene.models["plain"][0].weight.requires_grad_() * 2).sum()  # it keeps the evicted weight
    with pytest.raises(vm.ModelInUseError):
        handle.load()
    del graph
    scene.models["plain"].requires_grad_(requires_grad=False)
    scene.check()


@pytest.mark.simulation_only
def test_copies_in_ram_that_were_made_for_nothing_are_given_back(tmp_path, monkeypatch):
    options = {"budget": "1GiB", "block_bytes": "150KiB", "host_budget": 64 * KIB, "spill_dir": tmp_path / "spill"}
    with contextlib.closing(vm.VRAMManager(device=DEVICE, **options)) as mgr:
        scene = Scene(mgr, tmp_path)
        with monkeypatch.context() as patch:
            # There is RAM for the first weight of a block, and no disk for the second.
            patch.setattr(os, "posix_fallocate", lambda *_: raising(OSError)())
            assert mgr["plain"].evict() == 0
        scene.check()
        assert mgr._torch_models._host.used_bytes == 0
