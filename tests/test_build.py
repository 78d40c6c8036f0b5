"""Compiling the guard, finding it again, and the wheel that carries it.

Without these a kernel could die of a library that was cut short, run one that somebody else left for it or that an
older header made, compile when another just did, or start without a guard on a machine that has no compiler though the
wheel brought one.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import pytest

from vram_magic.guard import build as building
from vram_magic.guard.build import GuardUnavailable, build, compile_into, load

pytestmark = pytest.mark.cpu_only("no device")

ROOT = Path(__file__).parents[1]


# Compiling and finding again ---------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """The private folder in an empty home; there is an empty temporary folder too, and nothing packaged."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temp"))
    monkeypatch.setattr(building, "_PACKAGED", tmp_path / "built")
    return tmp_path / "cache" / "vram_magic"


@pytest.fixture
def temporary(tmp_path) -> Path:
    return tmp_path / "temp" / f"vram_magic-guard-{os.getuid()}"


@pytest.fixture
def source(tmp_path) -> Path:
    path = tmp_path / "source" / "toy.cpp"
    path.parent.mkdir()
    path.write_text('#include "toy.h"\nextern "C" int answer() { return ANSWER; }\n')
    path.with_name("toy.h").write_text("#define ANSWER 42\n")
    return path


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Puts a shell script in the compiler's place."""

    def put(script: str) -> None:
        path = tmp_path / "compiler"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))

    return put


def kept(folder: Path) -> list[str]:
    """What is in the folder, lock files aside."""
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


def test_a_library_is_found_again_without_a_compiler(home, source, monkeypatch):
    library = build(source)
    assert library.parent == home
    assert kept(home) == [library.name]
    monkeypatch.setenv("PATH", "")
    assert build(source) == library
    assert load(source).answer() == 42


def test_a_changed_header_is_never_served_from_the_cache(home, source):
    source.with_name("toy.h").write_text('  # include "deeper.h"\n')
    deeper = source.with_name("deeper.h")
    deeper.write_text("#define ANSWER 1\n")
    assert load(source).answer() == 1
    deeper.write_text("#define ANSWER 2\n")
    assert load(source).answer() == 2


def test_generated_headers_are_compiled_in_and_count(home, source):
    source.write_text('#include <made.h>\nextern "C" int answer() { return MADE; }\n')
    made = '#include "toy.h"\n#define MADE ANSWER + {}\n'
    assert [load(source, generated={"made.h": made.format(n)}).answer() for n in (1, 2)] == [43, 44]
    source.with_name("toy.h").write_text("#define ANSWER 0\n")
    assert load(source, generated={"made.h": made.format(2)}).answer() == 2


def test_foreign_headers_are_found(home, source, tmp_path):
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "other.h").write_text("#define ANSWER 7\n")
    source.write_text('#include <other.h>\nextern "C" int answer() { return ANSWER; }\n')
    assert load(source, includes=[tmp_path / "foreign"]).answer() == 7


def test_neither_the_name_nor_the_library_carries_a_path(home, source, tmp_path):
    source.write_text('extern "C" const char* where() { return __FILE__; }\n')
    moved = tmp_path / "elsewhere"
    shutil.copytree(source.parent, moved)
    assert build(source) == build(moved / source.name)
    assert str(tmp_path).encode() not in build(source).read_bytes()


@pytest.mark.parametrize("cut", [0, 40, 5000])
def test_a_library_that_was_cut_short_is_never_given_to_the_loader(home, source, cut):
    library = build(source)
    library.write_bytes(library.read_bytes()[:cut])
    assert load(source).answer() == 42


def test_a_library_that_cannot_be_loaded_is_built_again(home, source):
    other_machine = b"\x7fELF of another machine"
    library = build(source)
    library.unlink()
    library.write_bytes(other_machine + hashlib.sha256(other_machine).digest())
    assert load(source).answer() == 42


def test_a_broken_library_and_no_compiler_is_no_guard(home, source, monkeypatch):
    library = build(source)
    library.write_bytes(b"broken" + hashlib.sha256(b"broken").digest())
    monkeypatch.setenv("PATH", "")
    with pytest.raises(GuardUnavailable, match=r"install g.*; the compiled guard does not load"):
        load(source)
    assert kept(home) == []


def test_where_nothing_that_was_compiled_can_be_loaded_there_is_no_guard(home, temporary, source, compiler):
    compiler('for output; do :; done; echo nonsense > "$output"')
    with pytest.raises(GuardUnavailable, match="does not load"):
        load(source)
    assert kept(home) == kept(temporary) == []


def test_the_reason_for_a_failed_compile_is_the_compilers_first_complaint(home, temporary, source):
    source.write_text("int fine;\n#error out of luck\nint x = ;\n")
    with pytest.raises(GuardUnavailable, match=r"could not build the guard: .*toy\.cpp:2:2: error: #error out of luck"):
        build(source)
    assert kept(home) == kept(temporary) == []


