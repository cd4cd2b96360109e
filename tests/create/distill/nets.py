"""Students and teachers for the tests of distillation, and the gradients that blending by hand would give."""

import torch
from torch import nn

from sparta.create.distill import soft_target_loss
from sparta.create.manager import Manager
from sparta.create.modifiers import modifier_named

HARDNESS, TEMPERATURE = 0.3, 3.0


def student(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(5, 6, generator=generator), torch.randint(0, 4, (5,), generator=generator)


def gradients(model):
    return [p.grad.clone() for p in model.parameters()]


def blended_gradients(model, teacher, batches, scale=1.0):
    """The gradient of the blended loss as one would write it."""
    model.zero_grad()
    for inputs, targets in batches:
        outputs = model(inputs)
        task = nn.functional.cross_entropy(outputs, targets)
        with torch.no_grad():
            goal = teacher(inputs)
        kd = soft_target_loss(outputs, goal, TEMPERATURE)
        (((1 - HARDNESS) * task + HARDNESS * kd) * scale).backward()
    return gradients(model)


def distilled(model, teacher, optimizer=None, **fields):
    """A manager with one distillation modifier, attached."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    entry = modifier_named("Distillation")(**{"hardness": HARDNESS, "temperature": TEMPERATURE, **fields})
    manager = Manager([entry])
    manager.attach(model, optimizer, 4, teacher=teacher)
    return manager, optimizer


def same(found, expected, atol=1e-6):
    return all(torch.allclose(a, b, atol=atol) for a, b in zip(found, expected, strict=True))
