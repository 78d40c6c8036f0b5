"""The last resort: a model that asked to stay is demoted to its file, only when nothing else suffices and it is clean.

Without this a resident model either starves its neighbour, or leaves and loses an edit.
"""

from __future__ import annotations

import os

import pytest
import torch
from place import DEVICE
from safetensors.torch import save_file
from torch import nn

import vram_magic as vm
from vram_magic.residency import leaving

MIB = 1 << 20


def layers(count: int) -> nn.Module:
    return nn.Sequential(*[nn.Linear(512, 512, bias=False, device=DEVICE) for _ in range(count)])  # 1 MiB each


@pytest.fixture
def resident(mgr, tmp_path) -> nn.Module:
    """Four blocks, safe in a file, that ask to stay."""
    model = layers(4)
    save_file(model.state_dict(), tmp_path / "resident.safetensors")
    mgr.register("resident", model, residency="device", source=tmp_path / "resident.safetensors")
    return model


def copied_bytes(mgr: vm.VRAMManager) -> int:
    """In spill files, and an accelerator's copies in RAM."""
    return mgr.spilled_bytes + mgr._torch_models._host.used_bytes


def stages(mgr: vm.VRAMManager) -> list[tuple[str, str]]:
    return [(step.model, step.stage) for step in mgr.journal[-1].left]


def test_others_leave_first_whatever_their_rank(mgr, resident):
    mgr.register("other", other := layers(2), tier="asr")
    mgr.make_room(mgr.free_bytes + 2 * MIB, tier="llm")
    assert stages(mgr) == [("other", "pass 2")]
    assert mgr["resident"].residency == "device"
    assert mgr["resident"].state == "device"
    assert other is not None


def test_it_is_demoted_only_as_far_as_needed_and_reloads_from_its_file(mgr, resident, tmp_path):
    before = [p.detach().clone() for p in resident.parameters()]
    mgr.register("other", other := layers(1))
    freed = mgr.make_room(mgr.free_bytes + 3 * MIB)
    assert freed == 3 * MIB
    assert stages(mgr) == [("other", "pass 1"), ("resident", "demotion")]
    assert mgr["resident"].residency == "disk"
    assert mgr["resident"].blocks == (2, 4)
    mgr["resident"].load()
    assert all(torch.equal(a, b) for a, b in zip(resident.parameters(), before, strict=True))
    assert other is not None


@pytest.mark.parametrize("edit", ["weight", "data"])
def test_an_edited_block_is_not_demoted(mgr, resident, edit):
    with torch.no_grad():
        (resident[3].weight if edit == "weight" else resident[3].weight.data).neg_()
    with pytest.raises(vm.VRAMOutOfMemoryError):
        mgr.make_room(mgr.free_bytes + 4 * MIB)
    assert mgr["resident"].blocks == (4, 4)
    assert mgr["resident"].residency == "device"
    assert mgr.make_room(mgr.free_bytes + 3 * MIB) == 3 * MIB
    assert mgr["resident"].blocks == (1, 4)
    assert mgr.spilled_bytes == 0


def test_an_edit_undone_bit_for_bit_is_clean_again(mgr, resident):
    resident[3].weight.data.neg_()
    resident[3].weight.data.neg_()
    assert mgr.make_room(mgr.free_bytes + 4 * MIB) == 4 * MIB


def test_a_model_without_a_file_is_not_demoted_and_the_request_fails_whole(mgr):
    model = layers(2)
    mgr.register("homeless", model, residency="device")
    mgr.register("other", other := layers(1))
    with pytest.raises(vm.VRAMOutOfMemoryError):
        mgr.make_room(mgr.free_bytes + 2 * MIB)
    assert mgr["other"].state == mgr["homeless"].state == "device"
    assert mgr["homeless"].residency == "device"
    assert other is not None


def test_a_file_that_changed_since_is_no_safety(mgr, resident, tmp_path):
    path = tmp_path / "resident.safetensors"
    with path.open("r+b") as file:
        file.seek(-4, 2)
        file.write(b"\0\0\0\0")
    os.utime(path, ns=(0, 0))  # the clock of a file ticks more coarsely than a test runs
    with pytest.raises(vm.VRAMOutOfMemoryError):
        mgr.make_room(mgr.free_bytes + MIB)
    assert mgr["resident"].residency == "device"


def test_pinned_and_leased_models_are_not_demoted(mgr, resident):
    mgr["resident"].pin()
    with pytest.raises(vm.VRAMOutOfMemoryError):
        mgr.make_room(mgr.free_bytes + MIB)
    mgr["resident"].unpin()
    with mgr["resident"].lease(), pytest.raises(vm.VRAMOutOfMemoryError):
        mgr.make_room(mgr.free_bytes + MIB)
    assert mgr["resident"].residency == "device"


