"""Every kind of pruning works at the defaults of `initialize`, on a CNN and a transformer, or is refused there."""

import pytest
import torch

from create.models import MODELS, loss_of, sparsity, take_steps
from sparta.create import initialize
from sparta.errors import ValueRangeError

STEPS = 2
KINDS = {
    True: 0.8,
    "magnitude": 0.8,
    "gmp": 0.8,
    "acdc": 0.8,
    "movement": 0.8,
    "obs": 0.8,
    "mfac": 0.8,
    "structured": None,
    "rigl": 0.8,
    "topkast": 0.8,
    "constant": 0.0,
    False: 0.0,
    None: 0.0,
}


CASES = [*((kind, True) for kind in KINDS), (True, False), ("acdc", False), (False, False)]


@pytest.mark.parametrize(("kind", "quantization"), CASES, ids=str)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_kind_works_at_the_defaults(model, kind, quantization):
    model = model()
    optimizer = torch.optim.Adam(model.parameters())
    fresh = iter(range(10**6, 10**7))
    options = {"loss_closure": lambda: loss_of(model, next(fresh))} if kind == "obs" else {}
    manager, _ = initialize(model, optimizer, STEPS, pruning=kind, quantization=quantization, **options)
    for entry in manager.pruning_modifiers:
        if kind in {"obs", "mfac"}:
            entry.num_grads = 4  # a tiny model needs no more
    assert manager.max_epochs == 20
    take_steps(model, optimizer, manager.max_epochs * STEPS)
    manager.finalize()
    wanted = KINDS[kind]
    if wanted is None:
        assert 0.6 < sparsity(model) < 0.9, "whole channels of small layers cannot be exact"
    else:
        assert sparsity(model) == pytest.approx(wanted, abs=0.011)
    loss_of(model).backward()


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_obs_without_a_source_of_gradients_is_refused_with_the_fix(model):
    model = model()
    with pytest.raises(ValueRangeError, match="pass loss_closure="):
        initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), STEPS, pruning="obs")


def test_obs_takes_data():
    model = MODELS["cnn"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [model.batch(step) for step in range(3)]
    variables = {"num_epochs": 2}
    manager, _ = initialize(
        model, optimizer, STEPS, pruning="obs", quantization=False, data=data, recipe_variables=variables
    )
    manager.pruning_modifiers[0].num_grads = 5
    take_steps(model, optimizer, 2 * STEPS)
    assert sparsity(model) == pytest.approx(0.8, abs=0.01)
