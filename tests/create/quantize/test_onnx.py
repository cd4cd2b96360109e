"""ONNX: a runtime that knows nothing of us computes what the quantised model does, from integer weights."""

import importlib.util
import logging

import pytest
import torch

from create.quantize.nets import NETS, train
from sparta.create import quantize
from sparta.errors import MissingPackageError, ValueRangeError

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


@pytest.fixture(autouse=True)
def _quiet():
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


@pytest.mark.parametrize(("name", "scheme"), [("cnn", "default"), ("transformer", "tensorrt")])
def test_the_runtime_agrees_within_a_quantum(name, scheme, tmp_path):
    make, batch_of = NETS[name]
    model = make()
    quantize.prepare(model, scheme)
    train(model, batch_of, torch.optim.SGD(model.parameters(), lr=0.1), 3)
    inputs = batch_of(5, 50)
    expected = model.eval()(inputs).detach()
    quantize.to_onnx(model, (inputs,), tmp_path / "model.onnx")

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    # Without VNNI, sums of products of 8 bits saturate at 16 unless precision is asked for.
    options.add_session_config_entry("session.x64quantprecision", "1")
    # Fused integer kernels saturate on processors without VNNI; what the file says is the same on all.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", options, providers=["CPUExecutionProvider"])
    found = session.run(None, {session.get_inputs()[0].name: inputs.numpy()})[0]
    last = list(quantize.export(model).activations.values())[-1].scale
    assert abs(found - expected.numpy()).max() <= max(last, 0.02 * expected.abs().max().item())

    graph = onnx.load(tmp_path / "model.onnx").graph
    operators = [node.op_type for node in graph.node]
    assert operators.count("QuantizeLinear") == len(quantize.export(model).activations)
    integers = [
        tensor for tensor in graph.initializer if tensor.data_type == onnx.TensorProto.INT8 and len(tensor.dims) > 1
    ]
    assert len(integers) == len(quantize.export(model).weights)


def test_a_missing_package_is_named(monkeypatch, tmp_path):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxscript" else find(name))
    with pytest.raises(MissingPackageError, match=r"sparta-torch\[onnx\]"):
        quantize.to_onnx(torch.nn.Linear(2, 2), (torch.zeros(1, 2),), tmp_path / "model.onnx")


def test_a_folder_that_does_not_exist_is_an_error_before_the_work(tmp_path):
    model = torch.nn.Linear(2, 2)
    quantize.prepare(model)
    model(torch.randn(1, 2))
    with pytest.raises(ValueRangeError, match="folder does not exist"):
        quantize.to_onnx(model, (torch.zeros(1, 2),), tmp_path / "none" / "model.onnx")
