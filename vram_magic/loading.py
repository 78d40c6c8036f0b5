"""Taking models under management: from the notebook's objects, and from sources. Torch models only."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vram_magic.core import Core
from vram_magic.devices.host import HostMemory
from vram_magic.errors import VRAMError
from vram_magic.models.entry import EntryPoints
from vram_magic.models.managed import ManagedModel, TorchModel
from vram_magic.models.roots import origins_of, roots_of
from vram_magic.models.sources import Source, resolve
from vram_magic.models.working import Working
from vram_magic.oom import VRAMOutOfMemoryError
from vram_magic.residency.body import Body
from vram_magic.residency.parts import Key, Record
from vram_magic.residency.spill import SpillStore
from vram_magic.sizes import format_size
from vram_magic.workers import settled

__all__ = ["Loading", "Wishes"]


@dataclass(frozen=True, slots=True)
class Wishes:
    """How a model is to be managed."""

    rank: int
    tier: str | None
    residency: str = "auto"
    pinned: bool = False
    workspace: Callable[[], Any] | None = None


class Loading:
    """Makes managed models, and owns what those of one manager share: spill files, records, processors."""

    def __init__(self, core: Core, block_bytes: int, spill_dir: str | Path | None, host: HostMemory) -> None:
        self._core = core
        self._block_bytes = block_bytes
        self._records: weakref.WeakValueDictionary[Key, Record] = weakref.WeakValueDictionary()
        self._processors: weakref.WeakKeyDictionary[ManagedModel, Callable[[], Any]] = weakref.WeakKeyDictionary()
        # Where a copy in RAM gives the device no room, weights without a file go to disk.
        self._host = HostMemory(0) if core.device.is_host or core.device.shares_ram else host
        self.store = SpillStore(Path(spill_dir) if spill_dir else None)
        self.store.open()

    # ------------------------------------------------------------------------------------- from the notebook

    def register(self, name: str, thing: object, wishes: Wishes, source: str | Path | None) -> TorchModel:
        """Takes the object under management where it is."""
        while (known := self._known(name, thing)) is None:
            model = self._made(name, thing, wishes, source)
            with self._core.registry.lock:
                taken = self._core.registry.models.get(name)
            if taken is not None:
                self._core.forget(taken)
            # Looked at first, while nobody can move it: who finds it on the list, or calls it, finds its size.
            settled(self._core.workers.decide(model.body.look))
            if self._core.registry.add(model):  # else another thread was faster
                self._install(model)
                return model
        return known

    def _install(self, model: TorchModel) -> None:
        try:
            model.install()
        except BaseException:
            self._core.registry.remove(model)
            model.release()
            raise

    def _known(self, name: str, thing: object) -> TorchModel | None:
        """The model that the object is already, under this name. Raises when it is another's."""
        self._core.clear_up()
        with self._core.registry.lock:
            models = list(self._core.registry.models.values())
        mine = next((m for m in models if isinstance(m, TorchModel) and m.thing is thing), None)
        if mine is not None and mine.name != name:
            raise VRAMError(
                f"This object is managed as {mine.name!r} already.\nIts {format_size(mine.total_bytes)} are counted "
                f"once.\nOne object has one name.\nUse that name, or first: %vram forget {mine.name}"
            )
        return mine

    def _made(self, name: str, thing: object, wishes: Wishes, source: str | Path | None) -> TorchModel:
        core, roots = self._core, roots_of(thing)
        origins = origins_of(roots, source)
        body = Body(roots, core.device, self.store, self._block_bytes, origins, self._records, self._host)
        execution_device = None if core.device.is_host else core.device.torch_device
        entries = EntryPoints(core.registry, [module for _, module in roots], execution_device, thing)
        model = TorchModel(name, thing, body, entries, core.workers, when_gone=core.registry.gone.append)
        model.rank, model.tier, model.residency = wishes.rank, wishes.tier, wishes.residency
        model.working = Working(core.peaks, core.journal)
        model.pinned, model.workspace = wishes.pinned, wishes.workspace
        return model

    # ------------------------------------------------------------------------------------------ from a source

    def load(  # the parts of one `%load_model`
        self, name: str, source: object, wishes: Wishes, *, dtype: str | None, into: object, lazy: bool
    ) -> tuple[TorchModel, object]:
        """The model of a source, resident unless ``lazy``; and the object that was built for it, to be kept."""
        self._core.clear_up()  # or memory that a dead model had, and a new one gets, would be taken for its own
        found = resolve(source, dtype=dtype, into=into)
        known = self._same(name, found, source if dtype is None else None)
        if known is not None:
            if not lazy:
                self._core.registry.ensure(known)
            return known, known.thing if found.kind != "object" else None
        thing = self._built(name, found)
        with self._replacing(name, thing):
            model = self.register(name, thing, wishes, found.folder)
            model.key = found.key
            if found.kind != "object":  # else it may be known already, and where it was read from still holds
                model.source = _named(source) if into is None else None
                self._processors[model] = functools.cache(found.processor or _nothing)
            model.dtype = str(dtype).removeprefix("torch.") if dtype else model.dtype
            try:
                if not lazy:
                    self._core.registry.ensure(model)
            except BaseException:
                self._core.forget(model)
                raise
        return model, thing if found.kind != "object" else None

    def _same(self, name: str, found: Source, thing: object) -> TorchModel | None:
        """The model of that name, if it was loaded from that source, or is the very thing."""
        with self._core.registry.lock:
            known = self._core.registry.models.get(name)
        if not isinstance(known, TorchModel) or known.thing is None:
            return None
        return known if known.thing is thing or known.key == found.key is not None else None

    def _built(self, name: str, source: Source) -> object:
        """The object. A builder that runs out of memory raises our error."""
        try:
            return source.build()
        except VRAMOutOfMemoryError:
            raise
        except torch.OutOfMemoryError as error:
            ours = self._core.last_error
            if ours is None or str(ours) != str(error):
                raise
            _, numbers, cause, _ = str(ours).splitlines()
            text = (
                f"{name!r} could not be built: it wanted {format_size(ours.needed_bytes)} more.\n{numbers}\n{cause}\n"
                "What was built of it counts as other tensors. Give more room with: %vram budget SIZE"
            )
            raise VRAMOutOfMemoryError(
                text,
                needed_bytes=ours.needed_bytes,
                free_bytes=ours.free_bytes,
                budget_bytes=ours.budget_bytes,
                holders=ours.holders,
            ) from error

    @contextlib.contextmanager
    def _replacing(self, name: str, thing: object) -> Iterator[None]:
        """Another model under the name goes once the new one is there, and only then: until then it can be evicted."""
        registry = self._core.registry
        with registry.lock:
            known = registry.models.get(name)
        if known is None or getattr(known, "thing", None) is thing:
            yield
            return
        registry.rename(known, f"{name} (being replaced)")
        try:
            yield
        except BaseException:
            if not registry.rename(known, name):  # another model has the name by now, as if it had come later
                self._core.forget(known)
            raise
        self._core.forget(known)

    # ----------------------------------------------------------------------------------------------- the rest

    def processor_of(self, model: ManagedModel) -> Any:
        """The tokenizer or processor of the model's folder, or None."""
        return self._processors.get(model, _nothing)()


def _named(source: object) -> str | None:
    """The path or hub id by which another kernel finds the source; None where it is an object or a builder."""
    if not isinstance(source, str | Path):
        return None
    path = Path(source).expanduser()
    return str(path.absolute()) if path.exists() else str(source)


def _nothing() -> None:
    """The processor of a model without one."""
