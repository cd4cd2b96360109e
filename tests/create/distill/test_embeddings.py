"""Distilling embeddings: a divergence of distributions says next to nothing about unit vectors, an angle does."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sparta.create import Manager, modifier_named
from sparta.create.distill import losses


@pytest.mark.parametrize("kind", ["kl", "mse", "cosine"])
@given(st.integers(1, 4), st.integers(2, 5), st.integers(0, 99))
def test_every_gradient_is_the_derivative_of_its_loss(kind, rows, width, seed):
    generator = torch.Generator().manual_seed(seed)
    student = torch.randn(rows, width, generator=generator, requires_grad=True)
    teacher = torch.randn(rows, width, generator=generator)
    losses.output_loss(kind, student, teacher, 2.0).backward()
    closed = losses.output_gradient(kind, student.detach(), teacher, 2.0)
    torch.testing.assert_close(student.grad, closed, rtol=1e-4, atol=1e-5)


def test_the_loss_goes_by_the_output():
    logits = torch.randn(4, 10)
    assert losses.kind_of_output(logits) == "kl"
    assert losses.kind_of_output(nn.functional.normalize(logits, dim=-1)) == "cosine"
    assert losses.kind_of_output(torch.randn(4, 1)) == "mse"


class Embedder(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.fc = nn.Linear(12, 64)

    def forward(self, x):
        return nn.functional.normalize(self.fc(x), dim=-1)


def similarity(**fields):
    student, teacher = Embedder(0), Embedder(1)
    optimizer = torch.optim.SGD(student.parameters(), lr=2.0)
    manager = Manager([modifier_named("Distillation")(hardness=1.0, end_epoch=3, **fields)])
    manager.attach(student, optimizer, 20, teacher=teacher)
    for step in range(60):
        x = torch.randn(16, 12, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        student(x).square().mean().backward()
        optimizer.step()
    manager.finalize()
    x = torch.randn(64, 12, generator=torch.Generator().manual_seed(999))
    return float((student(x) * teacher(x)).sum(-1).mean().detach())


def test_a_student_comes_near_to_an_embedding_teacher():
    assert similarity() > 0.8
    assert similarity(distill_loss="mse") > similarity(distill_loss="kl") + 0.001
    assert similarity(distill_loss="kl") < 0.3, "which is why it is not what unit vectors get"