def test_a_missing_compiler_is_named(home, source, monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/c++ -pipe")
    with pytest.raises(GuardUnavailable, match=r"no C\+\+ compiler \(CXX is /nowhere/c\+\+\)"):
        build(source)


def test_the_compiler_may_be_a_command_of_several_words(home, source, monkeypatch):
    monkeypatch.setenv("CXX", f"env {shutil.which('c++')}")
    assert load(source).answer() == 42


def test_an_interrupt_ends_the_compiler_and_leaves_nothing(home, source, compiler, tmp_path, monkeypatch):
    waits, wait = tmp_path / "waits", subprocess.Popen.wait

    def signalled(process, timeout=None):
        waits.touch()
        return wait(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", signalled)
    compiler(f"echo $$ > {tmp_path}/pid; until [ -e {waits} ]; do :; done; kill -INT $PPID; exec sleep 600")
    with pytest.raises(KeyboardInterrupt):
        build(source)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert kept(home) == []


def test_what_a_killed_compile_left_is_removed_when_it_is_old(home, source):
    home.mkdir(parents=True, mode=0o700)
    old, new = home / ".build-old", home / ".build-new"
    old.mkdir()
    new.mkdir()
    yesterday = time.time() - 86400
    os.utime(old, (yesterday, yesterday))
    library = build(source)
    assert kept(home) == [".build-new", library.name]


# Where a library may lie -------------------------------------------------------------------------------------


def test_a_read_only_home_leaves_the_temporary_folder(home, temporary, source):
    home.parent.write_text("no folder can be made in a file, not even by root")
    assert build(source).parent == temporary


def test_a_full_home_leaves_the_temporary_folder(home, temporary, source, compiler):
    compiler(f'case "$*" in *{home}*) echo "error: no space"; exit 1;; esac; exec {shutil.which("c++")} "$@"')
    assert build(source).parent == temporary


@pytest.mark.parametrize("missing", ["folder", "every"])
def test_without_any_writable_folder_there_is_no_guard(home, source, monkeypatch, tmp_path, missing):
    home.parent.write_text("a file")
    (tmp_path / "temp").write_text("a file")
    if missing == "every":
        monkeypatch.setattr(tempfile, "gettempdir", lambda: (_ for _ in ()).throw(FileNotFoundError("none usable")))
    with pytest.raises(GuardUnavailable, match="no folder to keep the compiled guard in"):
        load(source)


def test_a_folder_that_others_can_write_to_is_not_used(home, temporary, source):
    library = build(source)
    home.chmod(0o777)
    assert build(source) == temporary / library.name


def test_a_folder_behind_a_link_is_not_used(home, temporary, source, tmp_path):
    (tmp_path / "mine").mkdir(mode=0o700)
    home.parent.mkdir()
    home.symlink_to(tmp_path / "mine")
    assert build(source).parent == temporary


def test_the_packages_own_library_comes_first(home, source, tmp_path, monkeypatch):
    build(source)
    (tmp_path / "built").mkdir()
    packaged = compile_into(tmp_path / "built", source)
    monkeypatch.setenv("PATH", "")
    assert build(source) == packaged


@pytest.mark.parametrize("open_to_all", ["folder", "file"])
def test_a_packaged_library_that_anybody_can_write_is_not_used(home, source, tmp_path, open_to_all):
    (tmp_path / "built").mkdir()
    packaged = compile_into(tmp_path / "built", source)
    (packaged if open_to_all == "file" else packaged.parent).chmod(0o777)
    assert build(source).parent == home


def test_a_packaged_library_that_cannot_be_loaded_is_left_alone(home, source, tmp_path):
    (tmp_path / "built").mkdir()
    packaged = compile_into(tmp_path / "built", source)
    packaged.write_bytes(b"broken" + hashlib.sha256(b"broken").digest())
    assert load(source).answer() == 42
    assert packaged.exists()


# Two kernels at once -----------------------------------------------------------------------------------------

TOGETHER = """
import sys, time
from pathlib import Path
from vram_magic.guard.build import load
source, mine, other = map(Path, sys.argv[1:])
mine.touch()
while not other.exists():
    time.sleep(0.01)
assert load(source).answer() == 42
"""


def test_two_processes_at_once_compile_once(home, source, compiler, tmp_path):
    compiler(f'echo run >> {tmp_path}/runs; sleep 1; exec {shutil.which("c++")} "$@"')
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    kernels = [
        subprocess.Popen([sys.executable, "-c", TOGETHER, str(source), *ready], env=environment)
        for ready in ((one, two), (two, one))
    ]
    assert [kernel.wait(90) for kernel in kernels] == [0, 0]
    assert (tmp_path / "runs").read_text() == "run\n"


HOLD = """
import fcntl, sys, time
file = open(sys.argv[1], "wb")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def holder(home, source):
    """A process that holds the library's lock and never lets go."""
    library = build(source)
    library.unlink()
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, library.with_suffix(".lock")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_lock_that_is_not_let_go_is_not_waited_for_for_ever(holder, source, monkeypatch):
    monkeypatch.setattr(building, "_LOCK_SECONDS", 0.2)
    assert load(source).answer() == 42
    assert holder.poll() is None


def test_a_lock_dies_with_its_process(holder, source, monkeypatch):
    monkeypatch.setattr(building, "_LOCK_SECONDS", 1e9)
    os.kill(holder.pid, signal.SIGKILL)
    assert load(source).answer() == 42


def test_where_files_have_no_locks_we_go_on_without(home, source, monkeypatch):
    def refuse(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(building.fcntl, "flock", refuse)
    assert load(source).answer() == 42


# The wheel ---------------------------------------------------------------------------------------------------


def pip(*arguments: object, **environment: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", *map(str, arguments)]
    subprocess.run(command, check=True, env=dict(os.environ, **environment))


def files(tree: Path) -> list[str]:
    return sorted(str(path.relative_to(tree)) for path in tree.rglob("*") if "__pycache__" not in path.parts)


def wheel_of(tree: Path, into: Path, **environment: str) -> Path:
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", into, tree, **environment)
    (wheel,) = into.iterdir()
    return wheel


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """A copy of what a wheel is built from, as other tests may be at work in the project itself."""
    copy = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "README.md", "LICENSE", "hatch_build.py"):
        shutil.copy(ROOT / name, copy)
    shutil.copytree(ROOT / "vram_magic", copy / "vram_magic", ignore=shutil.ignore_patterns("__pycache__", "built"))
    return copy


@pytest.fixture(scope="module")
def wheel(tree, tmp_path_factory) -> Path:
    return wheel_of(tree, tmp_path_factory.mktemp("wheel"))


def run_installed(wheel: Path, folder: Path, code: str) -> None:
    """Runs the code with the wheel's package, on a machine without a compiler and with a home that takes nothing."""
    site, temporary, home = folder / "site", folder / "temp", folder / "home"
    pip("install", "--no-deps", "--target", site, wheel)
    temporary.mkdir()
    home.write_text("a file")
    environment = {"PYTHONPATH": str(site), "PATH": "", "HOME": str(home), "TMPDIR": str(temporary)}
    inherited = {name: value for name, value in os.environ.items() if name not in {"CXX", "XDG_CACHE_HOME"}}
    code = f"import vram_magic\nassert vram_magic.__file__.startswith({str(site)!r})\n{code}"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=folder, env=inherited | environment)
    assert not list(temporary.rglob("*.so"))  # nothing was compiled here


def test_a_wheel_brings_its_guard_to_a_machine_without_a_compiler(wheel, tmp_path):
    code = """
import torch
import vram_magic as vm
mgr = vm.VRAMManager(device="cpu", budget="8MiB", block_bytes="1MiB")
assert mgr.guard == "native", mgr.guard
model = torch.nn.Sequential(*[torch.nn.Linear(512, 512, bias=False) for _ in range(6)])
handle = mgr.register("model", model)
taken = torch.empty(5 << 20, dtype=torch.uint8)
assert handle.device_bytes == 3 << 20, handle.device_bytes
try:
    torch.empty(9 << 20, dtype=torch.uint8)
except torch.OutOfMemoryError:
    pass
else:
    raise AssertionError("the budget was passed")
mgr.close()
"""
    run_installed(wheel, tmp_path, code)


def test_the_wheel_holds_each_source_compiled_and_says_for_which_machines_it_is(wheel, tree):
    assert "-py3-none-linux_" in wheel.name
    guard = tree / "vram_magic" / "guard"
    names = zipfile.ZipFile(wheel).namelist()
    built = {Path(name).stem.rpartition("-")[0] for name in names if Path(name).parent.name == "built"}
    assert built == {source.stem for source in guard.glob("*.cpp")} - {"forwarding"}
    assert {f"vram_magic/guard/{source.name}" for source in guard.glob("*.cpp")} <= set(names)
    metadata = next(name for name in names if name.endswith(".dist-info/WHEEL"))
    assert b"Root-Is-Purelib: false" in zipfile.ZipFile(wheel).read(metadata)


def test_building_the_wheel_leaves_the_tree_as_it_was(tree, tmp_path):
    before = files(tree)
    wheel_of(tree, tmp_path / "wheel")
    assert files(tree) == before


def test_without_torch_the_wheel_is_pure_and_without_a_compiler_the_report_says_why(tree, tmp_path):
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    (blocked / "torch.py").write_text("raise ImportError('not in this environment')")
    wheel = wheel_of(tree, tmp_path / "wheel", PYTHONPATH=str(blocked))
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not any(name.endswith(".so") for name in zipfile.ZipFile(wheel).namelist())
    code = """
import torch
import vram_magic as vm
mgr = vm.VRAMManager(device="cpu", budget="8MiB", block_bytes="1MiB")
assert mgr.guard == "none: no C++ compiler (install g++)", mgr.guard
model = torch.nn.Linear(512, 512, bias=False)
x = torch.randn(2, 512)
with torch.no_grad():
    expected = model(x)
    handle = mgr.register("model", model)
    handle.evict()
    assert torch.equal(model(x), expected)
mgr.close()
"""
    run_installed(wheel, tmp_path, code)
