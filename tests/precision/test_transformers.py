"""Models of transformers in int8: each compiles, computes what its simulated model does, and tells what was rounded.

CI takes one of each kind; SPARTA_LONG=1 takes all of them.
"""

import os
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import sparta
from compiler.conftest import forcing
from sparta.measure.machine import probe_compiler
from sparta.precision import quantize
from zoo import language

pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.skipif(probe_compiler()[0] is None, reason="needs a C++ compiler"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]


@dataclass(frozen=True)
class Row:
    """What is expected of a model: how many layers run in int8 (of linear, of convolutions), and which cannot.

    Layers that are `real` stay so: what is computed of weights alone is computed once.

    `apart` is how far it may be from the simulated model of `quantize`, which rounds no sums; only the compiler may.
    Of models that generate, which go another way, a `part` is taken.
    """

    linear: int
    conv: int = 0
    real: tuple[str, ...] = ()
    apart: float = 5e-3
    part: str = ""


ROWS = {
    "bert": Row(14),
    "distilbert": Row(14),
    "roberta": Row(14),
    "deberta-v2": Row(12, real=("pos_",)),
    "gpt-2": Row(8, part="transformer"),
    "opt": Row(12, part="model"),
    "t5": Row(12, part="encoder"),
    "vit": Row(13, 1),
    "resnet": Row(1, 9, apart=0.1),
    "mobilenet-v2": Row(0, 52, apart=0.1),
    "convnext": Row(9, 8),
}
SHORT = ("roberta", "gpt-2", "vit", "convnext")


def built(name):
    """Return a model whose activations have some range, and batches of inputs for it."""
    model, inputs = language.build(name)
    if ROWS[name].part:
        model, inputs = getattr(model, ROWS[name].part), {"input_ids": inputs["input_ids"]}
        model.config.use_cache = False
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 4:
                nn.init.kaiming_normal_(parameter)
            elif parameter.dim() == 2:
                parameter.mul_(3)
        for norm in (each for each in model.modules() if isinstance(each, nn.BatchNorm2d)):
            norm.running_mean.normal_(0, 0.2)
            norm.running_var.uniform_(0.5, 2)

    def other(t):
        return torch.randn_like(t) if t.is_floating_point() else t.flatten()[torch.randperm(t.numel())].view_as(t)

    return model, [inputs, *(pytree.tree_map(other, inputs) for _ in range(2))]


def called(model, inputs):
    with torch.no_grad():
        return [leaf for leaf in pytree.tree_leaves(model(**inputs)) if isinstance(leaf, Tensor)]


def apart(one, two):
    """Return the largest difference of results, over their norms."""
    return max(float((a - b).norm() / b.norm().clamp_min(1e-6)) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("name", [name for name in ROWS if name in SHORT or os.environ.get("SPARTA_LONG")])
def test_a_model_of_transformers_in_int8(name):
    row, (model, data) = ROWS[name], built(name)
    with forcing("cpu-int8"):
        fast = sparta.compile(model, data[0], precision="int8", calibration=data, max_loss=1.0, tune="off")
    layers = [layer for layer in fast.report.plan.layers if layer.op.startswith("int8")]
    rounded = [layer.op for layer in layers if layer.first.implement == "cpu-int8"]
    assert (rounded.count("int8_linear"), rounded.count("int8_conv2d")) == (row.linear, row.conv)
    left = [layer.name for layer in layers if layer.first.implement != "cpu-int8"]
    assert all(any(part in one for part in row.real) for one in left), left
    assert f"{len(rounded)} layers round their inputs to 8 bits" in fast.report.full
    assert "did not agree" not in fast.report.full
    assert "sizes: the example's only" not in fast.report.full
    unused = [note for note in fast.report.notes if note.startswith("grids that no int8 layer uses")]
    assert all(any(part in note for part in row.real) for note in unused), unused
    certificate = fast.report.certificate
    assert certificate.passed
    assert certificate.error < certificate.tolerance <= 1e-4
    simulated = quantize(model, data, max_loss=1.0).simulated
    more = pytree.tree_map(lambda t: torch.cat([t, t[:1]]), data[1])
    for inputs in (*data, more):
        assert apart(called(fast, inputs), called(simulated, inputs)) < row.apart
