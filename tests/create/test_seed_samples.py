"""The samples of the document that this package follows, word for word but for the name of the package."""

import inspect
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

import sparta.create
from create.models import CNN, MODELS, loss_of, prunable, take_steps
from sparta.create import RecipeVariables, initialize
from sparta.errors import NameNotFoundError, SpartaError

FIRST = """
import sparta as sparsify

# initialize sparsify.create
sparsification_manager, OPTIMIZER = sparsify.create.initialize(
    MODEL, OPTIMIZER, STEPS_PER_EPOCH
)

# if the script has an end epoch, update it from the manager
END_EPOCH = sparsification_manager.max_epochs
"""

SCALED = """
import sparta as sparsify

# initialize sparsify.create and override the SCALER
sparsification_manager, SCALER = sparsify.create.initialize(
    MODEL, OPTIMIZER, STEPS_PER_EPOCH, scaler=SCALER
)
"""

QUANTIZATION_START = """
if sparsification_manager.quantization_modifiers:
    quantization_start_epoch = min(
        modifier.start_epoch
        for modifier in sparsification_manager.quantization_modifiers
    )
"""

TEACHER = """
import sparta as sparsify

# initialize sparsify.create and override the SCALER
sparsification_manager, OPTIMIZER = sparsify.create.initialize(
    MODEL,
    OPTIMIZER,
    STEPS_PER_EPOCH,
    distillation=True,
    distillation_teacher=DISTILLATION_TEACHER,
)
"""

TRANSFER = """
import sparta as sparsify

sparsification_manager, OPTIMIZER = sparsify.create.initialize(
    MODEL, OPTIMIZER, STEPS_PER_EPOCH, pruning="constant"
)
"""


def script(model, **more):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return {"MODEL": model, "OPTIMIZER": optimizer, "STEPS_PER_EPOCH": 2, **more}


def run(text, names):
    exec(compile(textwrap.dedent(text), "sample", "exec"), names)  # noqa: S102 - the samples above
    return names


def train(names, step=None):
    """The loop of the script, as it was."""
    model, optimizer = names["MODEL"], names["OPTIMIZER"]
    for epoch in range(names["sparsification_manager"].max_epochs):
        for batch in range(names["STEPS_PER_EPOCH"]):
            optimizer.zero_grad()
            loss = loss_of(model, 2 * epoch + batch)
            if step is None:
                loss.backward()
                optimizer.step()
            else:
                step(loss, optimizer)


def measured(model):
    """Share of zeros in the weights the manager may prune, whatever quantization has made of the modules."""
    weights = [p for n, p in model.named_parameters() if p.dim() > 1 and "embedding" not in n]
    return sum(int((w == 0).sum()) for w in weights) / sum(w.numel() for w in weights)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_the_first_sample(model):
    names = run(FIRST, script(model()))
    manager = names["sparsification_manager"]
    assert names["END_EPOCH"] == 20
    assert isinstance(names["OPTIMIZER"], torch.optim.Optimizer)
    assert [len(kind) for kind in (manager.pruning_modifiers, manager.quantization_modifiers)] == [1, 1]
    assert not manager.distillation_modifiers
    assert measured(names["MODEL"]) < 0.01
    train(names)
    take_steps(names["MODEL"], names["OPTIMIZER"], 1)  # the extra step that the original needed does no harm
    assert measured(names["MODEL"]) == pytest.approx(0.8, abs=0.01)
    manager.finalize()
    assert manager.spec().density == pytest.approx(0.2, abs=0.15)


def test_the_sample_with_a_scaler():
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    names = run(SCALED, script(CNN(), SCALER=scaler))
    assert names["SCALER"] is scaler

    def step(loss, optimizer):
        names["SCALER"].scale(loss).backward()
        names["SCALER"].step(optimizer)
        names["SCALER"].update()

    train(names, step)
    assert measured(names["MODEL"]) == pytest.approx(0.8, abs=0.01)


def test_the_epoch_at_which_quantization_starts():
    names = run(QUANTIZATION_START, run(FIRST, script(CNN())))
    assert names["quantization_start_epoch"] == 15.0
    names = script(CNN())
    manager, _ = initialize(names["MODEL"], names["OPTIMIZER"], 2, quantization=False)
    assert not manager.quantization_modifiers


@pytest.mark.parametrize("teacher", [True, False])
def test_the_sample_with_a_teacher_and_without(teacher):
    torch.manual_seed(1)
    given = CNN(seed=1) if teacher else None
    names = run(TEACHER, script(CNN(), DISTILLATION_TEACHER=given))
    assert len(names["sparsification_manager"].distillation_modifiers) == 1
    plain = run(FIRST, script(CNN()))
    for one in (names, plain):
        take_steps(one["MODEL"], one["OPTIMIZER"], 6)
    different = [
        not torch.equal(a, b) for a, b in zip(names["MODEL"].parameters(), plain["MODEL"].parameters(), strict=False)
    ]
    assert any(different)
    if teacher:
        assert all(parameter.grad is None for parameter in given.parameters())


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_the_sample_of_sparse_transfer(model):
    names = script(model())
    with torch.no_grad():
        for weight in prunable(names["MODEL"]).values():
            weight.masked_fill_(torch.rand_like(weight) < 0.7, 0)
    before = [weight == 0 for weight in prunable(names["MODEL"]).values()]
    run(TRANSFER, names)
    train(names)
    after = [p == 0 for n, p in names["MODEL"].named_parameters() if p.dim() > 1 and "embedding" not in n]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_transfer_has_three_names():
    recipes = set()
    for name in ("transfer", "sparse-transfer", "constant"):
        names = script(CNN())
        manager, _ = initialize(names["MODEL"], names["OPTIMIZER"], 2, pruning=name)
        recipes.add(str(manager))
    assert len(recipes) == 1


