"""Compiles the native guard, finds a compiled one again, and loads it.

It owns the compiled libraries on disk. One is called by all that it depends on: torch's version and ABI, the machine,
the flags and the text of the sources; by no path, so that a library from a wheel is found wherever it is installed. It
is looked for in the package, then in private folders of the user, and compiled into one of these when missing.

A library ends in a checksum of itself, and is tried only when that agrees: the loader dies of SIGBUS on a file that
was cut short, so asking it would take the kernel along. It is written under a temporary name and renamed, so whoever
looks finds a whole file or none. A lock file (``flock``) for each library spares two kernels that start together the
second compile; nothing but time depends on it, so after a while, or where files have no locks, we go on without.

It refuses to know what a library does. ``torch.utils.cpp_extension`` would build one too, but asks for ninja and for
Python's headers; plain ``g++`` (10 or newer) does.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import platform
import re
import shlex
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

__all__ = ["GuardUnavailable", "build", "compile_into", "load"]

_PACKAGED = Path(__file__).with_name("built")
_COMPILERS = ("c++", "g++", "clang++")
# No rpath: torch has loaded its libc10 before us, and the loader takes that one. It is found by its name alone.
_FLAGS = (
    "-O2",
    "-std=c++20",
    "-shared",
    "-fPIC",
    f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
)
_COMPILE_SECONDS, _LOCK_SECONDS = 300, 60
_STALE_SECONDS = 3600  # older than any compile that may still run
_SCRATCH = ".build-"
_CHECKSUM_BYTES = hashlib.sha256().digest_size

_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)
_COMPLAINT = re.compile(r"\berror\b|\bcannot\b|undefined reference")


class GuardUnavailable(Exception):  # noqa: N818  it is a state that the report shows, not a failure of the user's
    """There is no native guard here; the text says why, for the report."""


def load(source: Path, *, generated: Mapping[str, str] = {}, includes: Sequence[Path] = ()) -> ctypes.PyDLL:
    """The library of ``source`` in this process; one that cannot be loaded is built again, once for each folder.

    Arguments are those of `build`. Raises `GuardUnavailable`. PyDLL keeps the GIL: a call into the guard is some
    nanoseconds of counting, and giving the GIL away would let others in.
    """
    refused: OSError | None = None
    try:
        for library in _candidates(_Recipe(source.resolve(), generated, includes)):
            try:
                return ctypes.PyDLL(str(library))
            except OSError as error:  # made on a newer system, or kept where nothing may be executed
                refused = error
                _discard(library)
    except GuardUnavailable as unavailable:
        if refused is None:
            raise
        raise GuardUnavailable(f"{unavailable}; the compiled guard does not load: {refused}") from refused
    raise GuardUnavailable(f"the compiled guard does not load: {refused}")


def build(source: Path, *, generated: Mapping[str, str] = {}, includes: Sequence[Path] = ()) -> Path:
    """The compiled library of ``source``, found or compiled now. Raises `GuardUnavailable`.

    ``generated`` holds the texts of further headers by file name; ``includes`` are folders of foreign headers, which
    are taken to change with torch's version only.
    """
    return next(_candidates(_Recipe(source.resolve(), generated, includes)))


def compile_into(folder: Path, source: Path) -> Path:
    """Compiles ``source`` into ``folder``, as `build` will look for it in the package. Raises `GuardUnavailable`."""
    recipe = _Recipe(source.resolve(), {}, ())
    return _compile(recipe, _compiler(), folder / recipe.name)


@dataclass(frozen=True)
class _Recipe:
    """What to compile, and how the result is called."""

    source: Path
    generated: Mapping[str, str]
    includes: Sequence[Path]

    @property
    def name(self) -> str:
        parts = [torch.__version__, platform.machine(), *_FLAGS]
        for name, text in sorted(self._texts().items()):
            parts += [name, hashlib.sha256(text).hexdigest()]
        return f"{self.source.stem}-{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:20]}.so"

    def _texts(self) -> dict[str, bytes]:
        """The source, the generated headers, and each header in the source's folder that these include."""
        texts = {f"generated/{name}": text.encode() for name, text in self.generated.items()}
        todo = [self.source]
        todo += [self.source.parent / name for text in texts.values() for name in _included(text)]
        while todo:
            path = todo.pop()
            name = os.path.relpath(path, self.source.parent)
            if name not in texts and path.is_file():
                texts[name] = path.read_bytes()
                todo += [path.parent / include for include in _included(texts[name])]
        return texts

    def command(self, scratch: Path, output: Path) -> list[str]:
        """The compiler's arguments; the generated headers are in ``scratch``."""
        root = Path(torch.__file__).parent
        # Error messages carry file names: they must not carry those of the machine that built a wheel.
        unnamed = [f"-ffile-prefix-map={self.source.parent}=guard", f"-ffile-prefix-map={root}=torch"]
        quoted = ["-iquote", str(scratch), "-iquote", str(self.source.parent)]
        folders = [f"-I{folder.resolve()}" for folder in self.includes]
        link = [f"-L{root}/lib", "-lc10", "-o", str(output)]
        return [*_FLAGS, *unnamed, *quoted, f"-I{scratch}", *folders, f"-I{root}/include", str(self.source), *link]


