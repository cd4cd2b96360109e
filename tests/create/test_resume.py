"""N and M steps are N steps, a save, a new process, a load, and M steps, to the last bit, in the middle of pruning."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from create import resume
from create.models import CNN, sparsity, take_steps
from sparta.create import Manager, initialize, modifier_named
from sparta.errors import ValueRangeError

PAIRS = [
    *(f"cnn:{kind}" for kind in ("magnitude", "acdc", "movement", "mfac", "structured", "rigl", "topkast", "constant")),
    "transformer:magnitude",
    "transformer:movement",
]
TESTS = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    """Save half-way in one new process, go on in another, and return where it all ended."""
    folder = tmp_path_factory.mktemp("resume")
    for mode in ("save", "load"):
        command = [sys.executable, resume.__file__, mode, str(folder), *PAIRS]
        paths = [str(TESTS), str(TESTS.parent / "src"), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environment)
        assert result.returncode == 0, result.stderr
    return folder


@pytest.mark.parametrize("pair", PAIRS)
def test_a_run_resumed_in_a_new_process_is_the_same_run(pair, ends):
    name, kind = pair.split(":")
    model, optimizer, manager = resume.begin(name, kind)
    take_steps(model, optimizer, 6)
    density = manager.spec().density
    take_steps(model, optimizer, 10, first=6)
    manager.finalize()
    if kind in {"magnitude", "movement", "mfac"}:
        assert density > manager.spec().density + 0.01, "half-way is in the middle of pruning"
    resumed = torch.load(ends / f"{name}-{kind}.end.pt", weights_only=True)
    for key, value in model.state_dict().items():
        assert torch.equal(value, resumed[key]), key


def entries():
    return [
        modifier_named("MagnitudePruning")(final_sparsity=0.8, start_epoch=0, end_epoch=2),
        modifier_named("ConstantPruning")(start_epoch=2),
    ]


def test_masks_come_back_exactly_and_packed():
    model = CNN()
    manager = Manager(entries())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager.attach(model, optimizer, 4)
    take_steps(model, optimizer, 10)
    state = manager.state_dict()
    masks = state["modifiers"]["0.MagnitudePruning"]["own"]["masks"]["masks"]
    assert masks["conv1.weight"].dtype == torch.uint8
    assert masks["conv1.weight"].numel() == -(-model.conv1.weight.numel() // 8)
    twin = CNN()
    twin.load_state_dict(model.state_dict())
    again = Manager(entries())
    again.attach(twin, torch.optim.SGD(twin.parameters(), lr=0.1), 4)
    again.load_state_dict(state)
    assert again.spec() == manager.spec()
    assert (again.epoch, again.step) == (manager.epoch, manager.step)


def test_the_order_of_loading_does_not_matter():
    ends_ = []
    for order in ("manager first", "manager last"):
        model, optimizer, manager = resume.begin("cnn", "magnitude")
        take_steps(model, optimizer, 6)
        states = manager.state_dict(), model.state_dict(), optimizer.state_dict()
        model, optimizer, manager = resume.begin("cnn", "magnitude")
        pairs = list(zip((manager, model, optimizer), states, strict=True))
        for one, state in pairs if order == "manager first" else pairs[::-1]:
            one.load_state_dict(state)
        take_steps(model, optimizer, 6, first=6)
        ends_.append(model.state_dict())
    assert all(torch.equal(ends_[0][key], ends_[1][key]) for key in ends_[0])


STAGES = """
version: 1
stages:
  first:
    modifiers:
      - MagnitudePruning: {start_epoch: 0.0, end_epoch: 2.0, final_sparsity: 0.5}
  second:
    after: first
    modifiers:
      - MagnitudePruning: {start_epoch: 0.0, end_epoch: 2.0, init_sparsity: 0.5, final_sparsity: 0.8}
"""


def test_a_recipe_in_stages_saves_and_loads_its_state():
    model = CNN()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager, _ = initialize(model, optimizer, 4, recipe=STAGES)
    assert manager.max_epochs == 4
    take_steps(model, optimizer, 10)
    state = manager.state_dict()
    assert list(state["modifiers"]) == ["0.MagnitudePruning", "1.MagnitudePruning"]
    twin = CNN()
    twin.load_state_dict(model.state_dict())
    twin_optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    twin_optimizer.load_state_dict(optimizer.state_dict())
    again, _ = initialize(twin, twin_optimizer, 4, recipe=STAGES)
    again.load_state_dict(state)
    assert again.spec() == manager.spec()
    take_steps(model, optimizer, 6, first=10)
    take_steps(twin, twin_optimizer, 6, first=10)
    assert sparsity(twin) == pytest.approx(0.8, abs=0.01)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_modifiers_that_change_modules_and_values_come_back_as_they_were():
    def begin():
        model = CNN()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        manager = Manager(
            [
                modifier_named("LayerPruning")(layers=["conv2"], start_epoch=1, end_epoch=3),
                modifier_named("TrainableParams")(params=["fc2.weight"], trainable=False, start_epoch=1, end_epoch=3),
                modifier_named("SetLearningRate")(learning_rate=0.02, start_epoch=2),
                modifier_named("GradualParam")(params="fc1.bias", init_val=0, final_val=1, end_epoch=4),
            ]
        )
        manager.attach(model, optimizer, 4)
        return model, optimizer, manager

    whole, optimizer, manager = begin()
    take_steps(whole, optimizer, 7)
    assert not hasattr(whole.conv2, "weight")
    states = copy.deepcopy((manager.state_dict(), whole.state_dict(), optimizer.state_dict()))
    resumed = begin()
    parts = (resumed[2], resumed[0], resumed[1])  # the manager first: it takes the layer out
    for part, state in zip(parts, states, strict=True):
        part.load_state_dict(state)
    assert not resumed[0].fc2.weight.requires_grad
    take_steps(whole, optimizer, 9, first=7)
    take_steps(resumed[0], resumed[1], 9, first=7)
    assert resumed[0].fc2.weight.requires_grad
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed[0].parameters(), strict=True))


def test_another_number_of_steps_keeps_the_epoch():
    model, optimizer, manager = resume.begin("cnn", "magnitude")
    take_steps(model, optimizer, 6)
    twin = CNN()
    again = Manager([type(entry)(**entry.fields()) for entry in manager.modifiers])
    again.attach(twin, torch.optim.AdamW(twin.parameters()), 8)
    again.load_state_dict(manager.state_dict())
    assert (again.epoch, again.step) == (1.5, 12)


def test_states_that_do_not_fit_are_refused():
    model, optimizer, manager = resume.begin("cnn", "magnitude")
    state = manager.state_dict()
    other = Manager(entries())
    with pytest.raises(ValueRangeError, match="call attach first"):
        other.state_dict()
    other.attach(model, optimizer, 4)
    with pytest.raises(ValueRangeError, match="the state and the recipe differ"):
        other.load_state_dict(state)
    with pytest.raises(ValueRangeError, match="a state of version 99"):
        manager.load_state_dict({**state, "version": 99})
    with pytest.raises(ValueRangeError, match="without"):
        manager.load_state_dict({**state, "modifiers": {key: {} for key in state["modifiers"]}})
    for key, text in (("0.EpochRange", "EpochRange, which has none"), ("2.GlobalMagnitudePruning", "without 'masks'")):
        bad = {**state["modifiers"], key: {**state["modifiers"][key], "own": {"x": 1}}}
        with pytest.raises(ValueRangeError, match=text):
            manager.load_state_dict({**state, "modifiers": bad})
