"""Feature distillation: the gradient of the features' loss is added where the features are; projections learn."""

import copy

import pytest
import torch
from torch import nn

from create.distill.nets import batch, gradients, same, student
from sparta.create.distill import feature_loss
from sparta.create.manager import Manager
from sparta.create.modifiers import modifier_named
from sparta.errors import NameNotFoundError, ShapeError, ValueRangeError

PerLayer = modifier_named("PerLayerDistillation")
cross_entropy = nn.functional.cross_entropy


def taught(model, teacher, optimizer=None, **fields):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    manager = Manager([PerLayer(**fields)])
    manager.attach(model, optimizer, 4, teacher=teacher)
    return manager, optimizer


def features(model, inputs, names):
    kept = {}
    handles = [
        model.get_submodule(name).register_forward_hook(lambda *a, name=name: kept.__setitem__(name, a[2]))
        for name in names
    ]
    output = model(inputs)
    for handle in handles:
        handle.remove()
    return output, kept


def by_hand(model, teacher, gain, normalize=True, names=("0", "2")):
    inputs, targets = batch()
    outputs, ours = features(model, inputs, names)
    _, theirs = features(teacher, inputs, names)
    extra = sum(feature_loss(ours[n], theirs[n].detach(), normalize=normalize, epsilon=1e-6) for n in names)
    loss = cross_entropy(outputs, targets) + gain * extra
    loss.backward()
    return loss


@pytest.mark.parametrize("normalize", [True, False])
def test_the_gradient_is_that_of_the_sum(normalize):
    model, plain, teacher = student(0), student(0), student(1)
    by_hand(plain, teacher, 0.7, normalize)
    taught(model, teacher, gain=0.7, normalize=normalize)
    cross_entropy(model(batch()[0]), batch()[1]).backward()
    assert same(gradients(model), gradients(plain))


def test_loss_update_returns_the_sum_and_the_automatic_way_stands_back():
    model, plain, teacher = student(0), student(0), student(1)
    expected = by_hand(plain, teacher, 1.5)
    manager, optimizer = taught(model, teacher)
    loss = manager.loss_update(cross_entropy(model(batch()[0]), batch()[1]))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert manager.loss_update(loss) is loss, "nothing counts twice"
    loss.backward()
    assert same(gradients(model), gradients(plain))
    optimizer.step()
    with pytest.raises(ValueRangeError, match="no forward pass"):
        manager.loss_update(loss.detach())


def test_with_outputs_distilled_too_both_shares_are_there():
    model, teacher = student(0), student(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Manager([modifier_named("Distillation")(), PerLayer()]).attach(model, optimizer, 4, teacher=teacher)
    by_itself = student(0)
    other = torch.optim.SGD(by_itself.parameters(), lr=0.1)
    manager = Manager([modifier_named("Distillation")(), PerLayer()])
    manager.attach(by_itself, other, 4, teacher=teacher)
    cross_entropy(model(batch()[0]), batch()[1]).backward()
    manager.loss_update(cross_entropy(by_itself(batch()[0]), batch()[1])).backward()
    assert same(gradients(model), gradients(by_itself))


def test_a_self_taught_student_draws_back_to_what_it_was():
    model = student(0)
    manager, optimizer = taught(model, None, student_layer_names=["0"])
    inputs, _ = batch()
    model(inputs)
    model[0].weight.data += 1.0
    model.zero_grad()
    outputs = model(inputs)
    (outputs * 0).sum().backward()
    assert model[0].weight.grad.abs().sum() > 0
    assert model[2].weight.grad.abs().sum() == 0
    optimizer.step()
    assert manager.distillation_modifiers[0].idle() == ""


class Conv(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.images, self.signal, self.head = nn.Conv2d(2, width, 3), nn.Conv1d(2, width, 3), nn.Linear(width, 4)

    def forward(self, images):
        features = self.images(images).mean((2, 3)) + self.signal(images.mean(2)).mean(2)
        return self.head(features)


def test_other_widths_are_projected_and_the_projections_are_trained_by_the_optimizer():
    torch.manual_seed(0)
    model, teacher = Conv(4), Conv(6)
    names = ["images", "signal", "head"]
    manager, optimizer = taught(model, teacher, student_layer_names=names)
    images = torch.randn(3, 2, 5, 5)
    model(images).sum().backward()
    projections = manager.distillation_modifiers[0]._projections
    assert {name: type(p) for name, p in projections.items()} == {"images": nn.Conv2d, "signal": nn.Conv1d}
    assert len(optimizer.param_groups) == 3
    before = projections["images"].weight.clone()
    optimizer.step()
    assert not torch.equal(projections["images"].weight, before)
    again, other = Conv(4), Conv(6)
    resumed, new_optimizer = taught(again, other, student_layer_names=names)
    resumed.load_state_dict(manager.state_dict())
    new_optimizer.load_state_dict(optimizer.state_dict())
    found = resumed.distillation_modifiers[0]._projections
    assert all(torch.equal(found[name].weight, p.weight) for name, p in projections.items())
    manager.finalize()
    assert all(p.weight.grad is None for p in projections.values())


def test_projections_of_the_last_dim_for_sequences():
    model, teacher = nn.Sequential(nn.Linear(4, 6)), nn.Sequential(nn.Linear(4, 3))
    manager, _ = taught(model, teacher)
    model(torch.randn(2, 5, 4)).sum().backward()
    assert type(manager.distillation_modifiers[0]._projections["0"]) is nn.Linear


def test_features_that_do_not_fit_are_refused():
    model, teacher = nn.Sequential(nn.Linear(4, 6)), nn.Sequential(nn.Linear(4, 3))
    taught(model, teacher, project_features=False)
    with pytest.raises(ShapeError, match="project_features"):
        model(torch.randn(2, 4))
    images = nn.Sequential(nn.Conv2d(2, 4, 3))
    taught(images, nn.Sequential(nn.Conv2d(2, 4, 1)))
    with pytest.raises(ShapeError, match="channels alone"):
        images(torch.randn(1, 2, 5, 5))


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        ({"student_layer_names": ["9"]}, NameNotFoundError, "unknown layer of the student"),
        ({"teacher_layer_names": ["0", "9"]}, NameNotFoundError, "unknown layer of the teacher"),
        ({"student_layer_names": ["0"], "teacher_layer_names": ["0", "2"]}, ValueRangeError, "one for one"),
        ({"gain": -1}, ValueRangeError, "gain"),
    ],
)
def test_wrong_fields_are_refused_before_the_first_step(fields, error, text):
    with pytest.raises(error, match=text):
        taught(student(0), student(1), **fields)


def test_after_finalize_no_hook_is_left():
    model, teacher = student(0), student(1)
    manager, _ = taught(model, teacher)
    cross_entropy(model(batch()[0]), batch()[1]).backward()
    manager.run.optimizer.step()
    manager.finalize()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in [*model.modules(), *teacher.modules()])


def test_a_pass_under_no_grad_leaves_nothing_behind():
    model, teacher = student(0), student(1)
    manager, _ = taught(model, teacher)
    with torch.no_grad():
        model(batch()[0])
    twin = copy.deepcopy(model)
    twin(batch()[0])
    assert manager.distillation_modifiers[0]._capture.passes == []
