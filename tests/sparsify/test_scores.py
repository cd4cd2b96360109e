"""Scores: the formulas, what they learn from steps, and what a skipped step must not teach them."""

import pytest
import torch
from torch import nn

from sparsify.models import Everything, tokens
from sparta.errors import NameNotFoundError, ValueRangeError
from sparta.sparsify import (
    ActivationWeighted,
    Gradient,
    Magnitude,
    Masks,
    Movement,
    Random,
    Taylor,
    find_layers,
    make_score,
)


def one_layer(weight, gradient):
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([weight]))
    model.weight.grad = torch.tensor([gradient])
    return model, find_layers(model)


@pytest.mark.parametrize(
    ("score", "one", "two"),
    [
        (Gradient(), [[3.0, 4.0]], [[3.0, 4.0]]),
        (Gradient(momentum=0.5), [[3.0, 4.0]], [[4.5, 6.0]]),
        (Taylor(), [[3.0, 8.0]], [[3.0, 8.0]]),
        (Movement(), [[-3.0, 8.0]], [[-6.0, 16.0]]),
    ],
)
def test_learnt_scores_are_running_sums(score, one, two):
    model, layers = one_layer([1.0, -2.0], [3.0, 4.0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    score.observe(layers, optimizer)
    assert score(layers[0]).tolist() == one
    score.observe(layers, optimizer)
    assert score(layers[0]).tolist() == two
    copy = type(score)(score.momentum)
    copy.load_state_dict(score.state_dict())
    assert torch.equal(copy(layers[0]), score(layers[0]))


def test_random_depends_on_seed_and_name_only():
    first, second = (find_layers(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))) for _ in range(2))
    assert torch.equal(Random(1)(first[0]), Random(1)(second[0]))
    assert not torch.equal(Random(1)(first[0]), Random(2)(first[0]))
    assert not torch.equal(Random(1)(first[0]), Random(1)(first[1]))


def test_activation_weighted_covers_every_kind_of_layer():
    model = Everything()
    layers = find_layers(model, include="*weight", ignore=["norm.weight", "attention.out_proj.weight"])
    score = ActivationWeighted()
    with score.watch(layers):
        model(tokens())
    for layer in layers:
        assert score(layer).shape == layer.shape, layer.name
        assert bool((score(layer) >= 0).all()), layer.name
    model(tokens())  # nobody listens any more
    before = {layer.name: score(layer) for layer in layers}
    copy = ActivationWeighted()
    copy.load_state_dict(score.state_dict())
    assert all(torch.equal(copy(layer), before[layer.name]) for layer in layers)


def test_activation_weighted_is_the_weight_times_the_norm_of_its_channel():
    conv = nn.Conv2d(4, 4, 3, groups=2, bias=False)
    layers = find_layers(conv)
    score = ActivationWeighted()
    x = torch.randn(2, 4, 5, 5)
    with score.watch(layers):
        conv(x[:1])
        conv(x[1:])
    norms = x.square().sum((0, 2, 3)).sqrt()
    expected = conv.weight.detach().abs()
    for row in range(4):
        group = row // 2
        expected[row] *= norms[2 * group : 2 * group + 2].view(2, 1, 1)
    torch.testing.assert_close(score(layers[0]), expected)


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_gradient_scaler_skips_teaches_nothing(fused):
    model = nn.Linear(3, 2, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused, foreach=False if fused else None)
    layers = find_layers(model)
    score = Movement()
    masks = Masks(layers, before_step=lambda o: score.observe(layers, o)).attach(optimizer)
    masks.set({"weight": torch.tensor([[1, 0, 1], [0, 1, 1]])})
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    x = torch.randn(4, 3)
    for scale in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean() * scale).backward()
        weight = model.weight.detach().clone()
        finite = model.weight.grad.isfinite().all()
        before = score.state_dict().get("weight", torch.zeros(2, 3))
        gradient = model.weight.grad.clone() / scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        assert bool((model.weight[~masks["weight"]] == 0).all())
        expected = before - weight * gradient if finite else before
        torch.testing.assert_close(score(layers[0]) if score.state_dict() else before, expected)
        if not finite:
            assert torch.equal(model.weight, weight)


def test_bad_input_is_named():
    model, layers = one_layer([1.0, 2.0], [1.0, 1.0])
    with pytest.raises(NameNotFoundError, match="did you mean 'magnitude'"):
        make_score("magnitud")
    with pytest.raises(ValueRangeError, match="has seen no gradient of 'weight'"):
        Movement()(layers[0])
    with pytest.raises(ValueRangeError, match="no input of 'weight'"):
        ActivationWeighted()(layers[0])
    with pytest.raises(ValueRangeError, match="momentum is 2"):
        Movement(2)
    with pytest.raises(ValueRangeError, match="which has none"):
        Magnitude().load_state_dict({"weight": torch.ones(1)})
    model.weight.grad = None
    Taylor().observe(layers, torch.optim.SGD(model.parameters(), lr=0.1))  # nothing to see, nothing wrong
    assert make_score("taylor").name == "taylor"
