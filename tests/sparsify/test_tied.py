"""GPT-2's own linear layer is pruned, along its inputs; what shares its weight with an embedding is not."""

import pytest
import torch
from torch import nn
from torch.optim import SGD

from sparta.create import initialize
from sparta.errors import NameNotFoundError
from sparta.scheduler import BaseScheduler
from sparta.sparsify import Magnitude, Sparsifier, find_layers, make_masks
from sparta.tesa.patterns import NM, Block
from sparta.tesa.spec import Spec

transformers = pytest.importorskip("transformers")


def gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2)
    return transformers.GPT2LMHeadModel(config)


WEIGHTS = [f"transformer.h.0.{name}.weight" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")]


def test_the_same_layers_are_pruned_everywhere():
    model = gpt2()
    assert model.lm_head.weight is model.transformer.wte.weight
    assert [layer.name for layer in find_layers(model)] == WEIGHTS
    assert list(Spec.from_pattern(model, "2:4")) == WEIGHTS
    assert [layer.name for layer in Sparsifier(model, 0.5).layers] == WEIGHTS
    manager, _ = initialize(model, SGD(model.parameters(), lr=0.1), 2, quantization=False)
    assert list(manager.modifiers[-1].masks.layers) == WEIGHTS
    scheduler = BaseScheduler()
    scheduler.prepare_sparse_model(gpt2())
    assert list(scheduler._fakes()) == WEIGHTS


def test_patterns_lie_along_the_inputs():
    model = gpt2()
    layers = find_layers(model)
    assert {layer.input_axis for layer in layers} == {0}
    for mask in make_masks(layers, Magnitude(), "2:4").values():
        NM(2, 4, axis=0).validate(mask)
    for mask in make_masks(layers, Magnitude(), "block4", 0.5).values():
        Block(4, 1).validate(mask)
    for tesa in Spec.from_pattern(model, "4x1", 0.5).values():
        Block(1, 4).validate(tesa.mask())


def test_a_tied_head_is_pruned_when_it_is_named_and_alone_it_is_nothing():
    model = gpt2()
    assert [layer.name for layer in find_layers(model, include="lm_head.weight")] == ["lm_head.weight"]
    small = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9, bias=False))
    small[1].weight = small[0].weight
    with pytest.raises(NameNotFoundError, match="embedding"):
        find_layers(small)
