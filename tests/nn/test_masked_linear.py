"""SparseLinear with an input or output mask: whatever kernel runs, results and gradients are those of masked dense."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from sparta.errors import ShapeError
from sparta.nn import SparseBatchMatMul, SparseLinear, build, tune
from sparta.nn.tuning import operators_of
from sparta.specialize.implement import supported
from sparta.tesa.attribute import TeSA
from sparta.testing import block_mask, check, linear_reference, matmul_reference

M, K, N = 40, 48, 36
WHICH = ["input_mask", "output_mask"]


def cpu_config(layer, x):
    """Return the first tile of the C++ kernels; they are for masked inputs."""
    samples = [s for s in layer.get_search_space(x).samples() if s["_name"] == "cpu"]
    if not samples:
        pytest.skip("the C++ kernels are not for this")
    return samples[0]


def made(which, mask=None, *, tile=(16, 16), bias=True, lead=()):
    mask = block_mask((M, K if which == "input_mask" else N), (4, 4), 0.7, seed=2) if mask is None else mask
    layer = SparseLinear(nn.Linear(K, N, bias=bias), **{which: mask})
    x = torch.randn(*lead, M, K)
    if tile is not None:
        layer.build(x, cpu_config(layer, x) if tile == "cpu" else {"_name": "blocks", "tile": tile})
    return layer, mask


def gradients(layer, x):
    x = x.detach().clone().requires_grad_()
    layer.zero_grad()
    y = layer(x)
    (y * torch.arange(y.numel(), dtype=y.dtype).reshape(y.shape).cos()).sum().backward()
    return y, [x.grad, *(parameter.grad for parameter in layer.parameters())]


def exact(layer, x, which, mask):
    x = x.detach().double().requires_grad_()
    weight = layer.weight.detach().double().requires_grad_()
    bias = None if layer.bias is None else layer.bias.detach().double().requires_grad_()
    y = linear_reference(x, weight, bias, **{which: mask})
    (y * torch.arange(y.numel(), dtype=y.dtype).reshape(y.shape).cos()).sum().backward()
    return y.detach(), [t.grad for t in (x, weight, bias) if t is not None]


@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("tile", [None, (16, 16), (32, 32), "cpu"], ids=["untuned", "16", "32", "cpu"])
@pytest.mark.parametrize("lead", [(), (3,), (2, 1, 3), (0,)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_results_and_gradients_are_those_of_the_masked_dense_layer(which, tile, lead, bias):
    layer, mask = made(which, tile=tile, bias=bias)
    x = torch.randn(*lead, M, K)
    y, grads = gradients(layer, x)
    truth, expected = exact(layer, x, which, mask)
    assert y.shape == (*lead, M, N)
    for got, right in zip([y, *grads], [truth, *expected], strict=True):
        assert got.shape == right.shape
        if got.numel():
            check(got, right, reduction=M * K * 6)


@given(
    which=st.sampled_from(WHICH),
    rows=st.integers(1, 40),
    density=st.sampled_from([0.0, 0.02, 0.3, 0.98]),
    batch=st.sampled_from([(), (2,)]),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_any_mask_and_number_of_rows(which, rows, density, batch, seed):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, K if which == "input_mask" else N, generator=generator) < density
    layer = SparseLinear(nn.Linear(K, N), **{which: mask})
    x = torch.randn(*batch, rows, K, generator=generator)
    ways = list(layer.get_search_space(x).samples())
    layer.build(x, ways[seed % len(ways)])
    check(layer(x), linear_reference(x, layer.weight, layer.bias, **{which: mask}), reduction=K)
    if which == "output_mask":
        assert bool((layer(x)[..., ~mask] == 0).all())


@pytest.mark.parametrize("tile", [(16, 16), "cpu"], ids=["blocks", "cpu"])
@pytest.mark.parametrize("which", WHICH)
def test_what_is_pruned_has_no_influence_and_no_gradient(which, tile):
    layer, mask = made(which, tile=tile)
    x = torch.randn(M, K)
    y, grads = gradients(layer, x)
    if which == "input_mask":
        assert torch.equal(grads[0][~mask], torch.zeros(int((~mask).sum())))
        spoilt = torch.where(mask, x, torch.nan)
        assert torch.equal(layer(spoilt), y)
    else:
        assert torch.equal(y[~mask], torch.zeros(int((~mask).sum())))


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([(1, 1), (8, 8), (16, 8), (9, 40)]),
    st.sampled_from([0.0, 0.02, 0.15]),
    st.sampled_from([(), (0,), (2, 2)]),
    st.booleans(),
    st.sampled_from([torch.float32, torch.float64]),
    st.integers(0, 99),
)
def test_a_sampled_product_is_the_masked_one(block, density, lead, bias, dtype, seed):
    torch.manual_seed(seed)
    rows, columns = -(-M // block[0]), -(-N // block[1])
    mask = (torch.rand(rows, columns) < density).repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:M, :N]
    layer = SparseLinear(nn.Linear(K, N, bias=bias, dtype=dtype), output_mask=mask)
    x = torch.randn(*lead, M, K, dtype=dtype)
    x[..., ~mask.any(1), :] = torch.nan  # of no row that is kept
    truth, wanted = exact(layer, x.nan_to_num(), "output_mask", mask)
    forms = [s for s in layer.get_search_space(x).samples() if s["_name"] == "sampled"]
    assert forms or mask.float().mean() > 0.2
    for form in forms:
        layer.build(x, form)
        y, found = gradients(layer, x)
        check(y, truth, reduction=K)
        for mine, theirs in zip(found[1:], wanted[1:], strict=True):
            if not bool(x.isnan().any()):
                check(mine, theirs, reduction=lead[0] * M if lead else M)
        assert torch.equal(y[..., ~mask], torch.zeros_like(y[..., ~mask]))
        # What was built for one dtype takes another, densely where it must.
        short, few = copy.deepcopy(layer).bfloat16(), x.nan_to_num().bfloat16()
        check(short(few), exact(short, few, "output_mask", mask)[0], reduction=K)


def test_a_sampled_product_refuses_what_it_is_not_for():
    layer = SparseLinear(nn.Linear(K, N), output_mask=torch.rand(M, N) < 0.5)
    spec = layer._spec((torch.randn(M, K),))
    assert "neither in blocks nor sparse enough" in supported(spec)[1]["sampled"].reason
    inside = SparseLinear(nn.Linear(K, N), input_mask=torch.rand(M, K) < 0.1)._spec((torch.randn(M, K),))
    assert "sparse C" in supported(inside)[1]["sampled"].reason
    product = SparseBatchMatMul(C_mask=torch.rand(M, N) < 0.1, transpose_B=True, compressed=False)
    batched = product._spec((torch.randn(2, M, K), torch.randn(2, N, K)))
    assert "one B" in supported(batched)[1]["sampled"].reason


@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("backward", [True, False])
def test_it_is_tuned_like_any_other(which, backward):
    layer, mask = made(which, tile=None)
    x = torch.randn(2, M, K)
    choice = layer.tune(inputs=(x,), max_trials=3, backward=backward)
    assert layer.ready
    assert {trial.params["_name"] for trial in choice.result.trials} <= {"dense", "blocks", "cpu", "sampled"}
    assert all(trial.state == "complete" for trial in choice.result.trials)
    check(layer(x), linear_reference(x, layer.weight, layer.bias, **{which: mask}), reduction=K)


@pytest.mark.parametrize("tile", [(16, 16), "cpu"], ids=["blocks", "cpu"])
@pytest.mark.parametrize("which", WHICH)
def test_copies_state_and_new_masks(which, tile):
    layer, mask = made(which, tile=tile)
    x = torch.randn(M, K)
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        twin.weight.zero_()
    check(layer(x), linear_reference(x, layer.weight, layer.bias, **{which: mask}), reduction=K)
    assert set(layer.state_dict()) == {"weight", "bias", which}
    same, _ = made(which, tile=tile)
    same.load_state_dict(layer.state_dict())
    assert same.ready
    other, _ = made(which, ~mask)
    other.load_state_dict(layer.state_dict())
    assert not other.ready
    check(other(x), linear_reference(x, layer.weight, layer.bias, **{which: mask}), reduction=K)
    layer.update_mask(**{which: ~mask})
    assert not layer.ready
    check(layer(x), linear_reference(x, layer.weight, layer.bias, **{which: ~mask}), reduction=K)


@pytest.mark.parametrize("tile", [(16, 16), "cpu"], ids=["blocks", "cpu"])
@pytest.mark.parametrize("which", WHICH)
def test_other_dtypes_follow_the_module(which, tile):
    layer, mask = made(which, tile=tile)
    layer.to(torch.float64)
    x = torch.randn(M, K, dtype=torch.float64)
    check(layer(x), linear_reference(x, layer.weight, layer.bias, **{which: mask}), reduction=K)


@pytest.mark.parametrize("tile", [(16, 16), "cpu"], ids=["blocks", "cpu"])
@pytest.mark.parametrize("which", WHICH)
def test_torch_compile_takes_it_whole(which, tile):
    layer, mask = made(which, tile=tile)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(M, K, requires_grad=True)
    y = compiled(x)
    check(y, linear_reference(x, layer.weight, layer.bias, **{which: mask}), reduction=K)
    y.sum().backward()
    assert layer.weight.grad is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_dtypes_on_the_cpu_kernels(dtype):
    mask = block_mask((M, K), (4, 4), 0.7, seed=2)
    layer = SparseLinear(nn.Linear(K, N, dtype=dtype), input_mask=mask)
    x = torch.randn(M, K, dtype=dtype)
    layer.build(x, cpu_config(layer, x))
    assert layer(x).dtype == dtype
    check(layer(x), linear_reference(x, layer.weight, layer.bias, input_mask=mask), reduction=K)


def test_a_product_that_was_built_for_one_matrix_takes_a_batch_of_them():
    mask = block_mask((M, K), (4, 4), 0.7, seed=2)
    product = SparseBatchMatMul(A_mask=mask, transpose_B=True, compressed=False)
    x, weight = torch.randn(2, M, K), torch.randn(2, N, K)
    product.build((x, weight[0]), cpu_config(product, (x, weight[0])))
    for other in (weight[0], weight):
        check(product(x, other), matmul_reference(x, other, A_mask=mask, transpose_B=True), reduction=K)


def test_strided_inputs_and_copies_after_the_original_is_gone():
    layer, mask = made("input_mask", tile="cpu")
    x = torch.randn(K, 2 * M).t()[::2]
    twin = copy.deepcopy(layer)
    del layer
    check(twin(x), linear_reference(x, twin.weight, twin.bias, input_mask=mask), reduction=K)


@pytest.mark.parametrize("which", WHICH)
def test_a_model_with_it_is_tuned_and_built(which):
    model = nn.Sequential(made(which, tile=None)[0])
    assert list(operators_of(model)) == ["0"]
    x = torch.randn(M, K)
    configs = tune(model, x, max_trials=2)
    build(model, x, configs)
    assert list(operators_of(model)) == ["0"]  # what runs inside is no operator of its own


@pytest.mark.parametrize("tile", [None, (16, 16)], ids=["untuned", "built"])
@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("shape", [(M + 1, K), (K,), (2, M - 1, K)])
def test_inputs_that_the_mask_is_not_for_are_refused(which, shape, tile):
    layer, _ = made(which, tile=tile)
    with pytest.raises(ShapeError, match=f"an input of shape.*{which}"):
        layer(torch.randn(shape))
    with pytest.raises(ShapeError, match="input of shape"):
        layer.tune(inputs=(torch.randn(shape),))


@pytest.mark.parametrize("which", WHICH)
def test_a_tesa_is_a_mask_too(which):
    _, mask = made(which, tile=None)
    dense, x = nn.Linear(K, N), torch.randn(M, K)
    by_mask, by_tesa = (SparseLinear(dense, **{which: given}) for given in (mask, TeSA.from_mask(mask)))
    assert torch.equal(by_mask(x), by_tesa(x))
