"""A body's records are beliefs; what is mapped and what is hashed decides.

Addresses of storages are used again. A record that is taken for another model's once gave that model its weights.
"""

from __future__ import annotations

import gc

import torch
from bodies import body_of, load
from place import same_values
from safetensors.torch import load_file, save_file
from torch import nn


def mapped(path) -> nn.Module:
    """A model whose weight is mapped from the file, as loaders leave it."""
    model = nn.Linear(64, 64, bias=False)
    model.weight.data = torch.from_file(str(path), shared=False, size=64 * 64, dtype=torch.float32).view(64, 64)
    return model


def test_a_record_of_other_memory_at_the_same_address_gives_no_wrong_weights(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    for path in (first, second):
        path.write_bytes(torch.randn(64 * 64).numpy().tobytes())
    model, other = mapped(first), mapped(second)
    expected = model.weight.detach().clone()
    body, elsewhere = body_of(model, tmp_path), body_of(other, tmp_path)
    elsewhere.look()
    load(elsewhere)
    elsewhere.evict(elsewhere.look())
    (stale,) = elsewhere._records._own.values()
    assert stale.file is not None
    body.look()
    (key,) = body.keys
    stale.stand_in = None
    body._records._remember(key, stale)
    load(body)
    assert same_values(model.weight, expected)


def test_a_key_is_given_up_when_the_memory_is(tmp_path):
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)])
    shared = {}
    body = body_of(model, tmp_path, shared=shared)
    for _ in range(3):
        body.evict(body.look_for_idle())
        load(body)
    assert set(shared) == body.keys
    assert len(shared) == 8


def test_many_models_in_turn_never_get_each_others_weights(tmp_path):
    shared = {}
    for i in range(8):
        save_file({"weight": torch.full((64, 64), float(i))}, tmp_path / f"{i}.safetensors")
    bodies, models = [], []
    for _ in range(3):
        for i in range(8):
            model = nn.Linear(64, 64, bias=False)
            model.weight.data = load_file(tmp_path / f"{i}.safetensors")["weight"]
            body = body_of(model, tmp_path, shared=shared)
            load(body)
            body.evict(body.look_for_idle())
            assert torch.all(model.weight == i)
            models.append(model)
            bodies.append(body)
        del models[::2], bodies[::2]
        gc.collect()
    for model, body in zip(models, bodies, strict=True):
        value = model.weight[0, 0].item()
        load(body)
        assert torch.all(model.weight == value)
