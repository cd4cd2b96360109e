"""The modifier: nothing before its start, rounded layers after it, freezes on time, exact resume in a new process."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import pairs
from create.quantize.nets import NETS, make_cnn, train
from create.quantize.resume import main as resume
from sparta.create import quantize
from sparta.create.manager import Manager
from sparta.create.modifiers import Run, modifier_named
from sparta.create.quantize.prepare import quantizers
from sparta.errors import NameNotFoundError, ValueRangeError

Quantization = modifier_named("Quantization")


def attached(model, optimizer, *entries, **extras):
    manager = Manager(list(entries))
    manager.attach(model, optimizer, 4, **extras)
    return manager


def test_nothing_before_the_start_rounded_after_it_frozen_on_time(net):
    make, batch_of = net
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    entry = Quantization(start_epoch=1, disable_quantization_observer_epoch=2, freeze_bn_stats_epoch=2.5)
    manager = attached(model, optimizer, entry)
    train(model, batch_of, optimizer, 4)
    assert not quantize.is_quantized(model)
    train(model, batch_of, optimizer, 1, first=4)
    assert quantize.is_quantized(model)
    train(model, batch_of, optimizer, 3, first=5)
    assert all(quantizer.observing for _, quantizer in quantizers(model))
    train(model, batch_of, optimizer, 1, first=8)
    assert not any(quantizer.observing for _, quantizer in quantizers(model))
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert all(norm.training for norm in norms)
    train(model, batch_of, optimizer, 2, first=9)
    model.train()
    assert not any(norm.training for norm in norms)
    assert manager.max_epochs == 3
    manager.finalize()
    assert quantize.is_quantized(model), "a finished run leaves the model as it was trained"


def test_the_spec_has_bits_and_scales_and_the_masks_of_pruning(net):
    make, batch_of = net
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    pruning = modifier_named("MagnitudePruning")(final_sparsity=0.5, end_epoch=1, update_frequency=0.25)
    manager = attached(model, optimizer, pruning, Quantization(start_epoch=1))
    train(model, batch_of, optimizer, 6)
    manager.finalize()
    spec = manager.spec()
    spec.check(model)
    name = "7.weight" if "7.weight" in spec else "head.weight"
    assert str(spec[name].format) == "int8"
    assert spec[name].sparsity == pytest.approx(0.5, abs=0.02)
    assert spec[name].scale.cells.isfinite().all()


def test_moments_move_together():
    entry = Quantization(start_epoch=2, disable_quantization_observer_epoch=3, freeze_bn_stats_epoch=4).shifted(10)
    assert (entry.start_epoch, entry.disable_quantization_observer_epoch, entry.freeze_bn_stats_epoch) == (12, 13, 14)
    assert entry.epochs() == (12, 14)
    assert Quantization(start_epoch=3).epochs() == (3, -1)
    assert entry.planned(11) == {"quantized": 0.0}
    assert entry.planned(12) == {"quantized": 1.0}


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"scheme": "deepspars"}, "did you mean 'deepsparse'"),
        ({"scheme": {"weights": {"num_bits": 99}}}, "2 to 8"),
        ({"scheme_overrides": {"Linear": "nope"}}, "unknown quantization scheme"),
        ({"end_epoch": 3}, "stays on"),
        ({"start_epoch": 2, "freeze_bn_stats_epoch": 1}, "after the start"),
        ({"num_calibration_steps": 0}, "num_calibration_steps"),
    ],
)
def test_wrong_fields_are_refused(fields, text):
    with pytest.raises(ValueRangeError, match=text):
        Quantization(**fields)


@pytest.mark.parametrize(
    "fields", [{"ignore": ["nope"]}, {"submodules": ["nope"]}, {"scheme_overrides": {"nope": None}}]
)
def test_names_that_match_nothing_are_refused_before_the_first_step(fields):
    model = make_cnn()
    with pytest.raises(NameNotFoundError, match="unknown module"):
        attached(model, torch.optim.SGD(model.parameters(), lr=0.1), Quantization(**fields))


def test_at_once_calibrated_with_data(net):
    make, batch_of = net
    model = make()
    entry = Quantization(start_epoch=15, disable_quantization_observer_epoch=17.5, num_calibration_steps=2)
    seen = []

    def data():
        for seed in range(5):
            seen.append(seed)
            yield batch_of(4, seed), None

    Manager([entry]).apply(model, data=data())
    assert len(seen) == 2
    calibrated = [quantizer for name, quantizer in quantizers(model) if "key" not in name and "value" not in name]
    assert all(quantizer.calibrated and not quantizer.observing for quantizer in calibrated)


def test_calibration_steps_without_data_are_refused():
    model = make_cnn()
    with pytest.raises(ValueRangeError, match="there is no data"):
        Manager([Quantization(num_calibration_steps=2)]).apply(model)


@pytest.mark.parametrize("steps", [2, 6, 9])
def test_resuming_before_and_after_the_start_is_exact(net, steps):
    make, batch_of = net

    def begin():
        model = make()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        entry = Quantization(start_epoch=1, disable_quantization_observer_epoch=2, freeze_bn_stats_epoch=2)
        return model, optimizer, attached(model, optimizer, entry)

    whole, whole_optimizer, _ = begin()
    train(whole, batch_of, whole_optimizer, 11)
    first, first_optimizer, first_manager = begin()
    train(first, batch_of, first_optimizer, steps)
    second, second_optimizer, second_manager = begin()
    second.load_state_dict(first.state_dict())
    second_optimizer.load_state_dict(first_optimizer.state_dict())
    second_manager.load_state_dict(first_manager.state_dict())
    train(second, batch_of, second_optimizer, 11 - steps, first=steps)
    for (name, expected), found in zip(whole.state_dict().items(), second.state_dict().values(), strict=True):
        assert torch.equal(found, expected), name


def test_a_state_from_before_the_start_makes_a_quantized_model_plain_again():
    model = make_cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    manager = attached(model, optimizer, Quantization(start_epoch=1))
    state = manager.state_dict()
    train(model, NETS["cnn"][1], optimizer, 6)
    assert quantize.is_quantized(model)
    manager.load_state_dict(state)
    assert not quantize.is_quantized(model)


def test_a_model_that_is_quantized_already_is_taken_as_it_is():
    model = make_cnn()
    quantize.prepare(model, "tensorrt")
    entry = Quantization(start_epoch=0)
    run = Run(model, torch.optim.SGD(model.parameters(), lr=0.1))
    entry.call_initialize(run)
    entry.update_if_due(run)
    assert model[0].scheme == quantize.PRESETS["tensorrt"]


@pytest.mark.parametrize("name", sorted(NETS))
def test_resuming_in_a_new_process_in_the_middle_of_quantization_is_exact(name, tmp_path):
    resume(name, 0, 12, None, tmp_path / "whole")
    resume(name, 0, 7, None, tmp_path / "half")
    script = Path(__file__).with_name("resume.py")
    command = [sys.executable, script, name, "7", "12", tmp_path / "half", tmp_path / "resumed"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stderr
    whole, resumed = (torch.load(tmp_path / which) for which in ("whole", "resumed"))
    assert whole["model"].keys() == resumed["model"].keys()
    for key, expected in whole["model"].items():
        assert torch.equal(resumed["model"][key], expected), key
    ranges = whole["manager"]["modifiers"]["1.Quantization"]["own"]["quantization"]["ranges"]
    again = resumed["manager"]["modifiers"]["1.Quantization"]["own"]["quantization"]["ranges"]
    assert all(torch.equal(ranges[key], again[key]) for key in ranges)


def test_two_processes_agree_on_the_ranges():
    assert "ranges agree" in pairs.run("create.quantize.two_processes")
