"""On CUDA, ThresholdLinear computes the dense layer of the thresholded input and reads no other weights."""

import pytest
import torch
from torch import nn

from gpu.cases import draw
from sparta.nn import ThresholdLinear
from sparta.specialize.linear.threshold import threshold_linear
from sparta.testing import check, linear_reference

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="needs a Hopper GPU"
)


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def layer_of(inputs, outputs, threshold, dtype=torch.bfloat16, bias=True):
    return ThresholdLinear(nn.Linear(inputs, outputs, bias=bias).cuda().to(dtype), threshold)


def kernel(layer, x):
    """Run the kernel for any number of tokens, also where the layer would not."""
    return threshold_linear(x, layer.weight.t(), layer.bias, layer.threshold)


def expected_of(layer, x):
    kept = torch.where(x.float().abs() <= layer.threshold, 0, x)
    return linear_reference(kept, layer.weight, layer.bias)


@pytest.mark.parametrize("threshold", [0.0, 0.7, 1.96, 100.0])
@pytest.mark.parametrize(
    ("m", "n", "k", "dtype"),
    [(1, 4096, 4096, torch.bfloat16), (1, 17, 5, torch.float16), (2, 300, 1000, torch.bfloat16),
     (3, 1000, 11008, torch.float16), (8, 77, 4100, torch.bfloat16), (8, 11008, 20000, torch.bfloat16)],
)  # fmt: skip
def test_it_is_the_dense_layer_of_the_thresholded_input(m, n, k, threshold, dtype):
    layer, x = layer_of(k, n, threshold, dtype), draw(m, k, dtype=dtype)
    assert m > 1 or not layer.reason(x), layer.reason(x)
    kernel(layer, x).fill_(torch.nan)
    check(kernel(layer, x), expected_of(layer, x), reduction=k)
    assert torch.equal(kernel(layer, x), kernel(layer, x))
    check(layer(x), expected_of(layer, x), reduction=k)


def test_strides_batches_and_bias():
    layer = layer_of(256, 512, 0.5, bias=False)
    for strided in (draw(1, 512)[:, ::2], draw(4, 512)[:, ::2]):
        check(kernel(layer, strided), expected_of(layer, strided), reduction=256)
    batch = draw(2, 3, 256)
    check(layer(batch), expected_of(layer, batch), reduction=256)


def test_weights_of_small_inputs_are_not_read_and_nan_is_live():
    layer = layer_of(1024, 512, 1.0)
    x = draw(2, 1024).clamp(-3, 3)
    x[:, 100], x[1, 200] = 0.5, torch.nan
    layer.weight[:, 100] = torch.nan
    y = kernel(layer, x)
    assert y[0].isfinite().all()
    assert y[1].isnan().all()
    x[1, 200] = torch.inf
    assert not kernel(layer, x)[1].isfinite().any()
    assert layer(x[:1]).isfinite().all()


def test_it_goes_into_a_graph_and_compiles():
    layer, x = layer_of(2048, 1024, 0.8), draw(1, 2048)
    layer(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    x.copy_(torch.randn_like(x) * 2)  # another number of live inputs
    graph.replay()
    assert torch.equal(y, layer(x))
    assert torch.equal(y, torch.compile(layer, fullgraph=True)(x))


def test_many_tokens_and_float32_are_dense_with_a_reason():
    layer = layer_of(256, 128, 0.5)
    x = draw(2, 256)
    assert "2 tokens" in layer.reason(x)
    check(layer(x), expected_of(layer, x), reduction=256)
    single = layer_of(256, 128, 0.5, dtype=torch.float32)
    x = draw(1, 256, dtype=torch.float32)
    assert "not torch.float32" in single.reason(x)
    check(single(x), expected_of(single, x), reduction=256)
