"""Structured pruning in one call: what goes together, how much, the report, and every error."""

import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from propagation.random_graphs import random_models
from sparta.errors import NameNotFoundError, ShapeError, ValueRangeError
from sparta.propagation import propagate, prune_structured
from sparta.propagation.groups import find_slots


@pytest.fixture
def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 10), nn.Sigmoid(), nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 3)).eval()


@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(random_models(images=True), st.sampled_from([0.3, 0.5, 0.9]))
def test_any_graph_can_be_pruned_and_equals_the_model_with_those_slices_at_zero(drawn, sparsity):
    model, x = drawn
    small, report = prune_structured(model, x, sparsity, allow_empty=True)
    slots = list(find_slots_of(model, x))
    with torch.no_grad():
        for pruned in report.slots:
            slot = next(slot for slot in slots if slot.name == pruned.name)
            slots.remove(slot)  # parts of one axis that are cut apart have one name
            for group in (slot.groups[i] for i in pruned.removed):
                for (name, dim), flags in group.slices.items():
                    if name in dict(model.named_parameters()):
                        model.get_parameter(name).index_fill_(dim, flags.nonzero().flatten(), 0)
    torch.testing.assert_close(small(x), model(x), rtol=1e-6, atol=1e-9)
    assert report.parameters_compact <= report.parameters


def find_slots_of(model, x):
    result = propagate(model, x)
    return find_slots(result.facts, result.captured.graph)


def test_the_lowest_scores_go(mlp):
    with torch.no_grad():
        mlp[0].weight[3:6] *= 1e-3
        mlp[2].weight[:, 3:6] *= 1e-3
    small, report = prune_structured(mlp, torch.randn(5, 4), {"0": 0.3})
    assert [slot.removed for slot in report.slots] == [(3, 4, 5), ()]
    assert small.get_parameter("0.weight").shape == (7, 4)
    assert small.get_parameter("2.weight").shape == (8, 7)
    assert report.slots[0].tensors == ("0.weight", "0.bias", "2.weight")


def test_scores_by_name_and_by_function(mlp):
    x = torch.randn(5, 4)
    l1, magnitude = (prune_structured(mlp, x, 0.5, score=name)[1].slots for name in ("l1", "magnitude"))
    assert l1 == magnitude
    drawn = [prune_structured(mlp, x, 0.5, score="random")[1].slots for _ in range(2)]
    assert drawn[0] == drawn[1]
    _, report = prune_structured(
        mlp, x, 0.5, score=lambda _, w: torch.arange(w.shape[0])[:, None].expand(w.shape).float()
    )
    assert report.slots[1].removed == (0, 1, 2, 3)
    mlp(x).sum().backward()
    _, report = prune_structured(mlp, x, 0.5, score="taylor")
    assert report.slots[0].after == 5


def test_the_model_is_left_alone_and_the_report_tells(mlp):
    before = {name: tensor.clone() for name, tensor in mlp.state_dict().items()}
    data = [torch.randn(6, 4) for _ in range(3)]
    dims = ({0: torch.export.Dim.DYNAMIC},)
    small, report = prune_structured(mlp, torch.randn(5, 4), 0.5, data=data, dynamic_shapes=dims)
    assert all(torch.equal(tensor, before[name]) for name, tensor in mlp.state_dict().items())
    with torch.no_grad():
        gaps = torch.cat([small(x) - mlp(x) for x in data])
        outputs = torch.cat([mlp(x) for x in data])
    assert report.change == pytest.approx(float(gaps.norm() / outputs.norm()), rel=1e-3)
    assert report.largest == pytest.approx(float(gaps.abs().max()), rel=1e-3)
    assert "3 batches" in str(report)
    assert "10 → 5" in report.table()
    assert json.loads(json.dumps(report.to_dict()))["parameters_compact"] == report.parameters_compact


def test_nothing_pruned_changes_nothing(mlp):
    small, report = prune_structured(mlp, torch.randn(5, 4), 0.0)
    assert report.change == 0
    assert sum(p.numel() for p in small.parameters()) == sum(p.numel() for p in mlp.parameters())


def test_widths_are_multiples(mlp):
    small, _ = prune_structured(mlp, torch.randn(5, 4), 0.5, round_to=4)
    assert small.get_parameter("0.weight").shape[0] == 8
    assert small.get_parameter("2.weight").shape == (4, 8)


def test_an_axis_that_would_be_empty(mlp):
    x = torch.randn(5, 4)
    with pytest.raises(ShapeError, match=r"nothing of '0\.weight'"):
        prune_structured(mlp, x, 1.0)
    small, _ = prune_structured(mlp, x, 1.0, allow_empty=True)
    assert small.get_parameter("2.weight").shape == (1, 1)
    torch.testing.assert_close(small(x), mlp[4].bias.expand(5, 3))


class Coupled(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x):
        return self.out(self.a(x) + self.b(x))


def test_coupled_layers_and_a_contradiction():
    model, x = Coupled(), torch.randn(3, 4)
    small, report = prune_structured(model, x, {"b": 0.5}, granularity="stream")
    assert small.get_parameter("a.weight").shape == (3, 4)
    assert set(report.slots[0].tensors) == {"a.weight", "a.bias", "b.weight", "b.bias", "out.weight"}
    with pytest.raises(ValueRangeError, match="go together"):
        prune_structured(model, x, {"a": 0.5, "b": 0.2}, granularity="stream")


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"sparsity": 1.5}, ValueRangeError, "from 0 to 1"),
        ({"sparsity": True}, ValueRangeError, "from 0 to 1"),
        ({"sparsity": {"0": -1}}, ValueRangeError, "'0' is -1"),
        ({"sparsity": {"7": 0.5}}, NameNotFoundError, "'7'"),
        ({"sparsity": 0.5, "score": "l3"}, NameNotFoundError, "unknown score"),
        ({"sparsity": 0.5, "granularity": "chanel"}, NameNotFoundError, "did you mean 'channel'"),
        ({"sparsity": 0.5, "score": "taylor"}, ValueRangeError, "backward"),
        ({"sparsity": 0.5, "score": lambda _, w: w.sum(0)}, ShapeError, "score of"),
        ({"sparsity": 0.5, "round_to": 0}, ValueRangeError, "round_to"),
    ],
)
def test_wrong_options_are_named(mlp, options, error, text):
    with pytest.raises(error, match=text):
        prune_structured(mlp, torch.randn(2, 4), **options)


def test_a_normed_weight_loses_rows_without_dividing_by_zero():
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 6))
    model, x = nn.Sequential(layer, nn.Tanh(), nn.Linear(6, 2)), torch.randn(3, 4)
    small, report = prune_structured(model, x, 0.5)
    assert report.slots[0].after == 3
    assert small(x).isfinite().all()
    assert small.get_parameter("2.weight").shape == (2, 3)