def test_variables_as_a_schema_or_a_dictionary_are_the_same():
    recipes = set()
    for variables in (RecipeVariables(sparsity=0.9, num_epochs=10), {"sparsity": 0.9, "num_epochs": 10}):
        names = script(CNN())
        manager, _ = initialize(names["MODEL"], names["OPTIMIZER"], 2, recipe_variables=variables)
        recipes.add(str(manager))
        assert manager.max_epochs == 10
    assert len(recipes) == 1
    with pytest.raises(NameNotFoundError, match="did you mean 'sparsity'"):
        initialize(CNN(), script(CNN())["OPTIMIZER"], 2, recipe_variables={"sparsty": 0.9})


@pytest.mark.parametrize("wanted", [0.5, 0.9])
@pytest.mark.parametrize("together", [True, False])
def test_the_sparsity_that_is_asked_for_is_the_one_that_comes(wanted, together):
    names = script(CNN())
    variables = {"sparsity": wanted, "num_epochs": 2, "global_sparsity": together}
    names["sparsification_manager"], _ = initialize(
        names["MODEL"], names["OPTIMIZER"], 2, quantization=False, recipe_variables=variables
    )
    train(names)
    assert measured(names["MODEL"]) == pytest.approx(wanted, abs=0.01)


@pytest.mark.parametrize(
    ("kind", "middle"), [("linear", 0.5005), ("cosine", 0.5005), ("constant", 1.0), ("exponential", 0.0316)]
)
def test_the_kind_of_learning_rate_and_its_ends_are_chosen(kind, middle):
    names = script(CNN())
    variables = {"num_epochs": 4, "init_lr": 1.0} | ({} if kind == "constant" else {"final_lr": 1e-3})
    initialize(names["MODEL"], names["OPTIMIZER"], 2, lr=kind, quantization=False, recipe_variables=variables)
    rates = []
    for step in range(5):
        take_steps(names["MODEL"], names["OPTIMIZER"], 1, step)
        rates.append(names["OPTIMIZER"].param_groups[0]["lr"])
    assert rates[0] == pytest.approx(1.0)
    assert rates[4] == pytest.approx(middle, rel=1e-2)


def test_every_argument_and_every_variable_is_documented():
    text = inspect.getdoc(initialize)
    assert all(name in text for name in inspect.signature(initialize).parameters)
    assert all(field.description for field in RecipeVariables.model_fields.values())


BAD = {
    "pruning": ({"pruning": "magnitud"}, "did you mean 'magnitude'"),
    "lr": ({"lr": "line"}, "linear"),
    "quantization": ({"quantization": "maybe"}, "True or False"),
    "teacher": ({"distillation": True, "distillation_teacher": "zoo:bert"}, "load the teacher"),
    "obs": ({"pruning": "obs", "quantization": False}, "loss_closure="),
    "name": ({"ignore": "fc7.weight"}, "did you mean"),
    "epoch": ({"epoch": -1.0}, "0 or more"),
    "logger": ({"loggers": [3]}, "a callable"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_refused_before_the_first_step_with_the_fix(case):
    options, text = BAD[case]
    names = script(CNN())
    with pytest.raises(SpartaError, match=text):
        initialize(names["MODEL"], names["OPTIMIZER"], 2, **options)
    assert not names["OPTIMIZER"]._optimizer_step_post_hooks


def test_a_teacher_that_no_one_asks_is_warned_of():
    names = script(CNN())
    with pytest.warns(UserWarning, match="pass distillation=True"):
        initialize(names["MODEL"], names["OPTIMIZER"], 2, distillation_teacher=nn.Identity())


def test_ones_own_recipe_with_values_for_its_variables(tmp_path):
    text = """
    version: 1
    variables: {num_epochs: 4, final: 0.5}
    modifiers:
      - EpochRange: {end_epoch: "${num_epochs}"}
      - MagnitudePruning: {end_epoch: "${num_epochs / 2}", final_sparsity: "${final}"}
    """
    path = tmp_path / "recipe.yaml"
    path.write_text(textwrap.dedent(text))
    for recipe in (textwrap.dedent(text), path, sparta.create.Recipe.load(path)):
        names = script(CNN())
        manager, _ = initialize(
            names["MODEL"], names["OPTIMIZER"], 2, recipe=recipe, recipe_variables={"final": 0.75, "num_epochs": 2}
        )
        take_steps(names["MODEL"], names["OPTIMIZER"], 4)
        assert manager.max_epochs == 2
        assert measured(names["MODEL"]) == pytest.approx(0.75, abs=0.01)
    manager.save(tmp_path / "saved.yaml")
    assert "num_epochs" in (tmp_path / "saved.yaml").read_text()
    with pytest.raises(SpartaError, match="add Distillation"):
        initialize(names["MODEL"], names["OPTIMIZER"], 2, recipe=path, distillation=True)


def test_the_package_is_reached_without_another_import_and_loads_no_optional_package():
    code = (
        "import sys, sparta as sparsify; print(sparsify.create.initialize.__name__); "
        "import sparta.create.integrations.transformers, sparta.create.integrations.lightning; "
        "print(sorted({'transformers', 'lightning', 'accelerate', 'matplotlib'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert result.stdout.split() == ["initialize", "[]"], result.stderr
