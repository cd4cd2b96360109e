"""DynamicSparseMoE sends each token through its own experts: none is dropped, whatever the routing."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from sparta.errors import ShapeError, SpartaError, ValueRangeError
from sparta.nn import DynamicSparseMoE, tune
from sparta.testing import check, moe_reference

K, N, EXPERTS = 12, 7, 5
CONFIGS = [None, {"_name": "dense"}, {"_name": "sorted"}]
NAMES = ["untuned", "dense", "sorted"]


def layer(config=None, *, experts=EXPERTS, bias=(True,), dtype=torch.float32):
    moe = DynamicSparseMoE([nn.Linear(K, N, bias=bias[i % len(bias)], dtype=dtype) for i in range(experts)])
    if config is not None:
        moe.build((torch.randn(3, K, dtype=dtype), torch.zeros(3, dtype=torch.int64)), config)
    return moe


def compare(moe, tokens, ids, gates=None):
    """Compare the result and all gradients with float64."""
    leaves = [x.detach().requires_grad_() for x in (tokens, *([] if gates is None else [gates]))]
    y = moe(leaves[0], ids, *leaves[1:])
    exact = [x.detach().double().requires_grad_() for x in leaves]
    weights = [expert.weight.detach().double().requires_grad_() for expert in moe.experts]
    biases = [
        (torch.zeros(N) if expert.bias is None else expert.bias).detach().double().requires_grad_()
        for expert in moe.experts
    ]
    flat_ids = ids.flatten(0, -2) if ids.dim() == tokens.dim() else ids.flatten()
    flat_gates = None if gates is None else exact[1].reshape(flat_ids.shape)
    expected = moe_reference(exact[0].flatten(0, -2), flat_ids, weights, biases, flat_gates).reshape(y.shape)
    cotangent = torch.randn_like(expected)
    for parameter in moe.parameters():
        parameter.grad = None
    y.backward(cotangent.to(y.dtype))
    expected.backward(cotangent)
    check(y, expected.detach(), reduction=4 * K) if y.numel() else None
    pairs = list(zip(leaves, exact, strict=True))
    pairs += [(expert.weight, weight) for expert, weight in zip(moe.experts, weights, strict=True)]
    pairs += [(expert.bias, bias) for expert, bias in zip(moe.experts, biases, strict=True) if expert.bias is not None]
    for leaf, reference in pairs:
        if leaf.numel() and reference.grad is not None:
            check(leaf.grad, reference.grad, reduction=1000, atol=1e-6)


@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
@pytest.mark.parametrize("bias", [(True,), (False,), (True, False)], ids=["bias", "no bias", "mixed"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
def test_result_and_gradients(config, bias, dtype):
    moe = layer(config, bias=bias)
    compare(moe, torch.randn(301, K), torch.randint(0, EXPERTS, (301,), dtype=dtype))
    compare(moe, torch.randn(31, K), torch.randint(0, EXPERTS, (31, 2), dtype=dtype), torch.rand(31, 2))


@given(st.data(), st.sampled_from(CONFIGS))
@settings(max_examples=30)
def test_any_routing(data, config):
    experts = data.draw(st.integers(2, 4))
    lead = data.draw(st.sampled_from([(0,), (1,), (9,), (2, 3)]))
    visits = data.draw(st.sampled_from([None, 1, 3]))
    shape = lead if visits is None else (*lead, visits)
    most = data.draw(st.integers(0, experts - 1))  # some experts get nothing
    ids = torch.randint(0, most + 1, shape)
    gates = torch.randn(shape) if data.draw(st.booleans()) else None
    compare(layer(config, experts=experts), torch.randn(*lead, K), ids, gates)


@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
def test_all_tokens_at_one_expert_and_an_expert_named_twice(config):
    moe = layer(config)
    compare(moe, torch.randn(5000, K), torch.full((5000,), EXPERTS - 1))
    compare(moe, torch.randn(4, K), torch.tensor([[0, 0], [1, 1], [2, 3], [4, 4]]))


@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
def test_an_expert_cannot_harm_tokens_that_never_visit_it(config):
    moe = layer(config)
    with torch.no_grad():
        moe.experts[2].weight.fill_(math.inf)
    tokens, ids = torch.randn(20, K), torch.tensor([0, 1, 3, 4] * 5)
    y = moe(tokens, ids)
    assert torch.isfinite(y).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("config", CONFIGS[1:], ids=NAMES[1:])
def test_dtypes_and_strides(config, dtype):
    moe = layer(config, dtype=dtype)
    tokens, ids, gates = torch.randn(K, 40, dtype=dtype).t()[::2], torch.randint(0, EXPERTS, (20, 2)), torch.rand(20, 2)
    y = moe(tokens, ids, gates.to(dtype))
    assert y.dtype == dtype
    weights, biases = [e.weight for e in moe.experts], [e.bias for e in moe.experts]
    expected = moe_reference(tokens, ids, weights, biases, gates.to(dtype).double())
    check(y, expected, reduction=K, atol=0.0 if dtype == torch.float64 else 3e-2)


def test_experts_keep_their_parameters():
    experts = [nn.Linear(K, N) for _ in range(3)]
    moe = DynamicSparseMoE(experts)
    assert all(mine is given for mine, given in zip(moe.experts, experts, strict=True))
    moe.build((torch.randn(3, K), torch.zeros(3, dtype=torch.int64)), CONFIGS[2])
    twin = copy.deepcopy(moe)
    with torch.no_grad():
        twin.experts[0].weight.zero_()
        experts[1].weight.mul_(2.0)
    for one in (moe, twin):
        compare(one, torch.randn(9, K), torch.arange(9) % 3)
    twin.load_state_dict(moe.state_dict())
    assert torch.equal(twin.experts[0].weight, experts[0].weight)


def test_torch_compile_takes_the_dense_one_whole():
    moe, tokens, ids = layer(), torch.randn(9, K), torch.randint(0, EXPERTS, (9,))
    y = torch.compile(moe, fullgraph=True, backend="aot_eager")(tokens, ids)
    assert torch.allclose(y, moe(tokens, ids), atol=1e-6)
    torch._dynamo.reset()


def test_tuning_keeps_what_is_right():
    moe, tokens, ids = layer(experts=8), torch.randn(64, K), torch.randint(0, 8, (64, 2))
    configs = tune(moe, {"tokens": tokens, "exp_ids": ids, "gates": torch.rand(64, 2)}, max_trials=2, backward=True)
    assert configs[""]["_name"] in {"dense", "sorted"}
    compare(moe, tokens, ids)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: DynamicSparseMoE([]), ValueRangeError, "no experts"),
        (lambda: DynamicSparseMoE([nn.ReLU()]), SpartaError, "ReLU"),
        (lambda: DynamicSparseMoE([nn.Linear(2, 3), nn.Linear(3, 2)]), ShapeError, "one size for all"),
        (lambda: layer()(torch.randn(3, K + 1), torch.zeros(3, dtype=torch.int64)), ShapeError, "tokens of shape"),
        (lambda: layer()(torch.randn(3, K), torch.zeros(4, dtype=torch.int64)), ShapeError, "exp_ids of shape"),
        (lambda: layer()(torch.randn(3, K), torch.zeros(3)), ValueRangeError, "exp_ids of dtype"),
        (
            lambda: layer()(torch.randn(3, K), torch.tensor([0, 5, 1])),
            ValueRangeError,
            "from 0 to 4, not from 0 to 5",
        ),
        (lambda: layer()(torch.randn(1, K), torch.tensor([-1])), ValueRangeError, "from -1"),
        (lambda: layer()(torch.randn(3, K), torch.tensor([0, 1, 2]), torch.rand(3, 1)), ShapeError, "gates of shape"),
        (lambda: layer({"_name": "sorted"}, experts=1), ValueRangeError, "search space"),
    ],
)
def test_wrong_inputs_say_what_is_allowed(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_it_prints_what_runs():
    assert "5 experts, in_features=12, out_features=7, dense until tuned" in repr(layer())


def test_another_function_may_run_instead_of_the_kernel_for_a_while():
    moe, tokens = DynamicSparseMoE([nn.Linear(8, 4) for _ in range(3)]), torch.randn(5, 8)
    ids, seen = torch.zeros(5, dtype=torch.long), []

    def instead(rows, *others):
        seen.append((rows.shape, len(others)))
        return rows.new_ones(5, 4)

    before = moe(tokens, ids)
    with moe.run_by(instead):
        assert bool((moe(tokens, ids) == 1).all())
    with pytest.raises(ShapeError), moe.run_by(instead):
        moe(tokens[:, 1:], ids)
    assert seen == [((5, 8), 2 + 6)]  # ids and gates, and the parameters of three experts
    assert torch.equal(moe(tokens, ids), before)


def test_the_problem_that_is_measured_can_be_asked_for():
    moe, tokens, ids = DynamicSparseMoE([nn.Linear(8, 4)]), torch.randn(5, 8), torch.zeros(5, dtype=torch.long)
    problem = moe.problem((tokens, ids))
    assert problem.spec.op == "moe"
    problem.check(moe(tokens, ids).detach(), "the module itself")
