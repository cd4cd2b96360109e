"""Methods are compared over sparsities and seeds with a training loop of the user's own."""

import json

import pytest
import torch
from torch import nn

import sparta
from sparta.errors import ArgumentError, FileFormatError, NameNotFoundError, SpartaError, ValueRangeError

torch.manual_seed(0)
INPUTS = torch.randn(64, 8)
GOALS = INPUTS @ torch.randn(8, 2)
CALLS = []


def train(start, seed, **more):
    CALLS.append(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    manager, _ = start(model, optimizer, 4, lr=None, recipe_variables={"num_epochs": 4}, **more)
    for _ in range(4 * manager.max_epochs):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(INPUTS), GOALS).backward()
        optimizer.step()
    return model


def evaluate(model):
    with torch.no_grad():
        return -nn.functional.mse_loss(model(INPUTS), GOALS)


def test_a_row_per_method_and_sparsity():
    before = torch.get_rng_state()
    result = sparta.compare(["magnitude", "rigl"], [0.5, 0.75], train, evaluate, seeds=2)
    assert [(one.method, one.asked) for one in result] == [
        ("dense", 0.0), ("magnitude", 0.5), ("magnitude", 0.75), ("rigl", 0.5), ("rigl", 0.75),
    ]  # fmt: skip
    for one in result:
        assert one.sparsity == pytest.approx(one.asked, abs=0.01)
        assert len(one.scores) == 2
        assert one.scores[0] != one.scores[1]
        assert one.mean == pytest.approx(sum(one.scores) / 2)
    assert torch.equal(before, torch.get_rng_state())
    assert "rigl" in str(result)
    json.dumps(result.to_dict())


def test_equal_seeds_give_equal_scores():
    results = [sparta.compare(["magnitude"], [0.5], train, evaluate, seeds=[3]) for _ in range(2)]
    assert results[0].to_dict() == results[1].to_dict()


def test_methods_have_names_and_arguments_of_their_own():
    recipe = sparta.create.recipe_for(quantization=False, lr=None, variables={"num_epochs": 4})
    methods = {
        "blocks": {"pruning": "magnitude", "recipe_variables": {"mask_type": "2x1"}},
        "by recipe": {"recipe": recipe},
    }
    result = sparta.compare(methods, [0.5], train, evaluate, seeds=1, dense=False)
    assert [(one.method, round(one.sparsity, 2)) for one in result] == [("blocks", 0.5), ("by recipe", 0.5)]


def test_what_refuses_has_its_reason_in_the_table_and_the_others_run():
    result = sparta.compare({"magnitude": "magnitude", "2:4 below": {"recipe_variables": {"mask_type": "2:4"}}},
                            [0.25], train, evaluate, seeds=1)  # fmt: skip
    assert [bool(one.scores) for one in result] == [True, True, False]
    assert "leave sparsity out" in str(result)
    with pytest.raises(SpartaError, match="leave sparsity out"):
        sparta.compare({"2:4": {"recipe_variables": {"mask_type": "2:4"}}}, [0.25], train, evaluate, seeds=1)


def test_a_killed_comparison_goes_on(tmp_path):
    path = tmp_path / "comparison.json"
    CALLS.clear()

    def killed(model):
        if len(CALLS) == 3:
            raise KeyboardInterrupt
        return evaluate(model)

    with pytest.raises(KeyboardInterrupt):
        sparta.compare(["magnitude"], [0.5], train, killed, seeds=2, checkpoint=path)
    resumed = sparta.compare(["magnitude"], [0.5], train, evaluate, seeds=2, checkpoint=path)
    assert len(CALLS) == 5  # three before, of which two count, and two more
    assert resumed.to_dict() == sparta.compare(["magnitude"], [0.5], train, evaluate, seeds=2).to_dict()
    path.write_text("[]")
    with pytest.raises(FileFormatError, match="no comparison"):
        sparta.compare(["magnitude"], [0.5], train, evaluate, checkpoint=path)


def test_progress_gets_a_step_per_row():
    steps = []
    sparta.compare(["magnitude"], [0.5], train, evaluate, seeds=1, progress=steps.append)
    assert [step.name for step in steps] == ["dense at 0", "magnitude at 0.5"]


def test_what_is_refused():
    with pytest.raises(NameNotFoundError, match="magnitude"):
        sparta.compare(["magnitud"], [0.5], train, evaluate)
    with pytest.raises(ArgumentError, match="sparsities"):
        sparta.compare(["magnitude"], 0.5, train, evaluate)
    with pytest.raises(ValueRangeError, match="seeds"):
        sparta.compare(["magnitude"], [0.5], train, evaluate, seeds=0)
    with pytest.raises(ValueRangeError, match="another name"):
        sparta.compare({"dense": "magnitude"}, [0.5], train, evaluate)
    with pytest.raises(ArgumentError, match="0 times"):
        sparta.compare(["magnitude"], [0.5], lambda _start, _seed: nn.Linear(2, 2), evaluate, seeds=1)
    with pytest.raises(ArgumentError, match="returned a str"):
        sparta.compare(["magnitude"], [0.5], train, lambda _model: "good", seeds=1)
