"""The document's configurations, as printed (with its missing commas), each through a whole training."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from scheduler.nets import accuracy, small_net, step_of
from sparta.files import load_tensors
from sparta.scheduler import build_sparse_scheduler
from sparta.tesa.patterns import NM

MAX_ITER = 28


def amba(folder):
    return {
        "mask_generator": {"type": "NormalMaskGenerator"},
        "fake_sparse": {"type": "FakeSparse"},
        "scheduler": {
            "type": "AmbaLevelPruneScheduler",
            "kwargs": {
                "total_iters": MAX_ITER,
                "sparsity_table": [30, 40, 50, 60, 70, 80, 90],
                "no_prune_keyword": "",
                "no_prune_layer": "",
                "prun_algo": 1,
                "do_sparse_analysis": False,
                "default_input_shape": [1, 3, 224, 224],
                "output_dir": str(folder / "path_to_sparse_analysis"),
                "save_dir": str(folder / "path_to_sparse_ckpts"),
            },
        },
    }


AMPERE = {
    "scheduler": {
        "type": "AmpereScheduler",
        "kwargs": {
            "mask_calculator": "m4n2_1d",
            "allow_recompute_mask": False,
            "allow_permutation": False,
            "verbosity": 0,
        },
    }
}

STR = {
    "mask_generator": {"type": "STRMaskGenerator"},
    "fake_sparse": {"type": "STRFakeSparse", "kwargs": {"sInit_value": -5}},
    "scheduler": {"type": "BaseScheduler"},
}


@pytest.mark.parametrize("optimizer_first", [True, False])
def test_amba(tmp_path, optimizer_first):
    config = amba(tmp_path)
    before = copy.deepcopy(config)
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) if optimizer_first else None
    sparse_scheduler = build_sparse_scheduler(config)
    model = sparse_scheduler.prepare_sparse_model(model)
    if optimizer is None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    lr_scheduler = CosineAnnealingLR(optimizer, MAX_ITER // 7)
    sparse_scheduler.set_lr_scheduler(lr_scheduler)
    assert sparse_scheduler.compute_sparse_rate(model) == 0
    total = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear))
    for iteration in range(MAX_ITER):
        step_of(model, optimizer, iteration)
        sparse_scheduler.prune_model(model, iteration)
        level = (30, 40, 50, 60, 70, 80, 90)[iteration // 4]
        assert sparse_scheduler.compute_sparse_rate(model) == round(total * level / 100) / total
        assert lr_scheduler.last_epoch == iteration % 4
        lr_scheduler.step()
    model, spec = sparse_scheduler.export_sparse_model(model)
    spec.check(model)
    assert 1 - spec.density == pytest.approx(round(total * 0.9) / total, abs=1e-12)
    assert model.state_dict().keys() == small_net().state_dict().keys()
    assert type(model.conv1) is nn.Conv2d
    checkpoints = sorted(tmp_path.glob("path_to_sparse_ckpts/*"))
    assert [file.name for file in checkpoints] == [
        f"global_sparse_rate_{level}.safetensors" for level in (30, 40, 50, 60, 70, 80, 90)
    ]
    tensors, payload = load_tensors(checkpoints[-1], "checkpoint", 1)
    small_net().load_state_dict(tensors)
    assert payload["sparse_rate"] == pytest.approx(1 - spec.density, abs=1e-12)
    written = {file.name for file in tmp_path.glob("path_to_sparse_analysis/*")}
    assert written == {"level_table.json", "level_table.csv", "level_table.svg", "pruner_report.csv"}
    assert config == before


def test_ampere():
    model = small_net(width=32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sparse_scheduler = build_sparse_scheduler(AMPERE)
    model = sparse_scheduler.prepare_sparse_model(model)
    sparse_scheduler.init_optimizer(optimizer)
    for iteration in range(10):
        step_of(model, optimizer, iteration)
        sparse_scheduler.prune_model(model, iteration)
        for conv in (model.conv1, model.conv2):
            NM(2, 4).validate(conv.weight != 0)
            assert float((conv.weight == 0).float().mean()) == 0.5
    model, spec = sparse_scheduler.export_sparse_model(model)
    spec.check(model)
    assert set(spec) == {"conv1.weight", "conv2.weight"}


def test_str():
    model = small_net()
    sparse_scheduler = build_sparse_scheduler(STR)
    model = sparse_scheduler.prepare_sparse_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    thresholds = [p for name, p in model.named_parameters() if name.endswith("scores")]
    assert len(thresholds) == 4
    before = [p.item() for p in thresholds]
    for iteration in range(40):
        step_of(model, optimizer, iteration)
        sparse_scheduler.prune_model(model, iteration)
    assert all(p.item() != start for p, start in zip(thresholds, before, strict=True))
    model.eval()
    x = torch.randn(2, 3, 8, 8)
    trained = model(x)
    rate = sparse_scheduler.compute_sparse_rate(model)
    model, spec = sparse_scheduler.export_sparse_model(model)
    torch.testing.assert_close(model(x), trained)  # the soft-thresholded weight, not the weight times a mask
    assert rate > 0.02
    assert 1 - spec.density == pytest.approx(rate)
    assert accuracy(model) > 0.5


def test_the_sparse_models_learn(tmp_path):
    """Ninety percent of the weights are gone, and the task is still solved: the masks and the restarts are right."""
    config = amba(tmp_path)
    config["scheduler"]["kwargs"] |= {"total_iters": 70, "default_input_shape": [1, 3, 8, 8]}
    scheduler = build_sparse_scheduler(config)
    model = scheduler.prepare_sparse_model(small_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for iteration in range(70):
        step_of(model, optimizer, iteration)
        scheduler.prune_model(model, iteration)
    assert accuracy(scheduler.export_sparse_model(model).model) > 0.9
