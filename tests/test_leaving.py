"""What a block does at the last moment before it leaves: it goes whole, and only if its bytes are safe right then.

Without this an edit of another thread vanishes, a weight is read back from a file that holds something else by now,
or half a block stays behind. Bodies are moved directly here: what asks for it has looked before, and may be late.
"""

from __future__ import annotations

import copy
import os
import pickle

import pytest
import torch
from bodies import body_of, load
from place import DEVICE, same_values
from safetensors.torch import save_file
from torch import nn

from vram_magic.residency import leaving, swap
from vram_magic.residency.checkpoint import Checkpoint

SIZE = 64


@pytest.fixture
def model():
    return nn.Linear(SIZE, SIZE, bias=False, device=DEVICE)


@pytest.fixture
def file(model, tmp_path):
    path = tmp_path / "weights.safetensors"
    save_file({"weight": model.weight.detach().cpu()}, path)
    return path


@pytest.fixture
def body(model, file, tmp_path):
    """Of a model on the device whose weights are in their file."""
    body = body_of(model, tmp_path, origins=Checkpoint.open(file).tensors)
    (block,) = body.look()
    assert not body.doubtful(block)
    return body


@pytest.mark.parametrize("backing", ["file", "copy"])
def test_an_edit_at_the_last_moment_keeps_the_block(body, model, backing, monkeypatch):
    """By the way that no version counts, after the bytes were hashed and before the memory is replaced."""
    if backing == "copy":
        with torch.no_grad():
            model.weight.fill_(1)
    replace = leaving.replace

    def edited_before(span, *args, **options):
        span.tensors[0].data.fill_(7)
        return replace(span, *args, **options)

    monkeypatch.setattr(leaving, "replace", edited_before)
    freed, stayed = body.evict(body.look())
    assert freed == 0
    assert stayed == ["it was edited while it was leaving"]
    assert body.figures.device_bytes == body.figures.total_bytes
    assert torch.all(model.weight == 7)
    monkeypatch.undo()
    assert body.evict(body.look())[0]
    load(body)
    assert torch.all(model.weight == 7)


def test_a_file_that_was_written_to_is_no_backing_any_more(body, model, file, tmp_path):
    expected = model.weight.detach().cpu().clone()
    assert body.evict(body.look())[0]
    load(body)
    assert not list(tmp_path.glob("spill/**/*.weights"))  # it left to its file
    with file.open("r+b") as same:
        same.seek(-SIZE, os.SEEK_END)
        same.write(bytes(SIZE))
    assert body.evict(body.look())[0]
    load(body)
    assert same_values(model.weight, expected)


def test_what_is_not_safe_in_its_file_does_not_leave_by_demotion(body, model):
    """The planner has looked before, and an edit may have come in between."""
    blocks = body.look()
    with torch.no_grad():
        model.weight.add_(1)
    expected = model.weight.detach().cpu().clone()
    freed, stayed = body.evict(blocks, only_proven=True)
    assert freed == 0
    assert stayed == ["weight was edited, or its file does not hold it"]
    assert body.figures.device_bytes == body.figures.total_bytes
    assert same_values(model.weight, expected)


def test_a_block_whose_last_weight_is_in_use_stays_whole_and_where_it_was(tmp_path):
    model = nn.Linear(SIZE, SIZE, device=DEVICE)
    body = body_of(model, tmp_path)
    (block,) = body.look()
    before = [(tensor.data_ptr(), tensor.detach().cpu().clone()) for tensor in model.parameters()]
    alias = model.bias.detach()
    assert [name for span in block.spans for name in span.names] == ["weight", "bias"]
    freed, stayed = body.evict([block])
    assert freed == 0
    assert stayed == ["another tensor shares its memory"]
    assert body.figures.device_bytes == body.figures.total_bytes
    for tensor, (address, values) in zip(model.parameters(), before, strict=True):
        assert tensor.data_ptr() == address
        assert same_values(tensor, values)
    assert alias.data_ptr() == model.bias.data_ptr()


def test_weights_of_many_blocks_that_running_code_names_are_waited_for_together(mgr, monkeypatch):
    model = nn.Sequential(*[nn.Linear(512, 512, bias=False, device=DEVICE) for _ in range(4)])
    handle = mgr.register("model", model)
    named = tuple(model.parameters())
    pauses = []
    monkeypatch.setattr(swap, "frames_rest", lambda: False)
    monkeypatch.setattr(swap.time, "sleep", pauses.append)
    assert handle.evict() == 0
    assert "Python code is using it" in handle.why()
    assert 0 < sum(pauses) <= 0.1
    monkeypatch.undo()
    assert handle.evict() == handle.total_bytes
    assert len(named) == 4


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_has_nothing_of_ours(mgr, copied):
    model = nn.Linear(8, 8, device=DEVICE)
    plain = set(vars(model))
    mgr.register("model", model).evict()
    assert set(vars(model)) > plain
    assert set(vars(copied(model))) == plain