def _included(text: bytes) -> list[str]:
    return [os.fsdecode(name) for name in _INCLUDE.findall(text)]


def _candidates(recipe: _Recipe) -> Iterator[Path]:
    """Libraries to try, best first: those that are there, then one compiled now in each folder that takes it."""
    name, folders = recipe.name, _private_folders()
    packaged = [_PACKAGED] if _as_safe_as_the_package(_PACKAGED / name) else []
    yield from (folder / name for folder in [*packaged, *folders] if _is_whole(folder / name))
    compiler = _compiler()
    folders = [folder for folder in folders if os.access(folder, os.W_OK)]
    if not folders:
        raise GuardUnavailable("no folder to keep the compiled guard in (home and temporary folder are read-only)")
    problem: GuardUnavailable | None = None
    for folder in folders:
        try:
            with _locked((folder / name).with_suffix(".lock")):
                if not _is_whole(folder / name):  # else another process was quicker
                    _compile(recipe, compiler, folder / name)
        except GuardUnavailable as error:  # home may be full where the temporary folder is not
            problem = error
        else:
            yield folder / name
    if problem is not None:
        raise problem


def _compiler() -> list[str]:
    """The command that compiles C++, which may be of several words, such as ``ccache g++``."""
    chosen = shlex.split(os.environ.get("CXX", "")) or [next(filter(shutil.which, _COMPILERS), "")]
    if not shutil.which(chosen[0]):
        raise GuardUnavailable(f"no C++ compiler ({f'CXX is {chosen[0]}' if chosen[0] else 'install g++'})")
    return chosen


def _private_folders() -> list[Path]:
    """Folders of ours alone, best first; made when missing."""
    wanted = []
    with contextlib.suppress(RuntimeError):  # nobody knows where home is
        wanted.append(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vram_magic")
    with contextlib.suppress(OSError):  # there is no temporary folder
        wanted.append(Path(tempfile.gettempdir()) / f"vram_magic-guard-{os.getuid()}")
    return [folder for folder in wanted if _made_private(folder)]


def _made_private(folder: Path) -> bool:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()  # a link of somebody else's may point elsewhere the next time
    except OSError:
        return False
    # A library that someone else can write to is code that someone else can run as us.
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022


def _as_safe_as_the_package(library: Path) -> bool:
    # Whoever owns the package, or its group, can change this very file too; anybody at all must not be able to.
    with contextlib.suppress(OSError):
        return not (library.stat().st_mode | library.parent.stat().st_mode) & stat.S_IWOTH
    return False


def _is_whole(library: Path) -> bool:
    try:
        data = library.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(data[:-_CHECKSUM_BYTES]).digest() == data[-_CHECKSUM_BYTES:]


def _discard(library: Path) -> None:
    if library.parent != _PACKAGED:  # that one is the installer's
        with contextlib.suppress(OSError):
            library.unlink()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds the file's lock, which dies with its process, or goes on without when it cannot be had in time."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            file = stack.enter_context(path.open("wb"))
            deadline = time.monotonic() + _LOCK_SECONDS
            while not _took_lock(file) and time.monotonic() < deadline:
                time.sleep(0.05)
        yield


def _took_lock(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _compile(recipe: _Recipe, compiler: list[str], library: Path) -> Path:
    try:
        _sweep(library.parent)
        with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=library.parent, ignore_cleanup_errors=True) as folder:
            scratch = Path(folder)
            for name, text in recipe.generated.items():
                (scratch / name).write_text(text)
            output = scratch / library.name
            _run([*compiler, *recipe.command(scratch, output)], scratch)
            with output.open("r+b") as file:
                checksum = hashlib.sha256(file.read()).digest()
                file.write(checksum)
            output.replace(library)
    except (OSError, subprocess.SubprocessError) as error:
        raise GuardUnavailable(f"{compiler[0]} could not build the guard: {error}") from error
    return library


def _sweep(folder: Path) -> None:
    """Removes what compiles have left whose process was killed."""
    for left in folder.glob(f"{_SCRATCH}*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(left)


def _run(command: list[str], scratch: Path) -> None:
    """Runs the compiler in a session of its own: its children must end with it, or they would be waited for."""
    log = scratch / "compiler.log"
    environment = dict(os.environ, TMPDIR=str(scratch), LC_ALL="C")
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603  the user's own compiler
            command,
            cwd=scratch,  # the kernel's folder may be gone
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            process.wait(_COMPILE_SECONDS)
        except BaseException:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            raise
    if process.returncode:
        lines = log.read_text(errors="replace").splitlines() or ["no message"]
        complaint = next(filter(_COMPLAINT.search, lines), lines[-1])
        raise GuardUnavailable(f"{command[0]} could not build the guard: {complaint}")
