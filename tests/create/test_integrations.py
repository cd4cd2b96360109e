"""The recipe inside the loops of transformers, Lightning and Accelerate, with their real classes and tiny models."""

import builtins
import logging
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sparta.create import initialize
from sparta.create.integrations.lightning import lightning_callback
from sparta.create.integrations.transformers import trainer_callback
from sparta.create.loop.state_file import load_state, save_state
from sparta.errors import FileFormatError, MissingPackageError, ValueRangeError

pytestmark = pytest.mark.filterwarnings("ignore")  # those packages' own

VARIABLES = {"sparsity": 0.8}


def zeros(weights):
    weights = list(weights)
    return sum(int((w == 0).sum()) for w in weights) / sum(w.numel() for w in weights)


class WithLoss(nn.Module):
    """As a model of transformers: takes labels, returns a loss."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(12, 16), nn.Linear(16, 3)

    def forward(self, x, labels=None):
        logits = self.two(torch.relu(self.one(x)))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, place):
        generator = torch.Generator().manual_seed(place)
        return {"x": torch.randn(12, generator=generator), "labels": place % 3}


def hf_train(folder, callback, *, resume=None, epochs=4, accumulate=1):
    transformers = pytest.importorskip("transformers")
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=epochs,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=accumulate,
        save_strategy="epoch",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        learning_rate=0.01,
    )
    model = WithLoss()
    trainer = transformers.Trainer(model, arguments, train_dataset=Rows(), callbacks=[callback])
    trainer.train(resume_from_checkpoint=resume)
    return model


@pytest.mark.slow
def test_the_trainer_of_transformers(tmp_path):
    callback = trainer_callback(quantization=False, recipe_variables=VARIABLES)
    model = hf_train(tmp_path / "whole", callback)
    assert callback.manager.epoch == 4.0
    assert zeros([model.one.weight, model.two.weight]) == pytest.approx(0.8, abs=0.01)
    assert (tmp_path / "whole" / "checkpoint-8" / "sparta_recipe.yaml").exists()
    # again from the first checkpoint, in the middle of pruning
    resumed = trainer_callback(quantization=False, recipe_variables=VARIABLES)
    again = hf_train(tmp_path / "whole", resumed, resume=str(tmp_path / "whole" / "checkpoint-8"))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.slow
def test_the_trainer_of_transformers_accumulates_and_checks_the_length(tmp_path):
    callback = trainer_callback(quantization=False, recipe_variables=VARIABLES)
    model = hf_train(tmp_path / "accumulated", callback, accumulate=2)
    assert (callback.manager.step, callback.manager.epoch) == (16, 4.0)
    assert zeros([model.one.weight, model.two.weight]) == pytest.approx(0.8, abs=0.01)
    long = trainer_callback(quantization=False, recipe_variables={"num_epochs": 20})
    with pytest.raises(ValueRangeError, match="set num_train_epochs=20"):
        hf_train(tmp_path / "short", long)


def lightning_parts():
    lightning = pytest.importorskip("lightning")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3))

        def training_step(self, batch, _):
            inputs, targets = batch
            return nn.functional.cross_entropy(self.net(inputs), targets)

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.01)

    generator = torch.Generator().manual_seed(0)
    rows = TensorDataset(torch.randn(32, 12, generator=generator), torch.arange(32) % 3)
    return lightning, Module, DataLoader(rows, batch_size=4)


def lightning_fit(folder, callback, *, epochs=4, checkpoint=None, accumulate=1):
    lightning, module, loader = lightning_parts()
    trainer = lightning.Trainer(
        max_epochs=epochs,
        callbacks=[callback],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(folder),
        accumulate_grad_batches=accumulate,
    )
    made = module()
    trainer.fit(made, loader, ckpt_path=checkpoint)
    return made, trainer


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["magnitude", "movement"])
def test_lightning(tmp_path, kind):
    options = {"pruning": kind, "quantization": False, "recipe_variables": {**VARIABLES, "num_epochs": 4}}
    callback = lightning_callback(**options)
    module, _ = lightning_fit(tmp_path, callback)
    assert callback.manager.epoch == 4.0
    assert zeros(p for p in module.parameters() if p.dim() > 1) == pytest.approx(0.8, abs=0.01)
    # two epochs, a checkpoint, and two more
    with pytest.MonkeyPatch.context() as patch:
        half = lightning_callback(**options)
        patch.setattr(half.run, "end", lambda: None)  # interrupted, not finished
        _, trainer = lightning_fit(tmp_path, half, epochs=2)
        trainer.save_checkpoint(tmp_path / "half.ckpt")
    rest = lightning_callback(**options)
    again, _ = lightning_fit(tmp_path, rest, checkpoint=tmp_path / "half.ckpt")
    assert rest.manager.epoch == 4.0
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), again.parameters(), strict=True))


@pytest.mark.slow
def test_lightning_accumulates(tmp_path):
    callback = lightning_callback(quantization=False, recipe_variables=VARIABLES)
    lightning_fit(tmp_path, callback, accumulate=3)
    assert (callback.manager.steps_per_epoch, callback.manager.epoch) == (3, 4.0)


@pytest.mark.slow
def test_accelerate():
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.randn(32, 12), torch.arange(32) % 3), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    manager, optimizer = initialize(
        model, optimizer, len(loader), accumulation_steps=2, quantization=False, recipe_variables={"num_epochs": 2}
    )
    for _ in range(manager.max_epochs):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
    assert (manager.step, manager.epoch) == (8, 2.0)
    assert zeros(p for p in model.parameters() if p.dim() > 1) == pytest.approx(0.8, abs=0.01)


@pytest.mark.parametrize(
    ("make", "package", "extra"),
    [(trainer_callback, "transformers", "hf"), (lightning_callback, "lightning.pytorch", "lightning")],
)
def test_a_missing_package_is_named_with_its_extra(make, package, extra, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == package:
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingPackageError, match=rf"sparta-torch\[{extra}\]"):
        make()


def test_states_are_files_without_pickle(tmp_path):
    path = tmp_path / "state"
    state = {"a": {"b": [torch.arange(3), None, "x"]}, "c": torch.tensor(1.5), "d": True, "e": {}}
    save_state(path, state)
    found = load_state(path)
    assert torch.equal(found["a"]["b"][0], state["a"]["b"][0])
    assert (found["a"]["b"][1:], found["d"], found["e"]) == ([None, "x"], True, {})
    assert found["c"].shape == ()
    with pytest.raises(FileFormatError, match="texts as keys"):
        save_state(path, {"a": {1: 2}})
    Path(path).write_bytes(b"other")
    with pytest.raises(FileFormatError, match="truncated"):
        load_state(path)
