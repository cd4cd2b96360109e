"""Records reach what scripts have: functions, TensorBoard, Weights & Biases, MLflow, and the curves of a report."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from sparta.create import initialize
from sparta.errors import MissingPackageError, NameNotFoundError, ValueRangeError
from sparta.sparsify import History, writer
from sparta.sparsify.logs import Loggers, send


class Scalars:
    def __init__(self):
        self.seen = []

    def add_scalar(self, name, value, global_step):
        self.seen.append((name, value, global_step))


class Metrics:
    def __init__(self):
        self.seen = []

    def log_metrics(self, metrics, step=None):
        self.seen += [(name, value, step) for name, value in metrics.items()]


class Steps:
    def __init__(self):
        self.seen = []

    def log(self, data, step=None):
        self.seen += [(name, value, step) for name, value in data.items()]


@pytest.mark.parametrize("kind", [Scalars, Metrics, Steps])
def test_writers_get_numbers_with_their_step(kind):
    logger = kind()
    send(logger, {"sparsity": 0.5, "loss": 1.0}, 7)
    assert logger.seen == [("sparsity", 0.5, 7), ("loss", 1.0, 7)]


def test_what_takes_no_step_gets_the_record_alone():
    seen = []
    send(SimpleNamespace(log=seen.append), {"loss": 1.0}, 7)
    send(seen.append, {"loss": 2.0}, 8)
    assert seen == [{"loss": 1.0}, {"loss": 2.0}]
    with pytest.raises(ValueRangeError, match="a logger is a int"):
        send(3, {}, 0)


def test_packages_are_found_by_name(monkeypatch, tmp_path):
    made = []
    wandb = ModuleType("wandb")
    wandb.run, wandb.init = None, lambda project: made.append(project) or Steps()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    mlflow = ModuleType("mlflow")
    mlflow.active_run, mlflow.set_experiment = lambda: None, made.append
    mlflow.start_run, mlflow.log_metrics = (
        lambda: made.append("run"),
        lambda metrics, step: made.append((metrics, step)),
    )
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    assert isinstance(writer("wandb", "project"), Steps)
    send(writer("mlflow", "experiment"), {"loss": 1.0}, 2)
    assert made == ["project", "experiment", "run", ({"loss": 1.0}, 2)]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingPackageError, match="pip install tensorboard"):
        writer("tensorboard", tmp_path)
    with pytest.raises(NameNotFoundError, match="did you mean 'tensorboard'"):
        Loggers().add_logger("tensorbord")


def test_the_history_of_a_run_is_what_a_report_draws():
    from sparta.reporting.page import _history

    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    history = History()
    variables = {"num_epochs": 2, "sparsity": 0.5}
    manager, _ = initialize(model, optimizer, 4, quantization=False, recipe_variables=variables, loggers=[history])
    for _ in range(8):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        manager.log({"loss": loss.item()})
    manager.finalize()
    found = [record["sparsity"] for record in history if "sparsity" in record]
    assert found == sorted(found)
    assert found[-1] == 0.5
    assert sum("loss" in record for record in history) == 8
    drawn = _history(history)
    assert "<h3>loss</h3>" in drawn
    assert "<h3>sparsity</h3>" in drawn
