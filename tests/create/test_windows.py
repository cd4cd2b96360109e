"""Windows and the life cycle of modifiers: when they begin, update and end, and what their fields say."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import SGD

from create.models import CNN
from sparta.create import Manager, Modifier, Run, modifier, modifier_named, modifier_names
from sparta.errors import NameNotFoundError, ValueRangeError


class Recorder(Modifier):
    """Notes when it is updated."""

    def update(self, run):
        moment = "start" if self.start_pending(run.epoch) else "end" if self.end_pending(run.epoch) else "update"
        NOTES.append((run.epoch, moment))


NOTES = []


def walk(entry, epochs):
    """Fire at each epoch, as a manager would, and return the notes."""
    NOTES.clear()
    model = CNN()
    run = Run(model, SGD(model.parameters(), lr=0.1))
    entry.call_initialize(run)
    for epoch in epochs:
        run.epoch = epoch
        entry.update_if_due(run)
    return list(NOTES)


QUARTERS = [step / 4 for step in range(17)]


def test_a_window_starts_updates_at_its_frequency_and_ends():
    notes = walk(Recorder(start_epoch=1, end_epoch=3, update_frequency=1), QUARTERS)
    assert notes == [(1.0, "start"), (2.0, "update"), (3.0, "end")]


def test_minus_one_means_at_once_never_and_every_step():
    notes = walk(Recorder(), QUARTERS)
    assert notes == [(0.0, "start"), *((epoch, "update") for epoch in QUARTERS[1:])]


def test_a_window_of_no_length_starts_and_ends_at_one_moment():
    assert walk(Recorder(start_epoch=1, end_epoch=1), QUARTERS) == [(1.0, "start"), (1.0, "end")]


def test_a_window_that_was_jumped_over_starts_and_ends_once():
    assert walk(Recorder(start_epoch=1, end_epoch=2), [0.0, 5.0, 6.0]) == [(5.0, "start"), (5.0, "end")]


def test_pending_and_active_before_inside_and_after():
    entry = Recorder(start_epoch=1, end_epoch=2)
    assert [entry.start_pending(e) for e in (0.5, 1, 3)] == [False, True, True]
    assert not entry.end_pending(3), "what has not begun cannot end"
    assert [entry.active(e) for e in (0.5, 1, 1.5, 2, 3)] == [False, True, True, False, False]
    assert Recorder().active(100)


@given(
    steps_per_epoch=st.integers(1, 13),
    frequency=st.floats(0.05, 3),
    start=st.integers(0, 3),
)
def test_fractional_frequencies_never_drift(steps_per_epoch, frequency, start):
    """The n-th update is the first step at or after its due time, however the frequency falls between steps."""
    epochs = [step / steps_per_epoch for step in range(8 * steps_per_epoch)]
    entry = Recorder(start_epoch=start, update_frequency=frequency)
    fired = [epoch for epoch, _ in walk(entry, epochs)]
    due = [start + count * frequency for count in range(200)]
    firsts = (next((epoch for epoch in epochs if epoch >= moment - 1e-6), None) for moment in due)
    assert fired == sorted({epoch for epoch in firsts if epoch is not None})


def test_updating_before_initializing_is_an_error():
    model = CNN()
    with pytest.raises(ValueRangeError, match="before it was initialized"):
        Recorder().update_if_due(Run(model, SGD(model.parameters(), lr=0.1)))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"start_epoch": 3, "end_epoch": 2}, "starts at epoch 3"),
        ({"start_epoch": -2}, "0 or more, or -1"),
        ({"update_frequency": 0}, "above 0, or -1"),
        ({"start_epoch": math.inf}, "finite number"),
        ({"start_epoch": "soon"}, "start_epoch of Recorder is 'soon'"),
    ],
)
def test_bad_windows_are_refused(fields, text):
    with pytest.raises(ValueRangeError, match=text):
        Recorder(**fields)


def test_a_field_that_is_no_field_gets_the_nearest_one():
    with pytest.raises(NameNotFoundError, match="did you mean 'start_epoch'"):
        Recorder(start_epochs=1)
    entry = Recorder()
    with pytest.raises(ValueRangeError, match="end_epoch of Recorder"):
        entry.end_epoch = "late"


def test_shifting_moves_moments_and_leaves_never_alone():
    assert Recorder(start_epoch=1, end_epoch=2).shifted(10).epochs() == (11.0, 12.0)
    assert Recorder().shifted(10).epochs() == (10.0, -1.0)


SAMPLES = {
    "ACDCPruning": {"compression_sparsity": 0.8, "end_epoch": 4, "update_frequency": 1},
    "ConstantPruning": {},
    "EpochRange": {"end_epoch": 3},
    "GMPruning": {"final_sparsity": 0.5, "end_epoch": 3},
    "GlobalMagnitudePruning": {"final_sparsity": 0.5, "end_epoch": 3, "layer_floor": 0.1},
    "GradualParam": {"params": ["fc1.bias"], "init_val": 0, "final_val": 1, "end_epoch": 2},
    "LayerPruning": {"layers": ["conv2"], "start_epoch": 1},
    "LearningRate": {"lr_class": "StepLR", "lr_kwargs": {"step_size": 1}, "init_lr": 0.1},
    "LearningRateFunction": {"lr_func": "cosine", "init_lr": 0.1, "final_lr": 0.0, "end_epoch": 2},
    "MFACPruning": {"final_sparsity": 0.5, "end_epoch": 3, "num_grads": {0.0: 2, 0.5: 4}},
    "MagnitudePruning": {"final_sparsity": {0.5: ["fc1.weight"]}, "params": [], "end_epoch": 3},
    "MovementPruning": {"final_sparsity": 0.5, "end_epoch": 3, "init_sparsity": "__FROM_PARAM__"},
    "OBSPruning": {"final_sparsity": 0.5, "end_epoch": 3, "fisher_block_size": 4},
    "OneShotPruning": {"sparsity": 0.5, "method": "wanda", "mask_type": "2:4"},
    "RigLPruning": {"final_sparsity": 0.5, "end_epoch": 3},
    "SetLearningRate": {"learning_rate": 0.1},
    "SetParam": {"params": ["fc1.bias"], "val": 1.0},
    "SetWeightDecay": {"weight_decay": 0.1},
    "SmoothQuant": {"smoothing_strength": 0.7, "mappings": [(["re:.*q_proj"], "re:.*norm")]},
    "SparsificationLogging": {"update_frequency": 0.5},
    "StructuredPruning": {"final_sparsity": 0.5, "end_epoch": 3, "mask_type": "channel"},
    "TopKASTPruning": {"forward_sparsity": 0.8, "backward_sparsity": 0.5},
    "TrainableParams": {"params": ["re:norm.*"], "trainable": False, "end_epoch": 1},
}
OF_OTHERS = {"Distillation", "PerLayerDistillation", "Quantization"}  # tested where they live


def test_every_modifier_is_in_the_samples():
    assert set(SAMPLES) == {name for name in modifier_names() if name not in OF_OTHERS}


@pytest.mark.parametrize("name", SAMPLES)
def test_a_modifier_written_out_and_read_again_is_the_same(name):
    made = modifier_named(name)(**SAMPLES[name])
    again = modifier_named(f"{name}Modifier")(**made.fields())
    assert again == made
    assert again.fields() == made.fields()


def test_unknown_names_and_kinds_are_refused():
    with pytest.raises(NameNotFoundError, match="did you mean 'MagnitudePruning'"):
        modifier_named("MagnitudePrunning")

    class Odd(Modifier):
        kind = "magic"

    with pytest.raises(NameNotFoundError, match="kind of modifier"):
        modifier(Odd)
    with pytest.raises(ValueRangeError, match="str among the modifiers"):
        Manager(["EpochRange"])
