"""Adapters of peft on a sparse base: what is trained is what is merged, and the zeros stay.

peft need not be installed: a stand-in has the parts of its LoRA layer that are used; with peft its own layers are
tried too.
"""

import copy
import importlib.util

import pytest
import torch
from torch import nn

from sparta import Spec
from sparta.errors import ArgumentError, ShapeError, ValueRangeError
from sparta.recovery import mask_peft


class StandIn(nn.Module):
    """A LoRA layer with the names and the merging that peft's has."""

    def __init__(self, base, rank, dora):
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})
        nn.init.zeros_(self.lora_B["default"].weight)
        self.lora_dropout = nn.ModuleDict({"default": nn.Identity()})
        self.lora_magnitude_vector = nn.ModuleDict()
        if dora:
            length = nn.Module()
            length.weight = nn.Parameter(base.weight.detach().norm(dim=1))
            self.lora_magnitude_vector["default"] = length
        self.scaling, self.active_adapters = {"default": 2.0}, ["default"]
        self.merged = self.disable_adapters = False
        base.requires_grad_(False)

    def get_base_layer(self):
        return self.base_layer

    def get_delta_weight(self, adapter):
        return self.lora_B[adapter].weight @ self.lora_A[adapter].weight * self.scaling[adapter]

    def forward(self, x):
        if self.merged or self.disable_adapters:
            return self.base_layer(x)
        raise AssertionError("the update would be dense")

    @torch.no_grad()
    def merge(self):
        weight = self.base_layer.weight
        changed = weight + self.get_delta_weight("default")
        if len(self.lora_magnitude_vector):
            changed = changed * (self.lora_magnitude_vector["default"].weight / changed.norm(dim=1))[:, None]
        weight.copy_(changed)
        self.merged = True


class Wrapped(nn.Module):
    """A model under the names that peft gives it."""

    def __init__(self, model, dora):
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = model
        for place in (0, 2):
            model[place] = StandIn(model[place], 4, dora)

    def forward(self, x):
        return self.base_model.model(x)

    def merge_and_unload(self):
        model = self.base_model.model
        for place in (0, 2):
            model[place].merge()
            model[place] = model[place].base_layer
        return model


def with_peft(model, dora):
    import peft

    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["0", "2"], use_dora=dora))


MAKERS = [Wrapped, *([with_peft] if importlib.util.find_spec("peft") else [])]


def sparse_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    spec = Spec.from_pattern(model, "2:4")
    spec.apply(model)
    return model, spec


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("wrap", MAKERS)
@pytest.mark.parametrize("given", [True, False])
def test_what_is_trained_is_what_is_merged_and_zeros_stay(wrap, dora, given):
    model, spec = sparse_model()
    x, y = torch.randn(64, 16), torch.randn(64, 8)
    before = model(x)
    adapted = wrap(model, dora)
    assert mask_peft(adapted, spec if given else None) == ["0.weight", "2.weight"]
    torch.testing.assert_close(adapted(x), before)
    optimizer = torch.optim.Adam([p for p in adapted.parameters() if p.requires_grad], 1e-2)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = (adapted(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    adapted.eval()
    trained = adapted(x)
    torch.testing.assert_close(copy.deepcopy(adapted)(x), trained)
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(merged(x), trained)
    spec.check(merged)


def test_what_cannot_be_masked_says_why():
    model, spec = sparse_model()
    with pytest.raises(ValueRangeError, match="no LoRA layer of peft"):
        mask_peft(model, spec)
    with pytest.raises(ArgumentError, match="adapters of peft"):
        mask_peft(3)
    adapted = Wrapped(model, dora=False)
    with pytest.raises(ArgumentError, match=r"sparta\.Spec"):
        mask_peft(adapted, {"0.weight": 1})
    mask_peft(adapted, spec)
    with pytest.raises(ValueRangeError, match="masked already"):
        mask_peft(adapted, spec)
    other, _ = sparse_model()
    with torch.no_grad():
        other[0].weight.fill_(1.0)
    with pytest.raises(ValueRangeError, match="not zero where the spec prunes"):
        mask_peft(Wrapped(other, dora=False), spec)
    third, _ = sparse_model()
    shape = Spec.from_pattern(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)), "2:4")
    with pytest.raises(ShapeError, match="the spec has"):
        mask_peft(Wrapped(third, dora=False), shape)


def test_a_dense_base_is_warned_of():
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    with pytest.warns(UserWarning, match="has zeros"):
        assert mask_peft(Wrapped(model, dora=False)) == []
