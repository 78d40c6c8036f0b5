"""The build hook of the wheel: it puts the compiled guard in, when torch is there to compile it against.

It owns which sources a wheel carries compiled, and the wheel's tag. A compiled library serves the torch release that it
was made with; under any other the package compiles its own on first use, as the pure wheel does. So an isolated build,
which has no torch, makes the pure wheel. The libraries are compiled in a temporary folder: the tree stays as it is.
"""

from __future__ import annotations

import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hatchling.builders.config import BuilderConfig
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_GUARD = "vram_magic/guard"
_FOREIGN = {"forwarding.cpp"}  # needs CUDA's headers, and others made from them; all else needs torch's c10 only


class GuardHook(BuildHookInterface[BuilderConfig]):
    """Compiles the guard into the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "standard":  # an editable install compiles on first use, as its sources may change
            return
        # Lives as long as the hook: hatchling reads the files after this method.
        self._folder = tempfile.TemporaryDirectory(prefix="vram_magic-wheel-")
        libraries = list(self._compiled(Path(self._folder.name)))
        if not libraries:
            self.app.display_warning("A pure wheel: the guard will be compiled on first use.")
            return
        for library in libraries:
            build_data["force_include"][str(library)] = f"{_GUARD}/built/{library.name}"
        build_data["pure_python"] = False
        # The library is called through ctypes, so any Python will do; the platform and its libc will not.
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        if version == "standard":
            self._folder.cleanup()

    def _compiled(self, folder: Path) -> Iterator[Path]:
        sys.path.insert(0, self.root)
        try:
            from vram_magic.guard.build import GuardUnavailable, compile_into
        except (ImportError, OSError) as error:
            self.app.display_warning(f"The guard is not compiled, as torch cannot be imported: {error}")
            return
        finally:
            sys.path.remove(self.root)
        for source in sorted(Path(self.root, _GUARD).glob("*.cpp")):
            if source.name in _FOREIGN:
                continue
            try:
                library = compile_into(folder, source)
            except GuardUnavailable as reason:
                self.app.display_warning(f"{source.name} is not compiled: {reason}")
            else:
                self.app.display_info(f"{source.name} is compiled")
                yield library
