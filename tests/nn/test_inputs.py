"""What is no tensor, or a tensor without dims, is an error of ours that names it, in every module."""

import pytest
import torch
from torch import nn

import sparta.nn as sn
from sparta.errors import SpartaError

MASK = torch.rand(8, 8, generator=torch.Generator().manual_seed(0)) < 0.5
X = torch.randn(8, 8)


def built(module, *inputs):
    module.build(inputs, {"_name": "dense"})
    return module.eval()


MODULES = {
    "linear": lambda: sn.SparseLinear(nn.Linear(8, 8), weight_mask=MASK),
    "linear, built": lambda: built(sn.SparseLinear(nn.Linear(8, 8), weight_mask=MASK), X),
    "linear, masked input": lambda: sn.SparseLinear(nn.Linear(8, 8), input_mask=MASK),
    "linear, masked output": lambda: sn.SparseLinear(nn.Linear(8, 8), output_mask=MASK),
    "int8": lambda: sn.SparseInt8Linear.from_float(nn.Linear(8, 8), MASK, input_scale=0.1),
    "int8, built": lambda: built(sn.SparseInt8Linear.from_float(nn.Linear(8, 8), MASK, input_scale=0.1), X),
    "conv1d": lambda: sn.SparseConv1d(nn.Conv1d(8, 8, 1), MASK[:, :, None]),
    "conv2d": lambda: sn.SparseConv2d(nn.Conv2d(8, 8, 1), MASK[:, :, None, None]),
    "threshold": lambda: sn.ThresholdLinear(nn.Linear(8, 8)),
    "softmax": lambda: sn.SparseSoftmax(MASK),
    "matmul": lambda: sn.SparseBatchMatMul(A_mask=MASK),
    "attention": lambda: sn.SparseAttention(MASK),
    "seqlen attention": lambda: sn.SeqlenDynamicSparseAttention(global_mode=False),
    "experts": lambda: sn.DynamicSparseMoE([nn.Linear(8, 8) for _ in range(2)]),
}
COUNTS = {"matmul": 2, "attention": 3, "seqlen attention": 3, "experts": 2}
ODD = [None, [[1.0] * 8] * 8, "text", 3.0, torch.tensor(1.0)]
NAMES = ["None", "a list", "text", "a number", "no dims"]


@pytest.mark.parametrize("odd", ODD, ids=NAMES)
@pytest.mark.parametrize("name", MODULES)
def test_odd_inputs_are_named(name, odd):
    with pytest.raises(SpartaError, match="allowed"):
        MODULES[name]()(*[odd] * COUNTS.get(name, 1))


@pytest.mark.parametrize("odd", ODD, ids=NAMES)
@pytest.mark.parametrize("name", [name for name in MODULES if name != "threshold"])
@pytest.mark.parametrize("wrapped", [True, False])
def test_odd_sample_inputs_are_named(name, odd, wrapped):
    if isinstance(odd, list) and not wrapped:
        pytest.skip("a list holds several sample inputs")
    given = [odd] * COUNTS.get(name, 1)
    module = MODULES[name]()
    for call in (module.tune, lambda inputs: module.build(inputs, None), module.get_search_space):
        with pytest.raises(SpartaError, match="allowed"):
            call(tuple(given) if wrapped else odd)


@pytest.mark.parametrize("lengths", ["text", 3.0, object(), [[1], [2, 3]], torch.tensor(1)])
def test_odd_lengths_are_named(lengths):
    q = torch.randn(2, 1, 8, 8)
    with pytest.raises(SpartaError, match="seqlens"):
        MODULES["seqlen attention"]()(q, q, q, lengths)


@pytest.mark.parametrize("config", ["dense", {"_name": "nothing"}, {}, ["dense"]])
def test_odd_configs_are_named(config):
    with pytest.raises(SpartaError, match="config"):
        MODULES["linear"]().build(X, config)