def test_when_it_fits_nothing_is_demoted(mgr, resident):
    assert mgr.make_room(mgr.free_bytes) == 0
    assert mgr["resident"].residency == "device"


def test_the_user_may_evict_it(mgr, resident):
    assert mgr["resident"].evict() == 4 * MIB
    assert mgr["resident"].residency == "device"


def test_host_residency_leaves_as_a_copy_and_auto_goes_back_to_the_file(mgr, tmp_path):
    model = layers(2)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    handle = mgr.register("model", model, residency="host", source=tmp_path / "model.safetensors")
    handle.evict()
    assert handle.state == "host"
    assert copied_bytes(mgr) >= 2 * MIB
    assert "differ" not in handle.why()
    handle.load()
    handle.residency = "auto"
    handle.evict()
    assert handle.state == "disk"
    assert copied_bytes(mgr) == 0
    assert torch.equal(model[1].weight, nn.Sequential(model)[0][1].weight)


def test_only_what_was_demoted_leaves_like_any_other_afterwards(mgr, resident):
    mgr.make_room(mgr.free_bytes + 2 * MIB)
    mgr["resident"].load()
    mgr.register("other", other := layers(2), tier="asr")
    assert mgr.make_room(mgr.free_bytes + MIB, tier="llm") == MIB
    assert stages(mgr) == [("resident", "pass 1")]
    mgr["resident"].load()
    assert mgr.make_room(mgr.free_bytes + 5 * MIB, tier="llm") == 5 * MIB
    assert stages(mgr) == [("resident", "pass 1"), ("other", "pass 2"), ("resident", "demotion")]
    assert other is not None


def test_a_new_wish_to_stay_begins_anew(mgr, resident):
    mgr.make_room(mgr.free_bytes + 4 * MIB)
    assert mgr["resident"].residency == "disk"
    mgr["resident"].residency = "device"
    assert mgr["resident"].residency == "device"
    mgr["resident"].load()
    mgr.register("other", other := layers(1), tier="asr")
    mgr.make_room(mgr.free_bytes + MIB, tier="llm")
    assert stages(mgr) == [("other", "pass 2")]
    assert other is not None


def test_a_block_that_did_not_leave_has_its_old_residency_back(mgr, resident, monkeypatch):
    last, replace = resident[3].weight, leaving.replace
    monkeypatch.setattr(leaving, "replace", lambda span, *a: span.tensors[0] is not last and replace(span, *a))
    assert mgr.make_room(mgr.free_bytes + MIB) == MIB
    monkeypatch.undo()
    assert mgr["resident"].blocks == (3, 4)
    assert last.device.type == DEVICE
    mgr["resident"].load()
    mgr.register("other", other := layers(1), tier="asr")
    mgr.make_room(mgr.free_bytes + 2 * MIB, tier="llm")
    assert stages(mgr) == [("resident", "pass 1"), ("other", "pass 2")]
    assert other is not None


class WithBuffers(nn.Module):
    """As rotary embeddings have them: a buffer that is in no file."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(512, 512, bias=False, device=DEVICE)
        self.register_buffer("frequencies", torch.randn(64, device=DEVICE), persistent=False)

    def forward(self, x):
        return self.layer(x) * self.frequencies.sum()


def test_a_buffer_that_is_never_saved_keeps_no_model_from_being_demoted(mgr, tmp_path):
    model = WithBuffers()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    h = mgr.register("model", model, residency="device", source=tmp_path / "model.safetensors")
    frequencies = model.frequencies.clone()
    assert mgr.make_room(mgr.free_bytes + MIB + 1) > MIB
    assert h.state == "disk"
    h.load()
    assert torch.equal(model.frequencies, frequencies)


def test_an_edited_weight_is_named_when_it_keeps_the_model(mgr, resident):
    resident[1].weight.data.neg_()
    with pytest.raises(vm.VRAMOutOfMemoryError, match=r"1\.weight was edited, or its file does not hold it"):
        mgr.make_room(mgr.free_bytes + 4 * MIB)


def test_weights_that_another_tensor_shares_are_not_demoted(mgr, resident):
    alias = resident[2].weight.detach()
    with pytest.raises(vm.VRAMOutOfMemoryError, match="another tensor shares its memory"):
        mgr.make_room(mgr.free_bytes + 4 * MIB)
    assert alias.device.type == DEVICE
    assert mgr["resident"].blocks == (4, 4)


def test_a_model_that_the_request_needs_is_not_demoted_for_itself(mgr, resident, tmp_path):
    mgr["resident"].evict()
    mgr.register("other", other := layers(3), residency="device")
    mgr.budget_bytes = mgr.used_bytes + 2 * MIB
    with pytest.raises(vm.VRAMOutOfMemoryError):
        mgr["resident"].load()
    assert mgr["resident"].device_bytes == 0
    assert mgr["other"].state == "device"
    assert other is not None
