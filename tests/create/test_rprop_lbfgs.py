"""Optimizers that remember more than moments: Rprop's step sizes stay, LBFGS sees masked gradients only."""

import pytest
import torch
from torch import nn

from create.models import CNN, loss_of, prunable, take_steps
from sparta.create import Manager, modifier_named
from sparta.sparsify import Sparsifier

STEPS = 4


@pytest.mark.parametrize(
    "entry",
    [
        modifier_named("ACDCPruning")(compression_sparsity=0.8, end_epoch=4, update_frequency=1),
        modifier_named("TopKASTPruning")(forward_sparsity=0.8, backward_sparsity=0.5, end_epoch=4),
    ],
    ids=lambda entry: entry.name,
)
def test_step_sizes_of_rprop_do_not_fall_to_the_floor(entry):
    model = CNN()
    optimizer = torch.optim.Rprop(model.parameters(), lr=0.01)
    Manager([entry]).attach(model, optimizer, STEPS)
    take_steps(model, optimizer, 4 * STEPS)
    sizes = torch.cat([optimizer.state[weight]["step_size"].flatten() for weight in prunable(model).values()])
    assert float((sizes <= 2e-6).float().mean()) < 0.05


def test_lbfgs_sees_zeros_in_every_evaluation_of_a_step():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=6)
    entry = modifier_named("MagnitudePruning")(final_sparsity=0.75, end_epoch=2, update_frequency=0.5)
    manager = Manager([entry])
    manager.attach(model, optimizer, STEPS)
    seen = []
    for step in range(3 * STEPS):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))

        def closure(x=x):
            optimizer.zero_grad()
            loss = (model(x) - x[:, :2]).square().mean()
            loss.backward()
            seen.extend(float(model[i].weight.detach()[~entry.masks[f"{i}.weight"]].abs().sum()) for i in (0, 2))
            return loss

        optimizer.step(closure)
    assert len(seen) > 3 * STEPS * 2, "several evaluations per step"
    assert max(seen) == 0
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())


def test_a_closure_is_masked_without_a_recipe_too():
    model = CNN()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    sparsifier = Sparsifier(model, 0.5).attach(optimizer)
    sparsifier.step()
    seen = []

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        seen.append(max(float(w.detach()[~sparsifier.masks[n]].abs().max()) for n, w in prunable(model).items()))
        return loss

    optimizer.step(closure)
    assert max(seen) == 0
