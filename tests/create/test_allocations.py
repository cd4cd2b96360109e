"""Every kind of pruning takes every allocation, and the sparsity of the network is what was asked for."""

import pytest
import torch
from torch import nn

import sparta
from sparta.create.modifiers.fisher import BlockFisher
from sparta.errors import NameNotFoundError, SpartaError, ValueRangeError
from sparta.sparsify import erk_densities

KINDS = ("magnitude", "movement", "obs", "mfac", "acdc", "rigl", "topkast", "structured")
ALLOCATIONS = ("uniform", "global", "erk", "lamp", "sensitivity")
SHAPES = [(32, 16), (24, 32), (4, 24)]
TOTAL = sum(a * b for a, b in SHAPES)


def started(kind, allocation, *, sparsity=0.75, source=True, **more):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 4))
    with torch.no_grad():
        model[2].weight.mul_(3)  # so that a single threshold differs from an even spread
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = [(torch.randn(8, 16), torch.randint(0, 4, (8,))) for _ in range(4)]
    variables = {"num_epochs": 2, "sparsity": sparsity, **({} if allocation is None else {"allocation": allocation})}
    manager, optimizer = sparta.create.initialize(
        model, optimizer, 4, pruning=kind, quantization=False, recipe_variables=variables,
        data=data if source else None, **more,
    )  # fmt: skip
    return model, optimizer, data, manager


def train(model, optimizer, data, steps):
    for step in range(steps):
        inputs, labels = data[step % len(data)]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()


def trained(kind, allocation, **more):
    model, optimizer, data, manager = started(kind, allocation, **more)
    train(model, optimizer, data, 8)
    manager.finalize()
    manager.spec().check(model)
    return pruned(manager)


def pruned(manager):
    """Return the sparsity of each layer's mask: what RigL grows is zero at first, and may still be."""
    return [manager.spec()[f"{place}.weight"].sparsity for place in (0, 2, 4)]


def overall(zeros):
    return sum(share * a * b for share, (a, b) in zip(zeros, SHAPES, strict=True)) / TOTAL


@pytest.mark.parametrize("allocation", ALLOCATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_takes_each_allocation(kind, allocation):
    if (kind, allocation) == ("movement", "lamp"):
        with pytest.raises(SpartaError, match="negative"):
            started(kind, allocation)
        return
    zeros = trained(kind, allocation)
    assert overall(zeros) == pytest.approx(0.75, abs=0.04 if kind == "structured" else 2 / TOTAL)
    if allocation == "uniform":
        assert zeros == pytest.approx([0.75] * 3, abs=0.01)
    else:
        assert max(zeros) - min(zeros) > 0.02
    if allocation == "erk" and kind != "structured":
        assert zeros == pytest.approx([1 - density for density in erk_densities(SHAPES, 0.75)], abs=0.01)


@pytest.mark.parametrize("kind", ["movement", "topkast", "rigl"])
def test_small_layers_stay_denser_where_all_would_be_pruned_alike(kind):
    assert trained(kind, None) == trained(kind, "erk")


def test_magnitude_ranks_all_layers_together_whatever_the_size_of_their_weights():
    assert trained("magnitude", None) == trained("magnitude", "lamp")

    def densities(scale, **variables):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
        with torch.no_grad():
            model[1].weight.mul_(scale)
        made = sparta.create.recipe_for(quantization=False, variables={"sparsity": 0.9, **variables})
        run = sparta.create.Run(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return made.modifiers()[-1].preview(run)

    assert densities(0.125) == densities(1.0)
    assert densities(0.125, global_sparsity=True) == densities(0.125, allocation="global") != densities(1.0)


@pytest.mark.parametrize("kind", ["magnitude", "obs", "mfac", "topkast"])
def test_one_threshold_leaves_each_layer_half_of_the_density_of_all(kind):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))
    with torch.no_grad():
        model[1].weight.mul_(1e-3)  # a threshold alone would leave nothing of it
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = [(torch.randn(8, 32), torch.randint(0, 4, (8,)))]
    variables = {"num_epochs": 2, "sparsity": 0.9, "allocation": "global"}
    manager, _ = sparta.create.initialize(
        model, optimizer, 4, pruning=kind, quantization=False, recipe_variables=variables, data=data
    )
    train(model, optimizer, data, 8)
    densities = [tesa.density for _, tesa in manager.spec().items()]
    assert sum(densities) / 3 == pytest.approx(0.1, abs=1e-3)
    assert min(densities) == pytest.approx(0.05, abs=1e-3)


def test_acdc_does_not_starve_small_layers_by_itself():
    assert trained("acdc", None) == trained("acdc", "erk")
    stem = torch.nn.Conv2d(1, 16, 3)  # by far the smallest layer, with the smallest weights
    model = nn.Sequential(stem, nn.Conv2d(16, 32, 3), nn.Flatten(), nn.Linear(32, 10))
    with torch.no_grad():
        stem.weight.mul_(0.1)

    def density(variables):
        made = sparta.create.recipe_for("acdc", quantization=False, variables={"sparsity": 0.95, **variables})
        run = sparta.create.Run(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return 1 - made.modifiers()[-1].preview(run)["0.weight"]

    assert density({}) > 0.3
    assert density({"global_sparsity": True}) < 0.05


def test_measured_sensitivities_are_part_of_the_state():
    whole = trained("magnitude", "sensitivity")
    model, optimizer, data, manager = started("magnitude", "sensitivity")
    train(model, optimizer, data, 4)
    states = [thing.state_dict() for thing in (model, optimizer, manager)]
    model, optimizer, data, manager = started("magnitude", "sensitivity")
    for thing, state in zip((model, optimizer, manager), states, strict=True):
        thing.load_state_dict(state)
    train(model, optimizer, data, 4)
    manager.finalize()
    assert pruned(manager) == whole


def test_the_recipe_says_so_and_reads_back():
    recipe = sparta.create.recipe_for("movement", quantization=False, variables={"allocation": "erk"})
    assert "allocation: erk" in recipe.to_yaml()
    again = sparta.create.Recipe.from_yaml(recipe.to_yaml())
    assert again.modifiers()[-1].allocation == "erk"
    assert again.override({"allocation": "global"}).modifiers()[-1].spread_by == "global"


def test_what_is_refused():
    with pytest.raises(NameNotFoundError, match="uniform"):
        started("magnitude", "unifrom")
    with pytest.raises(ValueRangeError, match="one of them"):
        sparta.create.RecipeVariables(allocation="erk", global_sparsity=True)
    with pytest.raises(ValueRangeError, match="leave allocation out"):
        sparta.create.RecipeVariables(allocation="erk", mask_type="2:4")
    with pytest.raises(ValueRangeError, match="loss_closure"):
        started("magnitude", "sensitivity", source=False)
    with pytest.raises(SpartaError, match="one of them"):
        sparta.create.modifier_named("ACDCPruning")(
            compression_sparsity=0.5, end_epoch=2, update_frequency=1, global_sparsity=True, allocation="lamp"
        )
    with pytest.warns(UserWarning, match="allocation has no effect"):
        sparta.create.recipe_for("constant", variables={"allocation": "erk"})


def test_rounding_makes_no_saliency_negative():
    torch.manual_seed(0)
    weight = torch.randn(50)
    fisher = BlockFisher(weight, damp=1e-7, block=50)
    directions = 30 * torch.randn(3, 50)
    for step in range(200):
        fisher.add(directions[step % 3] * (1 + step / 100))
    assert fisher.saliency(weight).min() > 0
